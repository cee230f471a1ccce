"""The choice of the next token from a model's logits, and what is told of its probability. numpy only, Python 3.9."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Options:
    """How tokens are chosen: logits are changed (repetition, presence and frequency, bias), then one is taken.

    temperature 0 takes the best one. Else probabilities are softmax(logits / temperature), and one is drawn from what
    top_k, then top_p, then min_p leave, in this order, which is transformers' and vLLM's.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0  # of what top_k left: the likeliest that sum to this share, the one that reaches it among them
    seed: int | None = None
    top_k: int = 0  # the likeliest k; 0: all
    min_p: float = 0.0  # those with at least this share of the likeliest one's probability
    repetition: float = 1.0  # logits of tokens of prompt and answer: divided by it above 0, multiplied below
    presence: float = 0.0  # subtracted from the logits of tokens that the answer has
    frequency: float = 0.0  # subtracted for each time that the answer has the token
    bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    logprobs: int | None = None  # tell each token's log probability, and those of so many likeliest ones


@dataclass(frozen=True)
class Logprob:
    """Natural log of softmax(logits) as the model gave them: at temperature 1, before any change."""

    token: int
    value: float
    best: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first


class Sampler:
    """Chooses the tokens of one answer."""

    def __init__(self, options: Options, prompt: Sequence[int]) -> None:
        self.options = options
        self.random = np.random.Generator(np.random.PCG64(options.seed))
        self.seen = set(prompt)
        self.answer: Counter[int] = Counter()
        self.neutral = options.repetition == 1 and not (options.presence or options.frequency or options.bias)

    def next(self, logits: np.ndarray) -> int:
        """The next token of logits [V], which stay as they are."""
        token = pick(logits if self.neutral else self._changed(logits), self.options, self.random.random)
        if not self.neutral:
            self.seen.add(token)
            self.answer[token] += 1
        return token

    def _changed(self, logits: np.ndarray) -> np.ndarray:
        options, found = self.options, np.array(logits)
        if options.repetition != 1:
            ids = np.fromiter(self.seen, np.int64)
            some = found[ids]
            found[ids] = np.where(some > 0, some / options.repetition, some * options.repetition)
        if self.answer:
            ids = np.fromiter(self.answer, np.int64)
            times = np.fromiter(self.answer.values(), found.dtype)
            found[ids] -= options.presence + options.frequency * times
        for token, value in options.bias.items():
            found[token] += value
        return found


def pick(logits: np.ndarray, options: Options, draw: Callable[[], float]) -> int:
    """One token of logits [V]. draw: a uniform number of [0, 1)."""
    if options.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, a weight of 0
        weights = np.exp((scaled - scaled.max()) / options.temperature)
    order = _best(weights, options.top_k or len(weights))
    total = np.cumsum(weights[order])
    kept = int(np.searchsorted(total, options.top_p * total[-1])) + 1
    if options.min_p:
        kept = min(kept, int((weights[order] >= options.min_p).sum()))  # the likeliest one has weight 1
    total = total[:kept]
    return int(order[min(np.searchsorted(total, draw() * total[-1], side="right"), len(total) - 1)])


def logprob(logits: np.ndarray, token: int, count: int) -> Logprob:
    """Of the token, and of the `count` likeliest ones."""
    log = logits.astype(np.float64)
    log -= log.max()
    log -= np.log(np.exp(log).sum())
    return Logprob(token, float(log[token]), tuple((int(x), float(log[x])) for x in _best(log, count)))


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` largest values, largest first, of equal ones the first; quick where they are few."""
    if not count:
        return np.empty(0, np.int64)
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    least = np.partition(values, len(values) - count)[len(values) - count]
    places = np.flatnonzero(values >= least)
    return places[np.argsort(-values[places], kind="stable")][:count]
