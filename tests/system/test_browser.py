"""A web page of another origin and the server, in a real browser: what it keeps apart, and what the options allow."""

import json
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tinyrow
from serving.served import HI, ROUTE, Served

pytestmark = pytest.mark.system
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
# Each call's answer, or the name of the error that the browser gives instead, goes to the page's own server.
PAGE = """<!doctype html><script>
const url = "http://127.0.0.1:SERVER", json = {"Content-Type": "application/json", "Authorization": "Bearer sesame"};
const ask = async (path, options) => {
  try {
    const answer = await fetch(url + path, options);
    return answer.type == "opaque" ? "opaque" : [answer.status, await answer.text()];
  } catch (error) { return error.name; }
};
const post = (body, headers) => ({method: "POST", body: body, headers: headers});
(async () => {
  const found = {
    blob: await ask("ROUTE", {...post(new Blob([`BODY`])), mode: "no-cors"}),
    plain: await ask("ROUTE", {...post(`BODY`), mode: "no-cors"}),
    models: await ask("/v1/models", {headers: json}),
    chat: await ask("ROUTE", post(`BODY`, json)),
    stream: await ask("ROUTE", post(`STREAM`, json)),
    bad: await ask("ROUTE", post("{}", json)),
    nokey: await ask("/v1/models", {headers: {"X-Stainless-OS": "other"}}),
  };
  await fetch("/report", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class Pages(BaseHTTPRequestHandler):
    """Serves the page, takes its report."""

    def do_GET(self):
        data = self.server.page.encode() if self.path == "/" else b""
        self.send_response(200 if data else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        self.server.report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.came.set()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tinyrow.Rows(tmp_path_factory.mktemp("rows")).bundle(tinyrow.HOST)


@pytest.fixture
def pages():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    made.came = threading.Event()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def browse(pages, served, profile):
    """What the page reports."""
    browser = shutil.which("chromium")
    assert browser, "tests/system/install was not run"
    body = {"messages": HI, "max_tokens": 12}
    replaced = {
        "SERVER": str(served.port), "ROUTE": ROUTE, "BODY": json.dumps(body),
        "STREAM": json.dumps({**body, "stream": True}),
    }  # fmt: skip
    pages.page = PAGE
    for name, value in replaced.items():
        pages.page = pages.page.replace(name, value)
    command = [browser, *FLAGS, f"--user-data-dir={profile}", f"http://127.0.0.1:{pages.server_port}/"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        came = pages.came.wait(60)
    finally:
        process.terminate()
        said = process.communicate(timeout=20)[1]
    assert came, said[-2000:]
    return pages.report


def test_a_page_of_another_origin_gets_nothing(bundle, pages, tmp_path):
    with Served(bundle) as served:
        report = browse(pages, served, tmp_path / "profile")
        assert report.pop("blob") == report.pop("plain") == "opaque"  # they were sent, and refused
        assert set(report.values()) == {"TypeError"}
        assert served.engine.steps == 0
        refused = [x for x in served.terminal.said if "Origin: got" in x]
        assert len(refused) >= 7 and len(refused) == len(served.terminal.said)


def test_a_page_that_is_allowed_gets_answers_errors_and_streams(bundle, pages, tmp_path, monkeypatch):
    origin = f"http://127.0.0.1:{pages.server_port}"
    with Served(bundle, origins=(origin,), keys=("sesame",)) as served:
        report = browse(pages, served, tmp_path / "profile")
    assert report.pop("blob") == report.pop("plain") == "opaque"
    answers = {name: (status, text) for name, (status, text) in report.items()}
    assert {name: status for name, (status, _) in answers.items()} == {
        "models": 200, "chat": 200, "stream": 200, "bad": 400, "nokey": 401,
    }  # fmt: skip
    text = json.loads(answers["chat"][1])["choices"][0]["message"]["content"]
    parts = [json.loads(x[6:]) for x in answers["stream"][1].split("\n\n") if x.startswith("data: {")]
    assert "".join(x["choices"][0]["delta"].get("content", "") for x in parts) == text
    assert answers["stream"][1].endswith("data: [DONE]\n\n")
    assert json.loads(answers["bad"][1])["error"]["param"] == "messages"
    assert json.loads(answers["nokey"][1])["error"]["code"] == "invalid_api_key"
    # What came without the key, or of no type, made no step: a prompt of 21 tokens once, 11 tokens after it, and again.
    assert served.engine.steps == 21 + 11 + 1 + 11
