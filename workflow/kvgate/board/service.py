"""A bundle's model behind its worker: prompts and answers as text, and how it is. Python 3.9."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvgate.board import bundled
from kvgate.board.chat import Bad
from kvgate.board.context import CANCELLED, STOP, Context, Run
from kvgate.board.measures import Measures
from kvgate.board.text import Stops, Stream, Text
from kvgate.board.worker import Full, Job, Worker

_STUCK = 60  # seconds of one step after which /health says so


class Service:
    def __init__(self, bundle: bundled.Bundle, text: Text, worker: Worker, aliases: Sequence[str] = ()) -> None:
        """worker: of a Context, started before the first request; aliases: names beside the bundle's own."""
        self.names = (bundle.name, *(x for x in aliases if x != bundle.name))
        self.text, self.worker = text, worker
        self.measures = Measures()
        self.failed = ""  # why the last generation failed
        self.begun = int(time.time())
        self.fingerprint = "kvgate-" + bundle.contract.digest[:12]
        self.capacity = bundle.contract.cache.capacity

    def model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.begun,
            "owned_by": "kvgate",
            "context_length": self.capacity,
        }

    def health(self) -> tuple[int, dict[str, Any]]:
        """The status and the body of /health; asks nothing of the engine."""
        began, reason = self.worker.context.stepping, self.failed
        if began is not None and time.monotonic() - began > _STUCK:
            reason = "a step has been running for {:.0f} s".format(time.monotonic() - began)
        busy = self.worker.length
        body = {
            "status": "failed" if reason else "ok",
            "model": self.names[0],
            "busy": busy > 0,
            "waiting": max(busy - 1, 0),
        }
        return (503, {**body, "reason": reason}) if reason else (200, body)

    def metrics(self) -> str:
        busy = self.worker.length
        now = {
            "requests_running": min(busy, 1),
            "requests_waiting": max(busy - 1, 0),
            "queue_limit": self.worker.limit,
        }
        return self.measures.text(now)

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raises Bad on a prompt that has no tokens, wrong ones, or too many. param: the field it came from."""
        if len(ids) > self.capacity:
            text = "This model's maximum context length is {} tokens; the {} are {} tokens."
            what = "messages" if param == "messages" else "prompt's tokens"
            raise Bad(text.format(self.capacity, what, len(ids)), param, "context_length_exceeded")
        try:
            self.worker.context.check(ids)
        except ValueError as error:
            raise Bad(str(error), param) from None

    def submit(self, request: Any, ids: Sequence[int], run: Run) -> Job:
        """A job whose pieces are the answer's text; request: its `options` and `stops`. Raises Bad (429)."""

        def work(context: Context, stopped: Callable[[], bool]) -> Iterator[str]:
            return self._generate(context, request, ids, run, stopped)

        try:
            return self.worker.submit(work)
        except Full:
            text = "as many requests wait as may ({}); try again later".format(self.worker.limit)
            raise Bad(text, code="rate_limit_exceeded", status=429, retry=self.worker.retry_after()) from None

    def _generate(
        self, context: Context, request: Any, ids: Sequence[int], run: Run, stopped: Callable[[], bool]
    ) -> Iterator[str]:
        """In the worker's thread. Raises Bad."""
        stream, stops = Stream(self.text.decode), Stops(request.stops)
        tokens = context.generate(ids, request.options, run, stopped)
        try:
            for token in tokens:
                piece, stop = stops.push("" if token in context.end_ids else stream.push(token))
                if run.finish != CANCELLED and not stop:
                    rest, stop = stops.push(stream.finish())
                    piece += rest + ("" if stop else stops.held)
                if stop:
                    run.finish = STOP
                if piece:
                    yield piece
                if stop:
                    break
            self.failed = ""
        except (Exception, SystemExit) as error:  # an engine's runtime raises what it likes
            self.failed = bundled.one_line(error) or type(error).__name__  # type: ignore[arg-type]
            raise Bad("the model failed: {}".format(self.failed), status=500) from None
        finally:
            tokens.close()
            self.measures.generation(run)
