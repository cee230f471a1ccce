"""The one context that a bundle generates with: a cache, its host half, an engine, and the choice of the next token.

numpy only, Python 3.9.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvgate.board.engine import EngineError
from kvgate.strategies.host import Host

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


@dataclass(frozen=True)
class Options:
    """How tokens are chosen. temperature 0: the best one; else drawn from the most likely ones that sum to `top_p`."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass
class Run:
    """What a generation did so far. tokens: with the end-of-text token, if one came."""

    prompt: int
    reused: int = 0  # tokens of the prompt whose K and V were in the cache already
    tokens: list[int] = field(default_factory=list)
    finish: str = CANCELLED
    first_seconds: float = 0.0  # to the first token
    seconds: float = 0.0  # from the first token to the last


def pick(logits: np.ndarray, options: Options, draw: Callable[[], float]) -> int:
    """The next token of logits [V]. draw: a uniform number of [0, 1)."""
    if options.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, a weight of 0
        weights = np.exp((scaled - scaled.max()) / options.temperature)
    order = np.argsort(-weights, kind="stable")
    total = np.cumsum(weights[order])
    kept = int(np.searchsorted(total, options.top_p * total[-1])) + 1
    total = total[:kept]
    return int(order[min(np.searchsorted(total, draw() * total[-1], side="right"), len(total) - 1)])


class Context:
    """Generates from one prompt at a time; keeps the cache where the next prompt begins with the same tokens."""

    def __init__(
        self, engine: Any, host: Host, end_ids: Sequence[int], heed: Callable[[], None] = lambda: None
    ) -> None:
        """heed: called after each step of the engine; raises EngineError where the step failed nevertheless."""
        self.engine, self.host, self.end_ids, self.heed = engine, host, frozenset(end_ids), heed
        self.fed: list[int] = []  # the tokens in the cache
        self.stepping: float | None = None  # when the step began that is running now (time.monotonic)
        # A half that fills the cache its own way keeps slots its own way: that one starts over each time.
        self.by_position = type(host).fill is Host.fill

    @property
    def capacity(self) -> int:
        """The most tokens of a prompt; with n of them, capacity - n + 1 can be generated."""
        return self.host.contract.cache.capacity

    def check(self, ids: Sequence[int]) -> None:
        """Raises ValueError on a prompt without tokens, with more than the capacity, or outside the vocabulary."""
        if not ids:
            raise ValueError("prompt: got no tokens, allowed: at least 1")
        wrong = [x for x in ids if not 0 <= x < self.host.contract.vocabulary]
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
        self.check(ids)
        begin = time.monotonic()
        generator = np.random.Generator(np.random.PCG64(options.seed))
        run.reused = self._rewind(ids)
        for token in ids[run.reused :]:
            if stopped():
                return
            logits = self._step(token)
        first = time.monotonic()
        run.first_seconds = first - begin
        while True:
            token = pick(logits, options, generator.random)
            run.tokens.append(token)
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

    def _rewind(self, ids: Sequence[int]) -> int:
        """Cut the cache to what it has in common with `ids`; their last token is always fed. Returns the length."""
        kept = 0
        if self.by_position:
            for old, new in zip(self.fed, ids[:-1]):
                if old != new:
                    break
                kept += 1
        if kept == 0:
            self.host.reset()
        else:  # as if these tokens alone had been fed: the slots after them are as `reset` leaves them
            for key, value in self.host.views:
                key[kept:] = 0
                value[kept:] = 0
            self.host.length = kept
        del self.fed[kept:]
        return kept

    def _step(self, token: int) -> np.ndarray:
        """Feed a token; the logits [V] that it gives."""
        fed, self.fed = self.fed, []  # a step that fails leaves the cache in doubt
        self.stepping = time.monotonic()
        try:
            outputs = self.engine.step(self.host.feeds(token))
            self.heed()
            logits = self.host.take(outputs).logits
        finally:
            self.stepping = None
        if not np.isfinite(logits).all():
            raise EngineError("nan", "logits at position {}: got NaN or inf".format(self.host.length - 1))
        fed.append(token)
        self.fed = fed
        return logits
