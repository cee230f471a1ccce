"""A server of a bundle in this process, whose engine can be slow, stand still or fail. Not a test."""

import http.client
import json
import socket
import threading
import time

import openai
from kvgate.board.engine import EngineError
from kvgate.board.ort import Engine
from kvgate.serving.access import Access
from kvgate.serving.api import ApiServer
from kvgate.serving.bundled import Bundle
from kvgate.serving.context import Context
from kvgate.serving.sampling import Options
from kvgate.serving.service import Service
from kvgate.serving.transport import Limits
from kvgate.serving.worker import Worker

HI = [{"role": "user", "content": "Hi"}]
ROUTE = "/v1/chat/completions"
USUAL = Options()


class Quick(Limits):
    """What a test may wait for."""

    head = body = write = 1.0


class Slow:
    """An engine that takes its time, fails when told to, and knows the threads that used it."""

    def __init__(self, engine):
        self.engine, self.seconds, self.fails, self.fails_after, self.steps = engine, 0.0, False, 1 << 30, 0
        self.go = threading.Event()
        self.go.set()
        self.closed, self.threads = False, {threading.get_ident()}

    def step(self, feeds):
        self.threads.add(threading.get_ident())
        assert self.go.wait(30)
        time.sleep(self.seconds)
        self.steps += 1
        if self.fails or self.steps > self.fails_after:
            raise EngineError("hang", "the NPU is gone")
        return self.engine.step(feeds)

    def close(self):
        self.threads.add(threading.get_ident())
        self.closed = True


class Lines:
    """The terminal of the tests."""

    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


class Served:
    """A server in this process, on a free port."""

    def __init__(self, folder, limit=2, aliases=(), beat=10.0, usual=USUAL, **access):
        opened, self.terminal = Bundle(folder), Lines()

        def open_context():
            engine = Engine({}, folder, opened.contract)
            engine.open(lambda phase: None)
            self.engine = Slow(engine)
            return Context(self.engine, opened._host(engine), opened.facts["end_ids"])

        self.worker = Worker(open_context, limit)
        self.worker.start()
        self.service = Service(opened, opened.text(), self.worker, aliases, usual)
        self.server = ApiServer(
            ("127.0.0.1", 0), self.service, Access(**access), self.terminal.say, log=True, beat=beat
        )
        self.server.server_activate()
        self.server.limits = Quick
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def client(self):
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=30)

    def ask(self, method="POST", path=ROUTE, body=None, **headers):
        """Status, headers and JSON (or bytes) of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        names = {k.replace("_", "-"): v for k, v in headers.items()}
        connection.request(method, path, data, {"Content-Type": "application/json"} | names if data else names)
        answer = connection.getresponse()
        status, headers, data = answer.status, dict(answer.headers), answer.read()
        connection.close()
        return status, headers, json.loads(data) if headers.get("Content-Type") == "application/json" and data else data

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def raw(self, **options):
        """A connection over which a chat was asked for."""
        data = json.dumps({"messages": HI, **options}).encode()
        made = self.connect()
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        made.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return made

    def idle(self):
        """Wait until nobody uses the context. Returns the seconds."""
        begin = time.monotonic()
        while self.worker.length:
            assert time.monotonic() - begin < 20
            time.sleep(0.01)
        return time.monotonic() - begin

    def close(self):
        self.engine.go.set()
        self.worker.stopping.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        assert self.worker.stop(20)


def wait_for(condition):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 20
        time.sleep(0.01)
