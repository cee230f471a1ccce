"""The pieces of a decoder as one engine: each step goes through all of them, the residual stream from one to the next.

numpy only, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvgate.board import layertable
from kvgate.contract import HIDDEN, LOGITS, Contract


class Chain:
    def __init__(self, pieces: Sequence[tuple[Any, Contract]]) -> None:
        """pieces: the engine and the contract of each, in the order in which they run."""
        self.pieces = list(pieces)

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """feeds and outputs: of the whole graph."""
        return self._run(feeds)[0]

    def stream(self, feeds: Mapping[str, np.ndarray]) -> Any:
        """The residual stream after the last piece that gives one."""
        return self._run(feeds)[1]

    def _run(self, feeds: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Any]:
        found = {}  # type: dict[str, np.ndarray]
        stream = None  # type: np.ndarray | None
        for engine, contract in self.pieces:
            own = {t.name: stream if t.role == HIDDEN else feeds[t.name] for t in contract.inputs}
            outputs = engine.step(own)
            stream = next((outputs[t.name] for t in contract.outputs if t.role == HIDDEN), stream)
            for t in (x for x in contract.outputs if x.role != HIDDEN):
                # The logits may come in several pieces, side by side.
                before = [found[t.name]] if t.role == LOGITS and t.name in found else []
                found[t.name] = np.concatenate([*before, outputs[t.name]], -1) if before else outputs[t.name]
        return found, stream

    def last_us(self) -> dict[str, Any]:
        """The runtime's own times of a step together, where every piece has one."""
        asks = [getattr(engine, "last_us", None) for engine, _ in self.pieces]
        times = [ask()["run_us"] if ask else None for ask in asks]
        return {"run_us": None if None in times else sum(times)}

    def layers(self) -> dict[str, Any] | None:
        """The pieces' layer tables as one, None where an engine has none."""
        asks = [getattr(engine, "layers", None) for engine, _ in self.pieces]
        return None if None in asks else layertable.joined([ask() for ask in asks if ask])

    def close(self) -> None:
        for engine, _ in self.pieces:
            engine.close()
