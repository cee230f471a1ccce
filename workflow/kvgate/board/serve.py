"""Serve a bundle over HTTP with OpenAI's chat route: POST /v1/chat/completions, GET /v1/models, GET /healthz.

One context: requests are answered one at a time, in order; a few wait, the rest are sent away with 429.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvgate.board import bundled, chat
from kvgate.board.chat import Bad
from kvgate.board.context import Run
from kvgate.board.engine import EngineError
from kvgate.board.service import Gone, Pieces, Service
from kvgate.board.terminal import Terminal
from kvgate.board.text import Unavailable

_BODY = 1 << 20  # bytes of a request, at most
_IDLE = 30  # seconds that a client may be silent
_SPARE = 16  # connections beyond those that may wait
_LOOPBACK = ("127.0.0.1", "::1")
_END = 5  # seconds that the running answer has to stop at the end


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], service: Service, terminal: Terminal, log: bool) -> None:
        """Raises OSError where the address cannot be bound."""
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.service, self.terminal, self.log = service, terminal, log
        self.working: set[Handler] = set()  # that answer a request now
        self.room = threading.BoundedSemaphore(service.queue.limit + _SPARE)
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service, which may take its time on a board without a network.
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.room.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        body = json.dumps(Bad("too many connections", status=503).body()).encode()
        with contextlib.suppress(OSError):
            request.settimeout(1)
            request.sendall(_RAW.format(len(body)).encode() + body)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error; a mistake of ours is one line, not a trace."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.terminal.say("serve: {}: {}".format(type(error).__name__, error))


_RAW = (
    "HTTP/1.1 503 Busy\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\n\r\n"
)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "kvgate", ""
    timeout = _IDLE
    disable_nagle_algorithm = True  # a token is a packet

    @property
    def service(self) -> Service:
        return self.server.service

    def do_GET(self) -> None:
        path, service = self.path.partition("?")[0], self.service
        if self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"):
            self.close_connection = True  # what follows is a body that nobody reads
        if self._foreign():
            self._bad(self._foreign_host())
        elif path == "/healthz":
            self._json(*service.health())
        elif path == "/v1/models":
            self._json(200, {"object": "list", "data": [service.model()]})
        elif path == "/v1/models/" + service.name:
            self._json(200, service.model())
        else:
            self._bad(self._unknown(path))

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        self.server.working.add(self)
        try:
            body = self._body()
            if self._foreign():
                raise self._foreign_host()
            if path != "/v1/chat/completions":
                raise self._unknown(path)
            request = chat.parse(body, self.service.name)
            ids = self.service.ids(request)
            self._answer(request, ids)
        except Bad as why:
            self._bad(why)
        except Gone:
            self.close_connection = True
            self._note("client gone")
        finally:
            self.server.working.discard(self)

    def _answer(self, request: chat.Request, ids: list[int]) -> None:
        """Raises Bad while nothing was sent, Gone."""
        run = Run(len(ids))
        pieces = self.service.pieces(request, ids, run, self._hung_up)
        head = {
            "id": "chatcmpl-" + os.urandom(12).hex(),
            "created": int(time.time()),
            "model": self.service.name,
            "system_fingerprint": self.service.fingerprint,
        }
        try:
            if request.stream:
                self._stream(request, head, run, pieces)
            else:
                text = "".join(pieces)
                self._json(200, chat.answer(run, text, head))
        except OSError:
            raise Gone from None
        finally:
            pieces.close()
        self._note("{} + {} tokens, {:.1f} s".format(run.prompt, len(run.tokens), run.first_seconds + run.seconds))

    def _stream(self, request: chat.Request, head: dict[str, Any], run: Run, pieces: Pieces) -> None:
        first = next(pieces, "")  # what is refused is refused with its status
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        chunked = self.request_version == "HTTP/1.1"
        self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Connection", "close")))
        self.end_headers()

        def send(event: str) -> None:
            data = "data: {}\n\n".format(event).encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)

        send(json.dumps(chat.chunk(head, {"role": "assistant", "content": ""})))
        try:
            if first:
                send(json.dumps(chat.chunk(head, {"content": first})))
            for piece in pieces:
                send(json.dumps(chat.chunk(head, {"content": piece})))
            send(json.dumps(chat.chunk(head, {}, run.finish)))
            if request.usage:
                send(json.dumps({**head, "object": "chat.completion.chunk", "choices": [], "usage": chat.usage(run)}))
            send("[DONE]")
        except Bad as why:  # too late for a status
            send(json.dumps(why.body()))
            self.close_connection = True
            self._note(why.text)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _body(self) -> bytes:
        """Raises Bad on a body that is too large, of unknown length or of another type."""
        lengths = self.headers.get_all("Content-Length", [])
        text = lengths[0] if len(lengths) == 1 else ""
        if self.headers.get("Transfer-Encoding") or not (text.isascii() and text.isdigit()):
            raise self._unread(Bad("body: got no Content-Length, allowed: one, and no other encoding", status=411))
        if int(text[:12]) > _BODY or len(text) > 12:
            raise self._unread(Bad("body: got {} bytes, allowed: {}".format(text[:20], _BODY), status=413))
        body = self.rfile.read(int(text))
        if len(body) < int(text):
            raise Gone
        # A web page of someone else may send any other type to a server on this machine without being asked.
        kind = self.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Bad("Content-Type: got {!r}, allowed: application/json".format(kind[:60]), status=415)
        return body

    def _unread(self, why: Bad) -> Bad:
        """The connection ends with the answer, as the body stands in it."""
        self.close_connection = True
        return why

    def _unknown(self, path: str) -> Bad:
        routes = "POST /v1/chat/completions, GET /v1/models, GET /healthz"
        return Bad("{} {}: unknown, allowed: {}".format(self.command, path[:60], routes), status=404)

    def _foreign(self) -> bool:
        """Whether a name that is not this machine's was asked for, on an address that only this machine reaches.

        A web page can make its own name mean 127.0.0.1, and then read the answers.
        """
        name = self.headers.get("Host", "").rpartition(":")
        host = (name[0] if name[2].isdigit() else "".join(name)).strip("[]").lower()
        return host not in ("", "localhost", *_LOOPBACK) and self.server.server_name in _LOOPBACK

    def _foreign_host(self) -> Bad:
        return Bad("Host: got {!r}, allowed: localhost".format(self.headers.get("Host", "")[:60]), status=403)

    def _hung_up(self) -> bool:
        """Whether the client has closed its side. What it sends early stays where it is."""
        try:
            if not select.select([self.connection], [], [], 0)[0]:
                return False
            return not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _bad(self, why: Bad) -> None:
        self._json(why.status, why.body(), {"Retry-After": str(why.retry)} if why.retry else {})
        self._note(why.text)

    def _json(self, status: int, body: dict[str, Any], more: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(more or {})}
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        if self.close_connection:
            self._drain()

    def _drain(self) -> None:
        """Let the client read the answer before the connection is reset for what it has sent and nobody read."""
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1)
            end = time.monotonic() + 5
            while time.monotonic() < end and self.connection.recv(1 << 16):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself, in our form."""
        self.close_connection = True
        self._json(code, Bad(message or explain or "", status=code).body())

    def log_message(self, format: str, *args: Any) -> None:
        """Our own lines say more."""

    def _note(self, text: str) -> None:
        if self.server.log:
            route = self.path.partition("?")[0] if self.path else ""
            self.server.terminal.say("{} {} {}: {}".format(self.client_address[0], self.command, route, text))


def parser(folder: Path) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="serve.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    made.add_argument(
        "--port", type=bundled.number(int, 0, 65535), default=8000, help="0: any free one (default: 8000)"
    )
    made.add_argument(
        "--queue", type=bundled.number(int, 0, 1000), default=8, help="requests that may wait (default: 8)"
    )
    made.add_argument("--quiet", action="store_true", help="no line for each request")
    bundled.options(made, folder)
    made.epilog = (
        "Who can reach the port can use the model: there is no password. It is greedy unless temperature is sent."
    )
    return made


def main(argv: list[str], folder: Path) -> int:
    args = parser(folder).parse_args(argv)
    terminal = Terminal(args.show_runtime)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    context = None
    try:
        bundle = bundled.Bundle(args.bundle)
        text = bundle.text()
        context = bundled.open_context(args, bundle, terminal)
        service = Service(bundle, context, text, args.queue)
        try:
            server = Server((args.host, args.port), service, terminal, not args.quiet)
        except OSError as error:
            raise bundled.Refused("{}:{}: {}".format(args.host, args.port, error.strerror or error)) from None
        _serve(server)
        return 0
    except (bundled.Refused, Unavailable, EngineError, ValueError) as error:
        terminal.say("serve: {}".format(bundled.one_line(error)))
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        if context is not None and context.stepping is None:  # a step that hangs holds the runtime
            context.close()


def _serve(server: Server) -> None:
    """Until ctrl-C or SIGTERM; then the running answer ends early, and the context is free."""
    service = server.service
    host = "[{}]".format(server.server_name) if ":" in server.server_name else server.server_name
    server.terminal.say(
        "serving {} on http://{}:{}/v1 (context {} tokens); ctrl-C ends it".format(
            service.name, host, server.server_port, service.context.capacity
        )
    )
    if server.server_name not in _LOOPBACK:
        server.terminal.say("other machines reach this address, and there is no password")
    try:
        server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        server.terminal.say("stopping")
    service.stopping.set()
    server.socket.close()
    end = time.monotonic() + _END
    while server.working and time.monotonic() < end:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path()))
