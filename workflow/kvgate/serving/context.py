"""The one context that a bundle generates with: a cache, its host half, an engine, and what it has of earlier prompts.

numpy only, Python 3.9.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvgate.board import parts
from kvgate.board.engine import EngineError
from kvgate.serving.kept import Kept, common
from kvgate.serving.sampling import Logprob, Options, Sampler, logprob
from kvgate.strategies.host import Host, Step

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"
KEEP = 64 << 20  # bytes of earlier conversations


@dataclass
class Run:
    """What a generation did so far. tokens: with the end-of-text token, if one came."""

    prompt: int
    reused: int = 0  # tokens of the prompt whose K and V were in the cache already
    tokens: list[int] = field(default_factory=list)
    finish: str = CANCELLED
    first_seconds: float = 0.0  # to the first token
    seconds: float = 0.0  # from the first token to the last
    logprobs: list[Logprob] = field(default_factory=list)  # one a token, where they were asked for


class Context:
    """Generates from one prompt at a time. What it begins with alike with the one before, or with an earlier one that
    is kept, is not computed again."""

    def __init__(
        self,
        engine: Any,
        host: Host,
        end_ids: Sequence[int],
        heed: Callable[[], None] = lambda: None,
        keep: int = KEEP,
        prefill: tuple[Any, Host] | None = None,
    ) -> None:
        """heed: called after each step of the engine; raises EngineError where the step failed nevertheless.

        keep: bytes for earlier conversations. prefill: engine and host half of the part that takes many tokens of a
        prompt at once, over the same cache.
        """
        self.prefill = prefill
        self.engine, self.host, self.end_ids, self.heed = engine, host, frozenset(end_ids), heed
        self.fed: list[int] = []  # the tokens in the cache
        self.asked = 0  # how many of them are the last prompt's
        self.kept = Kept(keep)
        self.stepping: float | None = None  # when the step began that is running now (time.monotonic)
        # A half that fills the cache its own way keeps slots its own way: that one starts over each time.
        self.by_position = type(host).fill is Host.fill and len(host.appended) == len(host.states)

    @property
    def capacity(self) -> int:
        """The most tokens of a prompt; with n of them, capacity - n + 1 can be generated."""
        return self.host.contract.cache.capacity

    def check(self, ids: Sequence[int], options: Options = Options()) -> None:  # noqa: B008
        """Raises ValueError on a prompt without tokens, with more than the capacity, or outside the vocabulary; on a
        bias of such a token, too."""
        if not ids:
            raise ValueError("prompt: got no tokens, allowed: at least 1")
        wrong = [x for x in (*ids, *options.bias) if not 0 <= x < self.host.contract.vocabulary]
        if wrong:
            raise ValueError("token id: got {}, allowed: 0 to {}".format(wrong[0], self.host.contract.vocabulary - 1))
        if len(ids) > self.capacity:
            raise ValueError("prompt: got {} tokens, allowed: at most {}".format(len(ids), self.capacity))

    def generate(
        self, ids: Sequence[int], options: Options, run: Run, stopped: Callable[[], bool] = lambda: False
    ) -> Generator[int, None, None]:
        """Tokens one by one as they are made, to an end-of-text token, `max_tokens` or the full cache.

        `stopped` is asked before each step. `run` is kept up to date; its `finish` stays `cancelled` where the
        generation was stopped. Raises ValueError as `check`, EngineError where a step fails or gives no finite logits.
        """
        self.check(ids, options)
        begin = time.monotonic()
        sampler = Sampler(options, ids)
        run.reused = self._rewind(ids)
        at = run.reused
        while at < len(ids) and not stopped():
            size = self._chunk(len(ids) - at)
            if self.prefill and size > 1:
                self._feed(self.prefill[0], self.prefill[1], list(ids[at : at + size]))
            else:
                logits = self._step(ids[at])
            at += size
        if at < len(ids):
            return
        first = time.monotonic()
        run.first_seconds = first - begin
        while True:
            token = sampler.next(logits)
            run.tokens.append(token)
            if options.logprobs is not None:
                run.logprobs.append(logprob(logits, token, options.logprobs))
            run.seconds = time.monotonic() - first
            if token in self.end_ids:
                run.finish = STOP
            elif len(run.tokens) == options.max_tokens or self.host.length == self.capacity:
                run.finish = LENGTH
            yield token
            if run.finish != CANCELLED or stopped():
                return
            logits = self._step(token)

    def close(self) -> None:
        self.engine.close()
        if self.prefill:
            self.prefill[0].close()

    def _chunk(self, left: int) -> int:
        """How many of the prompt's last `left` tokens go in one step: the last one gives the logits, by itself."""
        return parts.chunk(left, self.prefill[1].contract.tokens) if self.prefill else 1

    def _rewind(self, ids: Sequence[int]) -> int:
        """Make the cache hold what it, or a kept conversation, has in common with `ids`; their last token is always
        fed. Returns the length."""
        length, other = 0, None
        if self.by_position:
            before = ids[:-1]
            length = common(self.fed, before)
            kept, longer = self.kept.best(before)
            if longer > length:
                other = kept
            # Another answer to the prompt that is there takes the place of its last one.
            if length < len(self.fed) and not (other is None and length == len(before) and len(ids) >= self.asked):
                self.kept.save(self.fed, self.host.views)
            if other is not None:
                self.kept.load(other, longer, self.host.views)
                self.fed, length = other.tokens[:longer], longer
        if length == 0:
            self.host.reset()
        else:  # as if these tokens alone had been fed: the slots after them are as `reset` leaves them
            for slots in self.host.views.values():
                slots[length:] = 0
            self.host.length = length
        del self.fed[length:]
        self.asked = len(ids)
        return length

    def _step(self, token: int) -> np.ndarray:
        """Feed a token; the logits [V] that it gives."""
        logits = self._feed(self.engine, self.host, [token]).logits
        assert logits is not None
        return np.asarray(logits)

    def _feed(self, engine: Any, host: Host, tokens: list[int]) -> Step:
        """Feed tokens to a part."""
        fed, self.fed = self.fed, []  # a step that fails leaves the cache in doubt
        self.stepping = time.monotonic()
        try:
            outputs = engine.step(host.feeds(tokens))
            self.heed()
            step = host.take(outputs, len(tokens))
        finally:
            self.stepping = None
        # A part without logits is told by what it keeps.
        for name, x in step.states.items() if step.logits is None else [("logits", step.logits)]:
            if not np.isfinite(x).all():
                raise EngineError("nan", "{} at position {}: got NaN or inf".format(name, self.host.length - 1))
        self.fed = fed + tokens
        return step
