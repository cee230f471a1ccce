"""What the routes do: OpenAI's chat, completions and models, and what a server is asked besides. Python 3.9."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvgate.serving import chat, fields
from kvgate.serving.access import Access
from kvgate.serving.bodies import Gone
from kvgate.serving.context import CANCELLED, Run
from kvgate.serving.events import HEADERS, Events
from kvgate.serving.fields import Bad
from kvgate.serving.forms import Completion, Form
from kvgate.serving.handler import Handler, Route
from kvgate.serving.pieces import Piece
from kvgate.serving.service import Service
from kvgate.serving.transport import SPARE, Server
from kvgate.serving.worker import Job

_LOOK = 0.1  # seconds between looks whether a client that waits is still there


class ApiServer(Server):
    def __init__(
        self, address: tuple[str, int], service: Service, access: Access, say: Any, log: bool, beat: float = 10.0
    ) -> None:
        """The service's worker is started before `server_activate`.

        log: a line for each request; beat: seconds without a piece after which a stream gets a comment. Raises OSError
        where the address cannot be bound.
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
            "/v1/completions": Route("POST", self._completion),
            "/v1/models": Route("GET", self._models),
            "/health": Route("GET", self._health, open=True),
            "/healthz": Route("GET", self._health, open=True),
            "/metrics": Route("GET", self._metrics),
            "/tokenize": Route("POST", self._tokenize),
            "/detokenize": Route("POST", self._detokenize),
        }
        for name in self.service.names:
            found["/v1/models/" + name] = Route("GET", lambda body, name=name: self._model(name))  # type: ignore[misc]
        return found

    def route(self, path: str) -> Route:
        routes = self.routes()
        if path not in routes:
            known = ", ".join("{} {}".format(x.method, name) for name, x in routes.items())
            raise Bad("route: got {}, allowed: {}".format(path[:60], known), status=404)
        return routes[path]

    def note(self, text: str) -> None:
        if self.server.log:
            self.server.say("{} {} {}: {}".format(self.client_address[0], self.command, self.place[:80], text))

    def answered(self, status: int) -> None:
        known = self.place if self.place in self.routes() else "other"
        self.service.measures.request("/v1/models" if known.startswith("/v1/models") else known, status)

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
        self._answer(chat.parse(body, self.service.names, self.service.usual), Form)

    def _completion(self, body: bytes) -> None:
        self._answer(chat.parse_completion(body, self.service.names, self.service.usual), Completion)

    def _tokenize(self, body: bytes) -> None:
        """llama.cpp's: of a raw text; and ours: of a chat, up to where the answer begins."""
        given = fields.decoded(body)
        if "messages" in given:
            ids = self.service.prompt(chat.parse(body, self.service.names))
        else:
            fields.neutral(given, {"parse_special": (True,), "with_pieces": (False,)})
            text = fields.typed(given.pop("content", None), str, "content")
            ids = self.service.tokens(text, fields.typed(given.pop("add_special", False), bool, "add_special"))
            self._nothing_more(given)
        self.json(200, {"tokens": ids, "count": len(ids)})

    def _detokenize(self, body: bytes) -> None:
        given = fields.decoded(body)
        ids = fields.typed(given.pop("tokens", None), list, "tokens")
        for token in ids:
            if type(token) is not int:
                raise Bad("tokens: got {}, allowed: whole numbers".format(fields.short(token)), "tokens")
        self._nothing_more(given)
        self.json(200, {"content": self.service.words(ids)})

    def _nothing_more(self, given: dict[str, Any]) -> None:
        given.pop("model", None)
        for name in given:
            text = "{}: this route does not know the field".format(fields.short(name))
            raise Bad(text, name[:64], "unknown_parameter")

    def _answer(self, request: chat.Request, kind: type[Form]) -> None:
        """Raises Bad while nothing was sent; Gone."""
        service = self.service
        ids = service.prompt(request)
        service.check(request, ids)
        runs = [Run(len(ids)) for _ in range(request.answers)]
        name = None if request.options.logprobs is None else service.text.token
        form = kind(request.model, service.fingerprint, name)
        job = service.submit(request, ids, runs)
        self.connection.works(job)
        try:
            if request.stream:
                self._stream(request.usage, form, runs, job)
            else:
                found: list[list[Piece]] = [[] for _ in runs]
                for index, piece in self._pieces(runs, job):
                    if piece is not None:
                        found[index].append(piece)
                self.json(200, form.whole(runs, found))
        finally:
            service.worker.cancel(job)
        seconds = sum(x.first_seconds + x.seconds for x in runs)
        self.note("{} + {} tokens, {:.1f} s".format(len(ids), sum(len(x.tokens) for x in runs), seconds))

    def _pieces(
        self, runs: Sequence[Run], job: Job, silent: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Piece | None]]:
        """What the job makes, as it comes. `silent` is called after each `beat` seconds without. Raises Bad, Gone."""
        last = time.monotonic()
        for made in job.pieces(_LOOK):
            if self.connection.hung_up():
                raise Gone
            if made is not None:
                yield made
                last = time.monotonic()
            elif time.monotonic() - last >= self.server.beat:
                silent()
                last = time.monotonic()
        if runs[-1].finish == CANCELLED:
            raise Bad("the server is stopping", status=503, retry=1)

    def _stream(self, usage: bool, form: Form, runs: Sequence[Run], job: Job) -> None:
        """What is known before is refused with its status; what comes later is an event. Raises Gone."""
        chunked = self.request_version == "HTTP/1.1"
        self.close_connection = self.close_connection or not chunked
        connection = {"Connection": "close"} if self.close_connection else {}
        self.head(200, {**HEADERS, **({"Transfer-Encoding": "chunked"} if chunked else {}), **connection})
        events = Events(self.write, chunked)
        for index in range(len(runs)):
            for begin in form.first(index):
                events.data(begin)
        try:
            for index, piece in self._pieces(runs, job, lambda: events.comment("waiting")):
                events.data(form.last(runs[index], index) if piece is None else form.piece(piece, index))
            if usage:
                events.data(form.usage(runs))
            events.data("[DONE]")
        except Bad as why:  # too late for a status
            events.data(why.body())
            self.close_connection = True
            self.note(why.text)
        events.end()
