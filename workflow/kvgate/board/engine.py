"""What every engine of a board is: how it is opened, stepped and closed, and the one error that it raises.

Python 3.9, numpy only. An engine's module is named in `MODULES` and has a class `Engine(job, folder, contract)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvgate.contract import Contract, Tensor


class EngineError(Exception):
    """An expected failure. kind: a finding's kind (segfault, contract, core_mask, ...); text: one line."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


class Engine(Protocol):
    """What holds an artifact. More is asked for where an engine has it:

    `host(kind, tables, mask)` makes the host half, of the class `kind`, over the engine's own memory;
    `last_us() -> {"run_us": microseconds of the last step by the runtime's own clock}`;
    `layers() -> {"npu_us", "cpu_us", "source", "operators": [{"kind", "target", "us", ...}]}`, asked once, last.
    """

    def __init__(self, job: Mapping[str, Any], folder: Path, contract: Contract) -> None:
        """job: as the host sent it; folder: holds the job's files by name. Nothing is loaded yet."""

    def open(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Load and initialize; say(phase) before each phase (`load`, `init`).

        Returns {"versions": {"runtime", "driver", ...}, "core_mask": the effective one or None, "findings": [...]}.
        """

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One inference: arrays by the contract's names in; float32 arrays of the contract's shapes out."""

    def close(self) -> None: ...


def checked(feeds: Mapping[str, np.ndarray], tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The arrays in the contract's order, contiguous. Raises EngineError where one is not the contract's."""
    arrays = []
    for t in tensors:
        array = feeds.get(t.name)
        if array is None or tuple(array.shape) != t.shape or array.dtype != t.dtype:
            got = "nothing" if array is None else "{} {}".format(array.dtype, list(array.shape))
            raise EngineError(
                "contract", "tensor {!r}: got {}, allowed: {} {}".format(t.name, got, t.dtype, list(t.shape))
            )
        arrays.append(np.ascontiguousarray(array))
    if len(feeds) != len(arrays):
        raise EngineError("contract", "feeds: got {}, allowed: {}".format(sorted(feeds), [t.name for t in tensors]))
    return arrays


def returned(outputs: Sequence[np.ndarray] | None, tensors: Sequence[Tensor], why: str = "") -> dict[str, np.ndarray]:
    """Outputs by name as float32 of the contract's shapes: a runtime may add or drop axes of extent 1.

    Raises EngineError where nothing came back (`why`: the runtime's words), or other sizes than expected.
    """
    if outputs is None:
        raise EngineError("error_line", "got no outputs{}".format(": " + why if why else ""))
    if len(outputs) != len(tensors):
        raise EngineError("contract", "got {} outputs, allowed: {}".format(len(outputs), len(tensors)))
    found = {}
    for t, array in zip(tensors, outputs):
        if array.size != math.prod(t.shape) or array.dtype.kind not in "fiub":
            raise EngineError(
                "contract",
                "output {!r}{}: got {} {}, allowed: {} {}".format(
                    t.name, _of(t), array.dtype, list(array.shape), t.dtype, list(t.shape)
                ),
            )
        found[t.name] = np.ascontiguousarray(array, np.float32).reshape(t.shape)
    return found


def told(tensor: Tensor) -> str:
    """A tensor's name, and the states that it holds."""
    return "tensor {!r}{}".format(tensor.name, _of(tensor))


def _of(tensor: Tensor) -> str:
    return " (state {})".format(", ".join(tensor.states)) if tensor.states else ""
