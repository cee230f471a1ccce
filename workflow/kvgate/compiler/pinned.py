"""Calibration with numpy's kernels, which can be told the CPU to use, instead of ONNX Runtime's, which cannot.

The toolkit calibrates operator by operator. Of those that it gives to ONNX Runtime, a session each (Conv, Add, Mul and
what moves values), only Conv sums, and its sums round as the CPU's own kernels do: with AVX-512 an int8 scale had
another last digit than without. The others are numpy's and torch's, which obey the environment (toolkit.environment).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

Array = np.ndarray
# The attributes of a Conv, but for its kernel's shape, that say nothing.
_PLAIN: dict[str, set[Any]] = {
    "group": {1},
    "strides": {1},
    "dilations": {1},
    "pads": {0},
    "auto_pad": {b"", b"NOTSET", b"VALID"},
}


@contextmanager
def convolutions() -> Iterator[type]:
    """Replaces onnxruntime.InferenceSession in this process; gives the class, whose `pinned` counts its runs here."""
    import onnx
    import onnxruntime

    before = onnxruntime.InferenceSession

    class Session(before):  # type: ignore[misc, valid-type]
        pinned = 0

        def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(model, *arguments, **options)
            graph = onnx.load_from_string(model).graph if isinstance(model, bytes) else onnx.GraphProto()
            one = graph.node[0] if len(graph.node) == 1 and not graph.initializer else None
            self.operands = tuple(one.input) if one is not None and plain(one) else ()

        def run(self, names: Any, feeds: dict[str, Any], *more: Any, **options: Any) -> Any:
            given = [feeds[name] for name in self.operands if name in feeds]
            if not given or len(given) < len(self.operands) or not pointwise(*given):
                return super().run(names, feeds, *more, **options)
            Session.pinned += 1
            return [product(*given)]

    onnxruntime.InferenceSession = Session
    try:
        yield Session
    finally:
        onnxruntime.InferenceSession = before


def plain(node: Any) -> bool:
    """Whether an ONNX node (NodeProto) is a Conv without groups, strides, dilations and padding."""
    return (node.domain, node.op_type) == ("", "Conv") and all(
        {*a.ints} <= _PLAIN[a.name] if a.ints else (a.s or a.i) in _PLAIN[a.name]
        for a in node.attribute
        if a.name != "kernel_shape"
    )


def pointwise(x: Array, weight: Array, bias: Array | None = None) -> bool:
    """Whether a plain Conv of float32 is a matrix product at each place: kernel 1, or one as large as its input."""
    kernel = weight.shape[2:]
    return x.dtype == weight.dtype == np.float32 and (set(kernel) <= {1} or kernel == x.shape[2:])


def product(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """[N, I, ...], [O, I, ...], [O] -> [N, O, ...]: what `pointwise` says."""
    n, rows = len(x), len(weight)
    whole = weight.shape[2:] == x.shape[2:]
    places = (1,) * (x.ndim - 2) if whole else x.shape[2:]
    columns = np.ascontiguousarray(x).reshape(n, -1, int(np.prod(places)))
    found = np.ascontiguousarray(weight).reshape(rows, -1) @ columns
    found = found.reshape(n, rows, *places)
    return found if bias is None else found + bias.reshape(rows, *(1,) * len(places))
