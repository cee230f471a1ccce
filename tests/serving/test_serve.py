"""The HTTP endpoint, spoken to by the openai package and by clients that do what they should not."""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest
import tinyrow
from kvgate.serving import answers
from kvgate.serving.chat import parse
from kvgate.serving.fields import Bad
from served import HI, ROUTE, Served, wait_for

# A real client


def test_a_chat_is_the_reference_s(rows, served):
    answer = served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=12)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", rows.trace["text"])
    assert choice.finish_reason == "length" and answer.model == "tiny" and answer.object == "chat.completion"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (21, 12, 33)
    assert usage.prompt_tokens_details.cached_tokens == 0
    again = served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=12)
    assert again.choices == answer.choices and again.id != answer.id
    assert again.usage.prompt_tokens_details.cached_tokens == 20


def test_a_stream_is_the_same_text(rows, served):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == rows.trace["text"]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1 and len(chunks) > 5
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


def test_a_conversation_of_several_turns_reuses_what_it_had(served):
    client = served.client
    first = client.chat.completions.create(model="tiny", messages=HI, max_tokens=3)
    turns = [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    second = client.chat.completions.create(model="tiny", messages=turns, max_tokens=1)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens


def test_stop_and_sampling(rows, served):
    text = rows.trace["text"]
    stop = text[-3:]
    answer = served.client.chat.completions.create(model="tiny", messages=HI, stop=[stop, "never"])
    assert answer.choices[0].message.content == text[: text.find(stop)] and answer.choices[0].finish_reason == "stop"
    options = {"temperature": 1.7, "top_p": 0.9, "max_completion_tokens": 10}
    drawn = [
        served.client.chat.completions.create(model="tiny", messages=HI, seed=s, **options).choices[0].message.content
        for s in (5, 5, -6)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_models_and_health(served):
    (model,) = served.client.models.list().data
    assert model.id == "tiny" and model.context_length == tinyrow.CAPACITY
    assert served.client.models.retrieve("tiny").id == "tiny"
    assert served.ask("GET", "/healthz")[::2] == (200, {"status": "ok", "model": "tiny", "busy": False, "waiting": 0})


def test_the_client_sees_openai_s_errors(served):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 99}])
    assert caught.value.code == "context_length_exceeded" and caught.value.type == "invalid_request_error"
    assert "maximum context length is 48 tokens; the messages are 118 tokens" in str(caught.value)
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.chat.completions.create(model="gpt-9", messages=HI)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        served.client.embeddings.create(model="tiny", input="x")


# Bad input


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b"", None, "got no JSON"),
        (b"{", None, "got no JSON"),
        (b"\xff\xfe", None, "got no JSON"),
        (b'{"messages": NaN}', None, "NaN is no JSON"),
        (b"[" * 100_000, None, "nested too deeply"),
        ([], None, "got a list, allowed: a JSON object"),
        ({}, "messages", "at least one message"),
        ({"messages": None}, "messages", "at least one message"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "Hi"}, "messages", 'got "Hi"'),
        ({"messages": ["Hi"]}, "messages[0]", "got a text, allowed: an object"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "allowed: system, developer, user"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "got null"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content", "got null, allowed: a text"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "got 7"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "got []"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "type text"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages", "surrogate"),
        ({"messages": [{**HI[0], "tool_calls": [1]}]}, "messages[0]", "tool_calls: not supported"),
        ({"messages": HI, "n": True}, "n", "got true"),
        ({"messages": HI, "tools": [{}]}, "tools", "allowed: []"),
        ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format", "allowed"),
        ({"messages": HI, "beam_width": 4}, "beam_width", "does not know the field"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens", "got 0"),
        ({"messages": HI, "max_tokens": 1.5}, "max_tokens", "got 1.5"),
        ({"messages": HI, "max_tokens": "9"}, "max_tokens", 'got "9"'),
        ({"messages": HI, "temperature": 2.1}, "temperature", "allowed: 0 to 2"),
        ({"messages": HI, "temperature": "hot"}, "temperature", "allowed: 0 to 2"),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}', "temperature", "0 to 2"),
        ({"messages": HI, "top_p": -1}, "top_p", "got -1"),
        ({"messages": HI, "seed": 1.5}, "seed", "got 1.5"),
        ({"messages": HI, "stop": [""]}, "stop", "not empty"),
        ({"messages": HI, "stop": ["x"] * 33}, "stop", "up to 32"),
        ({"messages": HI, "stream": "yes"}, "stream", "allowed: true or false"),
        ({"messages": HI, "stream_options": {"include_usage": True}}, "stream_options", "with stream"),
        ({"messages": HI, "model": ["a"]}, "model", "allowed: tiny"),
    ],
)  # fmt: skip
def test_bad_input_is_400_in_openai_s_form(served, body, param, said):
    status, headers, answer = served.ask(body=body, Content_Type="application/json")
    error = answer["error"]
    assert status == (404 if param == "model" else 400) and headers["Content-Type"] == "application/json"
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert said in error["message"] and len(error["message"]) < 250
    assert served.engine.steps == 0


def test_what_asks_for_nothing_is_taken():
    more = {
        "n": 1, "user": "me", "tools": None, "logprobs": False, "presence_penalty": 0.0, "temperature": None,
        "stop": None, "response_format": {"type": "text"}, "max_tokens": 10**40, "seed": -1, "metadata": {"a": "b"},
    }  # fmt: skip
    found = parse(json.dumps({"messages": HI, **more}).encode(), ["tiny"])
    assert found.options.temperature == 0 and found.options.seed == 2**64 - 1 and found.messages == HI
    with pytest.raises(Bad):
        parse(json.dumps({"messages": HI, "presence_penalty": False}).encode(), ["tiny"])


def test_a_body_that_is_too_large_is_413(served):
    status, headers, answer = served.ask(body=b'"' + b"x" * (1 << 20) + b'"')
    assert (status, headers["Connection"]) == (413, "close") and "allowed: 1048576" in answer["error"]["message"]
    status, _, answer = served.ask(body=b"{}", Content_Length="9" * 5000)
    assert status == 413


def test_bodies_of_another_kind(served):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        status, _, answer = served.ask(body={"messages": HI}, Content_Type=kind)
        assert status == 415 and "allowed: application/json" in answer["error"]["message"]
    assert served.ask()[0] == 415  # a Blob of a page: no type at all
    assert served.ask(body={"messages": HI, "max_tokens": 1}, Content_Type="Application/JSON; charset=utf-8")[0] == 200
    assert served.ask(body=b"{}", Content_Length="-1")[0] == 411
    assert served.ask(body=b"{}", Transfer_Encoding="gzip, chunked")[0] == 400
    assert served.engine.steps == 21


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/x", 404),
        ("PUT", "/nothing", 404),
        ("GET", ROUTE, 405),
        ("HEAD", ROUTE, 405),
        ("PUT", ROUTE, 405),
        ("PATCH", ROUTE, 405),
        ("BREW", ROUTE, 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models/tiny", 405),
    ],
)
def test_other_routes_and_methods(served, method, path, status):
    found, headers, answer = served.ask(method, path, body={})
    assert found == status and headers["Connection"] == "close"
    if method != "HEAD":
        assert "allowed: " in answer["error"]["message"]
    allowed = {ROUTE: "POST, OPTIONS", "/health": "GET, HEAD, OPTIONS", "/v1/models/tiny": "GET, HEAD, OPTIONS"}
    assert headers.get("Allow") == (allowed[path] if status == 405 else None)


@pytest.mark.parametrize("path", ["/health", "/healthz", "/v1/models", "/v1/models/tiny", "/metrics"])
def test_head_is_get_without_the_body(served, path):
    got, asked = served.ask("GET", path), served.ask("HEAD", path)
    assert (asked[0], asked[2]) == (200, b"")
    assert asked[1]["Content-Type"] == got[1]["Content-Type"] and int(asked[1]["Content-Length"]) > 0


def test_what_is_no_http(served):
    for data in (b"\x16\x03\x01 hello\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 70_000):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall(data)
            answer = connection.recv(1 << 16)
            assert b"Traceback" not in answer
    assert served.ask("GET", "/healthz")[0] == 200
    assert not [x for x in served.terminal.said if "Error" in x], served.terminal.said


def test_another_page_s_name_for_this_machine_is_refused(served):
    body = {"messages": HI, "max_tokens": 1}
    assert served.ask(body=body, Host="evil.example")[0] == 403
    assert served.ask("GET", "/v1/models", Host="evil.example:80")[0] == 403
    for name in ("localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1"):
        assert served.ask(body=body, Host=name)[0] == 200


def test_several_requests_over_one_connection(rows, served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    for body in ({"messages": HI, "max_tokens": 12}, {}, {"messages": HI, "max_tokens": 12, "stream": True}) * 2:
        connection.request("POST", ROUTE, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse().read()
        assert answer
    connection.close()
    text = [json.loads(x[6:]) for x in answer.decode().split("\n\n") if x.startswith("data: {")]
    assert "".join(x["choices"][0]["delta"].get("content", "") for x in text) == rows.trace["text"]
    assert answer.endswith(b"data: [DONE]\n\n")


def test_an_old_client_gets_a_stream_until_the_end(served):
    data = json.dumps({"messages": HI, "max_tokens": 4, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        head = f"POST {ROUTE} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        answer = connection.makefile("rb").read()
    assert answer.endswith(b"data: [DONE]\n\n") and b"chunked" not in answer


# One context


def test_requests_wait_in_order_and_too_many_are_429(rows, served):
    served.engine.go.clear()
    answers = {}

    def ask(n):
        answers[n] = served.ask(body={"messages": HI, "max_tokens": 12})

    threads = []
    for n in range(3):
        threads.append(threading.Thread(target=ask, args=(n,)))
        threads[-1].start()
        wait_for(lambda n=n: served.worker.length == n + 1)
    status, headers, answer = served.ask(body={"messages": HI})
    assert status == 429 and answer["error"]["code"] == "rate_limit_exceeded" and int(headers["Retry-After"]) >= 1
    health = served.ask("GET", "/healthz")
    assert health[0] == 200 and (health[2]["busy"], health[2]["waiting"]) == (True, 2)
    with pytest.raises(openai.RateLimitError):
        served.client.chat.completions.create(model="tiny", messages=HI, stream=True)
    served.engine.go.set()
    for thread in threads:
        thread.join()
    assert [answers[n][0] for n in range(3)] == [200] * 3
    assert {answers[n][2]["choices"][0]["message"]["content"] for n in range(3)} == {rows.trace["text"]}


def test_openai_s_own_retry_gets_through(rows, served):
    served.engine.seconds = 0.02
    clients = [served.client.with_options(max_retries=5) for _ in range(6)]
    found = []

    def ask(client):
        found.append(
            client.chat.completions.create(model="tiny", messages=HI, max_tokens=12).choices[0].message.content
        )

    threads = [threading.Thread(target=ask, args=(x,)) for x in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [rows.trace["text"]] * 6


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_the_context(rows, served, stream):
    served.engine.seconds = 0.05
    connection = served.raw(stream=stream)
    if stream:
        assert b"data: " in connection.recv(4096) + connection.recv(4096)
    else:
        wait_for(lambda: served.engine.steps > 3)
    connection.close()
    served.idle()
    assert served.engine.steps < tinyrow.CAPACITY
    served.engine.seconds = 0
    assert (
        served.ask(body={"messages": HI, "max_tokens": 12})[2]["choices"][0]["message"]["content"] == rows.trace["text"]
    )
    assert "client gone" in served.terminal.said[0]


def test_a_client_that_hangs_up_while_it_waits_frees_its_place(served):
    served.engine.go.clear()
    first = served.raw()
    wait_for(lambda: served.worker.length == 1)
    second = served.raw()
    wait_for(lambda: served.worker.length == 2)
    second.close()
    wait_for(lambda: served.worker.length == 1)
    first.close()
    served.engine.go.set()
    served.idle()


def test_a_client_that_does_not_read_is_let_go_and_holds_nobody_up(served, monkeypatch):
    monkeypatch.setattr(answers, "chunk", lambda *_, **__: {"filled": "x" * 500_000})
    connection = served.raw(stream=True)
    wait_for(lambda: served.worker.length == 1)
    served.idle()  # the model is free though nothing was read
    wait_for(lambda: not served.server.connections)
    assert served.terminal.said == [f"127.0.0.1 POST {ROUTE}: client gone"]
    connection.close()


def test_a_failing_engine_is_500_and_said_by_the_health_check(rows, served):
    served.engine.fails = True
    with pytest.raises(openai.InternalServerError, match="the model failed: the NPU is gone"):
        served.client.chat.completions.create(model="tiny", messages=HI)
    status, _, answer = served.ask("GET", "/healthz")
    assert status == 503 and answer["reason"] == "the NPU is gone" and not answer["busy"]
    served.engine.fails = False
    answer = served.ask(body={"messages": HI, "max_tokens": 12})[2]
    assert answer["choices"][0]["message"]["content"] == rows.trace["text"]
    assert served.ask("GET", "/healthz")[0] == 200


def test_an_engine_that_fails_in_a_stream_ends_it_with_the_error(served):
    served.engine.fails_after = 30  # the prompt has 21 tokens, and the first ones of the answer have no text
    with pytest.raises(openai.APIError, match="the NPU is gone"):
        list(served.client.chat.completions.create(model="tiny", messages=HI, stream=True))
    assert served.engine.steps == 31
    served.engine.steps = 0
    with served.raw(stream=True) as connection:
        answer = connection.makefile("rb").read()  # the server closes
    assert b"the NPU is gone" in answer and b"[DONE]" not in answer


def test_a_step_that_hangs_is_said_by_the_health_check(served, monkeypatch):
    monkeypatch.setattr("kvgate.serving.service._STUCK", 0.1)
    served.engine.go.clear()
    connection = served.raw()
    wait_for(lambda: served.worker.context.stepping)
    time.sleep(0.2)
    status, _, answer = served.ask("GET", "/healthz")
    assert status == 503 and answer["reason"].startswith("a step has been running for")
    served.engine.go.set()
    connection.close()


# The program


def start(bundle: Path, *words: str) -> tuple[subprocess.Popen, str, int]:
    command = [sys.executable, "-I", str(bundle / "serve.py"), "--port", "0", *words]
    process = subprocess.Popen(
        command, cwd="/", env=tinyrow.bare(), stderr=subprocess.PIPE, text=True, preexec_fn=tinyrow.interruptible
    )
    line = process.stderr.readline()
    return process, line, int(line.split("/v1")[0].rpartition(":")[2])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_starts_says_where_and_ends_cleanly(rows, bundle, how):
    process, line, port = start(bundle)
    try:
        assert line == f"serving tiny on http://127.0.0.1:{port}/v1 (context 48 tokens); ctrl-C ends it\n"
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12)
        assert answer.choices[0].message.content == rows.trace["text"]
        process.send_signal(how)
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    lines = sorted(said.splitlines())
    assert lines[0].startswith(f"127.0.0.1 POST {ROUTE}: 21 + 12 tokens, ") and lines[1:] == ["stopping"], said


def test_a_client_cannot_write_on_the_terminal(bundle):
    process, _, port = start(bundle)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST /\x1b[31m HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        assert b"404" in connection.recv(4096)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert "POST /?[31m" in said and "\x1b" not in said


def test_an_answer_that_is_cut_by_the_end_says_so(bundle):
    served = Served(bundle)
    try:
        served.engine.seconds = 0.02
        connection = served.raw(stream=True)
        assert b"data: " in connection.recv(4096) + connection.recv(4096)
        served.worker.stopping.set()
        rest = connection.makefile("rb").read()
        assert b"the server is stopping" in rest and b"[DONE]" not in rest
        assert served.ask(body={"messages": HI})[0] == 503
    finally:
        served.close()


def test_a_port_that_is_taken_is_one_line_before_the_model_is_loaded(bundle, tmp_path):
    bundle = damaged(bundle, tmp_path / "bundle", "model.onnx", b"no model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = tinyrow.generate(bundle, "--port", str(port), program="serve.py")
    assert (ran.returncode, ran.stderr) == (1, f"serve: 127.0.0.1:{port}: Address already in use\n")


def test_ipv6(bundle):
    process, line, port = start(bundle, "--host", "::1")
    try:
        assert f"http://[::1]:{port}/v1" in line
        connection = http.client.HTTPConnection("::1", port, timeout=10)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_its_options_reach_the_server(rows, bundle, tmp_path):
    """On all addresses with a key: no warning, and the key is nowhere in what is said."""
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    words = ("--host", "0.0.0.0", "--api-key-file", str(keys), "--alias", "gpt-4o", "--allow-origin", "http://a:1")
    process, line, port = start(bundle, *words, "--max-tokens", "12", "--api-key", "other")
    try:
        assert line == f"serving tiny on http://0.0.0.0:{port}/v1 (context 48 tokens); ctrl-C ends it\n"
        for key in ("sesame", "other"):
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key)
            answer = client.chat.completions.create(
                model="gpt-4o", messages=HI, extra_headers={"Origin": "http://a:1", "Host": "board.lan"}
            )
            assert answer.choices[0].message.content == rows.trace["text"]
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="guess").models.list()
        with pytest.raises(openai.PermissionDeniedError):
            client.with_options(default_headers={"Origin": "http://b:1"}).models.list()
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=20)[1]
    assert process.returncode == 0 and "no key or a wrong one" in said
    assert not [x for x in ("sesame", "other", "guess") if x in said]


def test_an_address_of_the_network_without_a_key_is_warned_of(bundle):
    process, _, _ = start(bundle, "--host", "0.0.0.0")
    warning = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert warning == "other machines reach this address, and there is no key: --api-key-file FILE\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--api-key-file", "/nothing"), "serve: --api-key-file /nothing: No such file or directory\n"),
        (("--api-key", "two words"), "serve: API key: got an empty one or other characters"),
        (("--allow-origin", "localhost:3000"), "serve: --allow-origin: got 'localhost:3000', allowed: *, null, or"),
        (("--host", "256.1.1.1"), "serve: 256.1.1.1:0: "),
    ],
)
def test_options_that_are_wrong_are_one_line(bundle, words, said):
    ran = tinyrow.generate(bundle, "--port", "0", *words, program="serve.py")
    assert ran.returncode == 1 and ran.stderr.startswith(said) and ran.stderr.count("\n") == 1
    assert "two words" not in ran.stderr


def test_it_starts_again_at_once_where_it_has_just_served(bundle):
    process, _, port = start(bundle)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b"200" in connection.makefile("rb").read()  # the server closes first
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    process, line, again = start(bundle, "--port", str(port))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert again == port, line


@pytest.mark.parametrize("closed", [(2,), (1, 2), (0, 1, 2)])
def test_it_serves_with_closed_streams(rows, bundle, closed, tmp_path):
    port = free_port()
    words = " ".join(f"{x}{'<' if x == 0 else '>'}&-" for x in closed)
    command = f'exec "$0" -I "$1" --port {port} {words}'
    process = subprocess.Popen(["sh", "-c", command, sys.executable, str(bundle / "serve.py")], env=tinyrow.bare())
    try:
        wait_for(lambda: asked(port))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12)
        assert answer.choices[0].message.content == rows.trace["text"]
    finally:
        process.terminate()
    assert process.wait(20) == 0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as made:
        return made.getsockname()[1]


def asked(port):
    """Whether the server answers that it is well."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_it_serves_when_nobody_reads_its_lines_any_more(bundle):
    process, _, port = start(bundle)
    process.stderr.close()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        for _ in range(3):  # each wants to say a line
            connection.request("POST", ROUTE, b"{}", {"Content-Type": "application/json"})
            assert connection.getresponse().read().startswith(b'{"error"')
        connection.close()
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def damaged(bundle, folder, name, data):
    """A copy of the bundle with another file in it, of the size that bundle.json says if that can be."""
    shutil.copytree(bundle, folder)
    path = folder / name
    facts = json.loads((folder / "bundle.json").read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if name in facts["sizes"]:
        facts["sizes"][name] = len(data)
        (folder / "bundle.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("name", ["tokenizer.json", "host.npz", "bundle.json", "graph_contract.json", "model.onnx"])
@pytest.mark.parametrize("data", [b"", b"\x00\xff" * 300, b"{}", b"[]", b'{"version": 1}'])
def test_a_damaged_file_is_one_line(bundle, tmp_path, name, data):
    folder = damaged(bundle, tmp_path / "bundle", name, data)
    ran = tinyrow.generate(folder, "--port", "0", program="serve.py")
    assert ran.returncode == 1 and ran.stdout == ""
    assert ran.stderr.startswith("serve: ") and ran.stderr.count("\n") == 1 and len(ran.stderr) > 20, ran.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise OSError('librknnrt.so: cannot open shared object file')", "librknnrt.so: cannot open"),
        ("raise AttributeError('no attribute rknn_x')", "no attribute rknn_x"),
        ("raise SystemError('initialization failed')", "initialization failed"),
        ("raise SystemExit(-1)", "SystemExit: -1"),
        ("raise ImportError", "ImportError"),
        ("import os\nos.write(2, b'E RKNN: x')\nos.close(1)\nos.close(2)\nraise RuntimeError('all')", "all"),
        ("class RKNNLite:\n    def __init__(self, **_): raise OSError('made')", "made"),
    ],
)  # fmt: skip
def test_a_runtime_that_cannot_be_imported_is_one_line(rows, tmp_path, body, said):
    folder = damaged(rows.bundle(tinyrow.CHIP), tmp_path / "bundle", "rknnlite/api.py", body.encode())
    ran = tinyrow.generate(folder, "--port", "0", program="serve.py")
    assert ran.returncode == 1 and said in ran.stderr
    assert ran.stderr.startswith("serve: ") and ran.stderr.count("\n") == 1, ran.stderr
