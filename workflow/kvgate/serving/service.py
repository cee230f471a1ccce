"""A bundle's model behind its worker: prompts and answers as text, and how it is. Python 3.9."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvgate.serving import bundled
from kvgate.serving.chat import Request
from kvgate.serving.context import CANCELLED, Context, Run
from kvgate.serving.fields import Bad
from kvgate.serving.measures import Measures
from kvgate.serving.pieces import Piece, pieces
from kvgate.serving.sampling import Options
from kvgate.serving.text import Text
from kvgate.serving.worker import Full, Job, Worker

_STUCK = 60  # seconds of one step after which /health says so


class Service:
    def __init__(
        self, bundle: bundled.Bundle, text: Text, worker: Worker, aliases: Sequence[str], usual: Options
    ) -> None:
        """worker: of a Context, started before the first request; aliases: names beside the bundle's own; usual: what
        holds where a request says nothing."""
        self.usual = usual
        self.names = (bundle.name, *(x for x in aliases if x != bundle.name))
        self.text, self.worker = text, worker
        self.measures = Measures()
        self.failed = ""  # why the last generation failed
        self.begun = int(time.time())
        self.fingerprint = "kvgate-" + bundle.contract.digest[:12]
        self.capacity, self.vocabulary = bundle.contract.cache.capacity, bundle.contract.vocabulary

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

    def prompt(self, request: Request) -> list[int]:
        """The prompt's tokens. Raises Bad where it cannot be one."""
        try:
            if request.prompt is None:
                return self.text.chat(request.messages)
            return self.text.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        except ValueError as error:
            raise Bad(str(error), _field(request)) from None

    def check(self, request: Request, ids: Sequence[int]) -> None:
        """Raises Bad on too many tokens, on none, and on those that the model does not have."""
        param = _field(request)
        if len(ids) > self.capacity:
            text = "This model's maximum context length is {} tokens; the {} {} tokens."
            what = "messages are" if request.prompt is None else "prompt is"
            raise Bad(text.format(self.capacity, what, len(ids)), param, "context_length_exceeded")
        try:
            self.worker.context.check(ids)
            param = "logit_bias"
            self.worker.context.check(ids, request.options)
        except ValueError as error:
            raise Bad(str(error), param) from None

    def submit(self, request: Request, ids: Sequence[int], runs: Sequence[Run]) -> Job:
        """A job whose pieces are (index of the answer, Piece), and (index, None) at an answer's end.

        runs: one for each answer, kept up to date. Raises Bad (429).
        """

        def work(context: Context, stopped: Callable[[], bool]) -> Iterator[tuple[int, Piece | None]]:
            for index, run in enumerate(runs):
                options = request.option(index)
                for piece in self._generate(context, ids, options, request.stops, run, stopped):
                    yield index, piece
                if run.finish == CANCELLED:
                    return
                yield index, None

        try:
            return self.worker.submit(work)
        except Full:
            text = "as many requests wait as may ({}); try again later".format(self.worker.limit)
            raise Bad(text, code="rate_limit_exceeded", status=429, retry=self.worker.retry_after()) from None

    def _generate(
        self,
        context: Context,
        ids: Sequence[int],
        options: Options,
        stops: Sequence[str],
        run: Run,
        stopped: Callable[[], bool],
    ) -> Iterator[Piece]:
        """In the worker's thread. Raises Bad."""
        try:
            yield from pieces(context, self.text, ids, options, stops, run, stopped)
            self.failed = ""
        except (Exception, SystemExit) as error:  # an engine's runtime raises what it likes
            self.failed = bundled.one_line(error)
            raise Bad("the model failed: {}".format(self.failed), status=500) from None
        finally:
            self.measures.generation(run)

    def tokens(self, text: str, start: bool) -> list[int]:
        """Of a raw text, in which special tokens may be spelled. start: with the tokenizer's own start token."""
        try:
            return self.text.encode(text, start)
        except ValueError as error:
            raise Bad(str(error), "content") from None

    def words(self, ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens."""
        wrong = [x for x in ids if not 0 <= x < self.vocabulary]
        if wrong:
            text = "tokens: got {}, allowed: 0 to {}".format(wrong[0], self.vocabulary - 1)
            raise Bad(text, "tokens")
        return str(self.text.tokenizer.decode(list(ids), skip_special_tokens=False))


def _field(request: Request) -> str:
    """Where the prompt stands."""
    return "messages" if request.prompt is None else "prompt"
