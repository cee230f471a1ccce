"""A piece of a decoder in the simulator: it is fed the stream that the piece before it gave, step by step.

The forced and the isolated steps of a program are known before they run, so one piece can run all of them before the
next one begins: each is built and simulated in a process of its own, and no two are in memory at once.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvgate.contract import HIDDEN, Contract
from kvgate.observe import compact

Array = np.ndarray


class Piece:
    """The engine of a piece; of a whole graph it is that engine."""

    def __init__(self, engine: Any, contract: Contract, given: str | None) -> None:
        """given: the observations of the piece before, an .npz; None: there is none."""
        self.engine, self.contract = engine, contract
        self.reads = next((t for t in contract.inputs if t.role == HIDDEN), None)
        self.gives = next((t for t in contract.outputs if t.role == HIDDEN), None)
        self.given = _streams(given) if self.reads else np.zeros(0)
        self.kept: list[Array] = []
        self.steps = 0

    def step(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        if self.reads:
            stream = self.given[self.steps].astype(np.float32).reshape(self.reads.shape)
            feeds = {t.name: stream if t.role == HIDDEN else feeds[t.name] for t in self.contract.inputs}
        outputs = self.engine.step(feeds)
        if self.gives:
            self.kept.append(np.array(outputs[self.gives.name]).reshape(-1))
        self.steps += 1
        return outputs  # type: ignore[no-any-return]

    def observed(self, found: dict[str, Array]) -> dict[str, Array]:
        """An observation with `{history}/hidden` [n, C], the stream that each step gave."""
        at = 0
        for history in ("isolated", "forced") if self.gives else ():
            count = len(found.get(f"{history}/positions", ()))
            if count:
                found[f"{history}/{HIDDEN}"] = compact(np.stack(self.kept[at : at + count]))
            at += count
        return found


def _streams(path: str | None) -> Array:
    """The stream of every step [n, C], isolated ones first."""
    with np.load(str(path)) as file:
        return np.concatenate([file[f"{h}/{HIDDEN}"] for h in ("isolated", "forced") if f"{h}/{HIDDEN}" in file.files])
