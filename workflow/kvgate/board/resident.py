"""A host half whose cache buffers are the runtime's own memory. numpy only, Python 3.9."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgate.contract import Contract
from kvgate.strategies import host

Slots = dict  # by state [S, Hk, D]


@dataclass
class Sides:
    """One cache in several memories, a `Kept` each: `newest` is the one that was asked for last, and what it is."""

    newest: host.Kept


class Side(host.Host):
    """Goes before a host half whose part may have another one beside it, with a memory of its own for the cache.

    Whoever asks for the cache gets it up to date, copied once where the other side was asked last: layouts and types
    of the two may differ.
    """

    sides: Sides | None = None  # there is no other
    kind: type[host.Host]  # the strategy's

    @property
    def buffers(self) -> dict[str, np.ndarray]:
        return self._newest().buffers

    @property
    def views(self) -> Slots:
        return self._newest().views

    @property
    def length(self) -> int:
        return self.sides.newest.length if self.sides else self.kept.length

    @length.setter
    def length(self, length: int) -> None:
        (self.sides.newest if self.sides else self.kept).length = length

    def join(self, other: Side) -> None:
        """Let the other side's cache be this one's."""
        other.sides = self.sides = other.sides or Sides(other.kept)

    def _newest(self) -> host.Kept:
        if self.sides and self.sides.newest is not self.kept:
            newest, self.sides.newest = self.sides.newest, self.kept
            self.kept.length = newest.length
            for name, x in newest.views.items():
                self.kept.views[name][...] = x
        return self.kept


class Resident(host.Host):
    """Goes before a strategy's host half: its buffers are the memory of `engine` (native.Engine)."""

    engine: Any
    observes = True  # False: `Step.disturbed` stays 0, and a swapped cache is not read at all

    def __init__(self, contract: Contract, tables: Mapping[str, np.ndarray], mask_value: float) -> None:
        super().__init__(contract, tables, mask_value)
        self._use(*self._memory())
        self._other: Any = None  # buffers and views after a swap, where they are known

    def _memory(self) -> tuple[dict[str, np.ndarray], Slots]:
        """Buffers and views over the memory that the engine's next step reads."""
        plain = {t.name for t in self.contract.cache_inputs() if self.engine.boundaries[t.name].plain}
        buffers = {name: self.engine.views[name] if name in plain else x for name, x in self.kept.buffers.items()}
        return buffers, self._views(self.contract.cache_inputs() + self.contract.unread(), buffers)

    def _use(self, buffers: dict[str, np.ndarray], views: Slots) -> None:
        self.kept.buffers, self.kept.views = buffers, views

    def _swap(self) -> None:
        """There are two sides: each is made once."""
        self.engine.swap()
        other, self._other = self._other, (self.kept.buffers, self.kept.views)
        self._use(*(other or self._memory()))

    def take_cache(self, outputs: Mapping[str, np.ndarray], views: Slots, valid: int) -> tuple[Slots, float]:
        if not self.engine.swaps:
            return super().take_cache(outputs, views, valid)
        count = self.contract.cache.capacity
        grown = len(next(iter(views.values()))) > count  # the last slots are this step's, else they lie at their places
        new = count if grown else self.length
        taken = {name: np.array(x[new : new + valid], np.float32) for name, x in views.items()}
        disturbed = self._disturbed(views, taken, count, grown) if self.observes else 0.0
        self._swap()
        if grown:
            self._write(taken)
        return taken, disturbed

    def _disturbed(self, views: Slots, taken: Slots, count: int, grown: bool) -> float:
        if not grown:
            self._write(taken)  # into what was fed, which the next step overwrites
        returned = {name: _float(x[:count]) for name, x in views.items()}
        return host.relative_change(returned, {name: _float(self.views[name]) for name in views})

    def _write(self, taken: Slots) -> None:
        for name, entries in taken.items():
            self.views[name][self.length : self.length + len(entries)] = entries


def _float(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)
