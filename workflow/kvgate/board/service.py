"""The context behind its queue: who may use it, prompts and answers as text, and how it is. Python 3.9."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from kvgate.board import bundled, chat
from kvgate.board.chat import Bad
from kvgate.board.context import CANCELLED, STOP, Context, Run
from kvgate.board.text import Stops, Stream, Text
from kvgate.board.turns import Full, GaveUp, Queue

Pieces = Generator[str, None, None]
_STUCK = 60  # seconds of one step after which /healthz says so


class Gone(Exception):
    """The client hung up."""


class Service:
    """The context behind its queue, and what there is to say about it."""

    def __init__(self, bundle: bundled.Bundle, context: Context, text: Text, limit: int) -> None:
        self.name, self.context, self.text = bundle.name, context, text
        self.queue = Queue(limit)
        self.stopping = threading.Event()
        self.failed = ""  # why the last generation failed
        self.begun = int(time.time())
        self.fingerprint = "kvgate-" + bundle.contract.digest[:12]

    def model(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.begun,
            "owned_by": "kvgate",
            "context_length": self.context.capacity,
        }

    def health(self) -> tuple[int, dict[str, Any]]:
        """The status and the body of /healthz; asks nothing of the engine."""
        began, reason = self.context.stepping, self.failed
        if began is not None and time.monotonic() - began > _STUCK:
            reason = "a step has been running for {:.0f} s".format(time.monotonic() - began)
        busy = self.queue.length
        body = {
            "status": "failed" if reason else "ok",
            "model": self.name,
            "busy": busy > 0,
            "waiting": max(busy - 1, 0),
        }
        return (503, {**body, "reason": reason}) if reason else (200, body)

    def ids(self, request: chat.Request) -> list[int]:
        """The prompt. Raises Bad where it is none, or too long."""
        try:
            ids = self.text.chat(request.messages)
            if len(ids) <= self.context.capacity:
                self.context.check(ids)
                return ids
        except ValueError as error:
            raise Bad(str(error), "messages") from None
        raise Bad(
            "This model's maximum context length is {} tokens; the messages are {} tokens.".format(
                self.context.capacity, len(ids)
            ),
            "messages",
            "context_length_exceeded",
        )

    def pieces(self, request: chat.Request, ids: list[int], run: Run, hung_up: Callable[[], bool]) -> Pieces:
        """The answer's text, piece by piece, holding the context. Raises Bad, Gone."""
        try:
            with self.queue.turn(lambda: hung_up() or self.stopping.is_set()):
                yield from self._generate(request, ids, run, lambda: hung_up() or self.stopping.is_set())
        except Full:
            text = "as many requests wait as may ({}); try again later".format(self.queue.limit)
            raise Bad(text, code="rate_limit_exceeded", status=429, retry=self.queue.retry_after()) from None
        except GaveUp:
            pass
        if run.finish == CANCELLED:
            if self.stopping.is_set():
                raise Bad("the server is stopping", status=503, retry=1)
            raise Gone

    def _generate(self, request: chat.Request, ids: list[int], run: Run, stopped: Callable[[], bool]) -> Pieces:
        stream, stops = Stream(self.text.decode), Stops(request.stops)
        tokens = self.context.generate(ids, request.options, run, stopped)
        try:
            for token in tokens:
                piece, stop = stops.push("" if token in self.context.end_ids else stream.push(token))
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
        except Exception as error:  # an engine's runtime raises what it likes
            self.failed = bundled.one_line(error)
            raise Bad("the model failed: {}".format(self.failed), status=500) from None
        finally:
            tokens.close()
