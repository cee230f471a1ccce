"""A host half whose cache buffers are the runtime's own memory. numpy only, Python 3.9."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvgate.contract import Contract
from kvgate.strategies import host

Slots = dict  # by state [S, Hk, D]


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
        buffers = {name: self.engine.views[name] if name in plain else x for name, x in self.buffers.items()}
        return buffers, self._views(self.contract.cache_inputs(), buffers)

    def _use(self, buffers: dict[str, np.ndarray], views: Slots) -> None:
        self.kept.buffers, self.kept.views = buffers, views

    def _swap(self) -> None:
        """There are two sides: each is made once."""
        self.engine.swap()
        other, self._other = self._other, (self.buffers, self.views)
        self._use(*(other or self._memory()))

    def take_cache(self, outputs: Mapping[str, np.ndarray], views: Slots, valid: int) -> tuple[Slots, float]:
        if not self.engine.swaps or self.contract.tokens > 1:  # the engine's two sides are those of the decode part
            return super().take_cache(outputs, views, valid)
        count = self.contract.cache.capacity
        grown = len(next(iter(views.values()))) > count  # the last slot is this step's, else it lies at its own place
        new = count if grown else self.length
        taken = {name: np.array(x[new : new + 1], np.float32) for name, x in views.items()}
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
            self.views[name][self.length : self.length + 1] = entries


def _float(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)
