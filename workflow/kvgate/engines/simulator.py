"""The toolkit's PC simulator, inside the process that built the artifact (it refuses a loaded one)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvgate.contract import Contract


class Engine:
    """Holds every call to the contract: the toolkit itself takes a cube transposed, an extra or a missing array."""

    def __init__(self, toolkit: Any, contract: Contract) -> None:
        """toolkit: an RKNN object after init_runtime, whose artifact has the contract's inputs and outputs in order."""
        self.toolkit, self.contract = toolkit, contract

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Raises ValueError where feeds or outputs are not the contract's, or nothing came back."""
        arrays = [self._checked(t.name, t.shape, t.dtype, feeds) for t in self.contract.inputs]
        if len(feeds) != len(arrays):
            raise ValueError(f"feeds: got {sorted(feeds)}, allowed: {[t.name for t in self.contract.inputs]}")
        # Without it a rank-4 array is taken as NHWC: an error where extents differ, silently transposed where not.
        outputs = self.toolkit.inference(inputs=arrays, data_format=["nchw"] * len(arrays))
        if outputs is None:
            raise ValueError("simulator: got no outputs; the log's last error line says why")
        if len(outputs) != len(self.contract.outputs):
            raise ValueError(f"simulator: got {len(outputs)} outputs, allowed: {len(self.contract.outputs)}")
        named = {t.name: out for t, out in zip(self.contract.outputs, outputs, strict=True)}
        return {t.name: self._checked(t.name, t.shape, t.dtype, named) for t in self.contract.outputs}

    @staticmethod
    def _checked(name: str, shape: tuple[int, ...], dtype: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        array = arrays.get(name)
        if array is None or tuple(array.shape) != shape or array.dtype != dtype:
            got = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"tensor {name!r}: got {got}, allowed: {dtype} {list(shape)}")
        return np.ascontiguousarray(array)
