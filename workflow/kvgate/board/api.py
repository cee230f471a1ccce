"""What the routes do: OpenAI's chat, completions and models, and what a server is asked besides. Python 3.9."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from kvgate.board import chat, measures
from kvgate.board.access import Access
from kvgate.board.bodies import Gone
from kvgate.board.chat import Bad
from kvgate.board.context import CANCELLED, Run
from kvgate.board.events import HEADERS, Events
from kvgate.board.handler import Handler, Route
from kvgate.board.service import Service
from kvgate.board.transport import SPARE, Server
from kvgate.board.worker import Job

_LOOK = 0.1  # seconds between looks whether a client that waits is still there


class ApiServer(Server):
    def __init__(
        self, address: tuple[str, int], service: Service, access: Access, say: Any, log: bool, beat: float = 10.0
    ) -> None:
        """log: a line for each request; beat: seconds without a piece after which a stream gets a comment.

        Raises OSError where the address cannot be bound.
        """
        self.service, self.access, self.log, self.beat = service, access, log, beat
        super().__init__(address, Api, service.worker.limit + 1 + SPARE, say)


class Api(Handler):
    server: ApiServer

    @property
    def service(self) -> Service:
        return self.server.service

    @property
    def access(self) -> Access:
        return self.server.access

    def routes(self) -> dict[str, Route]:
        found = {
            "/v1/chat/completions": Route("POST", self._chat),
            "/v1/models": Route("GET", self._models),
            "/health": Route("GET", self._health, open=True),
            "/healthz": Route("GET", self._health, open=True),
            "/metrics": Route("GET", self._metrics),
        }
        for name in self.service.names:
            found["/v1/models/" + name] = Route("GET", lambda body, name=name: self._model(name))  # type: ignore[misc]
        return found

    def route(self, path: str) -> Route:
        routes = self.routes()
        if path not in routes:
            known = ", ".join("{} {}".format(x.method, name) for name, x in routes.items())
            raise Bad("{} {}: unknown, allowed: {}".format(self.command[:20], path[:60], known), status=404)
        return routes[path]

    def note(self, text: str) -> None:
        if self.server.log:
            route = self.path.partition("?")[0]
            self.server.say("{} {} {}: {}".format(self.client_address[0], self.command, route, text))

    def answered(self, status: int) -> None:
        path = self.path.partition("?")[0]
        self.service.measures.request(path if path in self.routes() else "other", status)

    # The routes

    def _health(self, body: bytes) -> None:
        self.json(*self.service.health())

    def _metrics(self, body: bytes) -> None:
        kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        self.send(200, self.service.metrics().encode(), kind)

    def _models(self, body: bytes) -> None:
        self.json(200, {"object": "list", "data": [self.service.model(x) for x in self.service.names]})

    def _model(self, name: str) -> None:
        self.json(200, self.service.model(name))

    def _chat(self, body: bytes) -> None:
        request = chat.parse(body, self.service.names[0])
        try:
            ids = self.service.text.chat(request.messages)
        except ValueError as error:
            raise Bad(str(error), "messages") from None
        self.service.check(ids, "messages")
        self._answer(request, ids)

    def _answer(self, request: chat.Request, ids: list[int]) -> None:
        """Raises Bad while nothing was sent; Gone."""
        run = Run(len(ids))
        head = {
            "id": "chatcmpl-" + os.urandom(12).hex(),
            "created": int(time.time()),
            "model": self.service.names[0],
            "system_fingerprint": self.service.fingerprint,
        }
        job = self.service.submit(request, ids, run)
        self.connection.works()
        try:
            if request.stream:
                self._stream(request, head, run, job)
            else:
                text = "".join(x for x in self._pieces(run, job) if x)
                self.connection.answers()
                self.json(200, {**chat.answer(run, text, head), "timings": measures.timings(run)})
        finally:
            self.service.worker.cancel(job)
        self.note("{} + {} tokens, {:.1f} s".format(run.prompt, len(run.tokens), run.first_seconds + run.seconds))

    def _pieces(self, run: Run, job: Job) -> Iterator[str]:
        """Pieces as they come, and an empty one after `beat` seconds without one. Raises Bad, Gone."""
        silent = time.monotonic()
        for piece in job.pieces(_LOOK):
            if self.connection.hung_up():
                raise Gone
            if job.ended:  # what is left is to be sent: a client that does not read may have to make room
                self.connection.answers()
            if piece is not None or time.monotonic() - silent >= self.server.beat:
                silent = time.monotonic()
                yield piece or ""
        if run.finish == CANCELLED:
            raise Bad("the server is stopping", status=503, retry=1)

    def _stream(self, request: chat.Request, head: dict[str, Any], run: Run, job: Job) -> None:
        """What is known before is refused with its status; what comes later is an event. Raises Gone."""
        chunked = self.request_version == "HTTP/1.1"
        self.close_connection = self.close_connection or not chunked
        connection = {"Connection": "close"} if self.close_connection else {}
        self.head(200, {**HEADERS, **({"Transfer-Encoding": "chunked"} if chunked else {}), **connection})
        events = Events(self.write, chunked)
        events.data(chat.chunk(head, {"role": "assistant", "content": ""}))
        try:
            for piece in self._pieces(run, job):
                if piece:
                    events.data(chat.chunk(head, {"content": piece}))
                else:
                    events.comment("waiting")
            events.data({**chat.chunk(head, {}, run.finish), "timings": measures.timings(run)})
            if request.usage:
                events.data({**head, "object": "chat.completion.chunk", "choices": [], "usage": chat.usage(run)})
            events.data("[DONE]")
        except Bad as why:  # too late for a status
            events.data(why.body())
            self.close_connection = True
            self.note(why.text)
        events.end()
