"""The graph (not an artifact) in ONNX Runtime on the far machine, as an engine of the agent: proves all but the NPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.board.engine import EngineError, checked, returned, told
from kvgate.board.parts import states_first
from kvgate.contract import Contract, Tensor


class Engine:
    """One thread, so that equal graphs give equal numbers, unless the job says `threads`."""

    def __init__(self, job: Mapping[str, Any], folder: Path, contract: Contract) -> None:
        self.graph, self.contract = folder / "model.onnx", contract
        self.threads = int(job.get("threads", 1))
        self.session: Any = None

    def open(self, say: Callable[[str], None]) -> dict[str, Any]:
        say("load")
        try:
            import onnxruntime
        except ImportError as error:
            raise EngineError("engine_missing", "onnxruntime: {}".format(error)) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.log_severity_level = 3
        say("init")
        try:
            self.session = onnxruntime.InferenceSession(str(self.graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise EngineError("contract", "onnxruntime: {}".format(text)) from None
        self._held(self.session.get_inputs(), self.contract.inputs, "inputs")
        self._held(self.session.get_outputs(), self.contract.outputs, "outputs")
        return {"versions": {"onnxruntime": onnxruntime.__version__}, "core_mask": None, "findings": []}

    def _held(self, found: Sequence[Any], tensors: Sequence[Tensor], side: str) -> None:
        """The graph's boundary is the contract's. Raises EngineError."""
        shapes = {x.name: x.shape for x in found}
        for t in states_first(tensors):
            if t.name not in shapes:
                text = "graph's {}: got {}, allowed: {} among them"
                raise EngineError("contract", text.format(side, sorted(shapes), told(t)))
            shape = shapes[t.name]
            if all(isinstance(x, int) for x in shape) and math.prod(shape) != math.prod(t.shape):
                text = "{}: got {} elements, allowed: {} {}"
                raise EngineError("contract", text.format(told(t), math.prod(shape), math.prod(t.shape), list(t.shape)))

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = checked(feeds, self.contract.inputs)
        named = {t.name: array for t, array in zip(self.contract.inputs, arrays)}
        names = [t.name for t in self.contract.outputs]
        return returned(self.session.run(names, named), self.contract.outputs)

    def close(self) -> None:
        self.session = None
