"""HTTP as this server speaks it: requests with deadlines and limits, errors in OpenAI's form, CORS. Python 3.9.

What the routes do is in the class that inherits.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from kvgate.serving import bodies
from kvgate.serving.access import Access, loopback
from kvgate.serving.bodies import Gone
from kvgate.serving.fields import Bad
from kvgate.serving.transport import Connection

_LINE = 1 << 16  # bytes of the first line, at most
_DRAIN = 5.0  # seconds of reading what nobody wants, before the connection ends


@dataclass(frozen=True)
class Route:
    """method: GET or POST; answer: gets the body (of GET: empty) and may raise Bad and Gone."""

    method: str
    answer: Callable[[bytes], None]
    open: bool = False  # without a key

    @property
    def allowed(self) -> tuple[str, ...]:
        return ("GET", "HEAD", "OPTIONS") if self.method == "GET" else (self.method, "OPTIONS")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # a status also for what is no HTTP
    connection: Any
    path, status = "", 0  # of the request; of its answer, 0 while there is none

    def route(self, path: str) -> Route:
        """Raises Bad (404)."""
        raise NotImplementedError

    def note(self, text: str) -> None:
        """A line of the log."""

    def answered(self, status: int) -> None:
        """Called once a request. status: 499 where the client was gone before it had one."""

    @property
    def place(self) -> str:
        """The request's path without its query, which may hold what is nobody else's business."""
        return unquote(self.path.partition("?")[0])

    @property
    def access(self) -> Access:
        raise NotImplementedError

    # The life of a connection

    def setup(self) -> None:
        self.connection = self.request
        assert isinstance(self.connection, Connection)
        self.rfile = io.BufferedReader(self.connection, 1 << 14)
        self.wfile = self.connection  # type: ignore[assignment]

    def finish(self) -> None:
        """The server closes the connection."""

    def handle(self) -> None:
        self.close_connection = True
        self.handle_one_request()
        while not self.close_connection:
            self.connection.next_request()
            self.handle_one_request()

    def handle_one_request(self) -> None:
        self.close_connection, self._unread, self.status = True, False, 0
        self.command, self.path = "", ""
        self.requestline, self.request_version, self.headers = "", self.protocol_version, None  # type: ignore[assignment]
        try:
            self.raw_requestline = self.rfile.readline(_LINE + 1)
            if not self.raw_requestline:
                return
            if len(self.raw_requestline) > _LINE:
                self.send_error(414, "the first line is too long")
            elif self.parse_request():
                self._respond()
        except socket.timeout:
            if self.connection.heard and not self.status:
                self.send_error(408, "the request came too slowly")
            self.close_connection = True

    def handle_expect_100(self) -> bool:
        return True  # said when the body is wanted

    def _respond(self) -> None:
        self.connection.answers()
        names = self.headers.get_all("Content-Length", []) + self.headers.get_all("Transfer-Encoding", [])
        self._unread = names not in ([], ["0"])
        try:
            try:
                self._routed()
            except Bad as why:
                self._bad(why)
            except Gone:
                raise
            except Exception as error:  # a mistake of ours; the server says it
                if not self.status:
                    self._bad(Bad("the server failed: {}".format(type(error).__name__), status=500))
                raise
        except Gone:
            self.close_connection = True
            self.note("client gone")
            if not self.status:
                self.answered(499)

    def _routed(self) -> None:
        """Raises Bad, Gone."""
        self.access.check(self.headers, loopback(self.server.server_name))  # type: ignore[attr-defined]
        route = self.route(self.place)
        if self.command == "OPTIONS":
            return self.send(204, b"", self.access.preflight(self.headers, ", ".join(route.allowed)))
        if self.command not in route.allowed:
            allowed = ", ".join(route.allowed)
            raise Bad("method: got {}, allowed: {}".format(self.command[:20], allowed), status=405)
        if not route.open:
            self.access.check_key(self.headers)
        route.answer(self._body() if route.method == "POST" else b"")

    def _body(self) -> bytes:
        """Raises Bad, Gone."""
        # A web page of someone else may send any other type to a server on this machine without being asked.
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Bad("Content-Type: got {!r}, allowed: application/json".format(kind[:60]), status=415)
        length = bodies.size(self.headers)
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        self.connection.reads_body()
        found = bodies.read(self.rfile, length)
        self.connection.answers()
        self._unread = False
        return found

    # Answers

    def json(self, status: int, body: Mapping[str, Any], more: Mapping[str, str] | None = None) -> None:
        self.send(status, json.dumps(body).encode(), {"Content-Type": "application/json", **(more or {})})

    def send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        if self._unread:
            self.close_connection = True  # what follows is a body that nobody read
        more = {} if status == 204 else {"Content-Length": str(len(data))}
        self.head(status, {**headers, **more, **({"Connection": "close"} if self.close_connection else {})})
        if self.command != "HEAD":
            self.write(data)
        if self.close_connection:
            self._drain()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """The status and all headers. Raises Gone."""
        self.status = status
        self.answered(status)
        self.send_response(status)
        for name, value in {**headers, **(self.access.cors(self.headers) if self.headers else {})}.items():
            self.send_header(name, value)
        try:
            self.end_headers()
        except OSError:
            raise Gone from None

    def write(self, data: bytes) -> None:
        """Raises Gone."""
        try:
            self.wfile.write(data)
        except OSError:
            raise Gone from None

    def _bad(self, why: Bad) -> None:
        more = {"Retry-After": str(why.retry)} if why.retry else {}
        if why.status == 401:
            more["WWW-Authenticate"] = "Bearer"
        if why.status == 405:
            more["Allow"] = ", ".join(self.route(self.place).allowed)
        self.note(why.text)  # before the client knows: it may end us then
        self.json(why.status, why.body(), more)

    def _drain(self) -> None:
        """Let the client read the answer before the connection is reset for what it has sent and nobody read."""
        with contextlib.suppress(OSError):
            self.connection.closes(_DRAIN)
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.read(1 << 16):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself, in our form."""
        self.close_connection = True
        with contextlib.suppress(Gone):
            self.json(code, Bad(message or explain or "", status=code).body())

    def version_string(self) -> str:
        return "kvgate"

    def log_message(self, format: str, *args: Any) -> None:
        """Our own lines say more."""
