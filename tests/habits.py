"""A double of the toolkit's simulator with its habits. tests/compiler/test_probes.py holds it to the real one."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from kvgate.contract import Contract

Array = np.ndarray


class Toolkit:
    """`step` behind the toolkit's call: rank-4 inputs are NHWC unless the call says otherwise, inputs go by position,
    arrays too many are dropped in silence; outputs come in the graph's order."""

    def __init__(self, step: Callable[[Mapping[str, Array]], Mapping[str, Array]], contract: Contract) -> None:
        self.step, self.contract = step, contract

    def inference(self, inputs: Sequence[Array], data_format: Sequence[str] | None = None) -> list[Array]:
        feeds = {}
        for i, (tensor, array) in enumerate(zip(self.contract.inputs, inputs, strict=False)):
            if len(tensor.shape) == 4 and not (data_format and data_format[i] == "nchw"):
                array = np.moveaxis(array, 3, 1)
                if array.shape != tensor.shape:
                    raise ValueError(f"shape is wrong, expect 'nhwc' like {tensor.shape}")
            feeds[tensor.name] = np.ascontiguousarray(array)
        out = self.step(feeds)
        return [out[t.name] for t in self.contract.outputs]
