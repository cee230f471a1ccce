"""The self tests of a board: two tiny graphs whose right answer is known without a reference.

`roundtrip`: every input comes back doubled, so a permuted, swapped or cut tensor shows, by name (faults F1 to F5).
`attention`: values that are the same in every slot must come back whatever the scores are; the shape is one that a
runtime was seen to return zeros for (F10). All numbers are exact in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgate.contract import Cache, Contract, Tensor
from kvgate.judging import metrics

Array = np.ndarray
STEPS = 3  # different feeds, so that a buffer that is not taken again shows too
_ATTENTION = (1, 8, 64, 64)  # [1, heads, slots, channels]
_CLOSE = 2e-3  # normalized L2 of the attention: its weights add up to 1 within float16's rounding
# A cube, two rank-4 tensors of four extents, ranks 3 and 2, and ids.
_SHAPES: Mapping[str, tuple[int, ...]] = {
    "cube": (1, 8, 8, 8),
    "cache": (1, 3, 5, 7),
    "twin": (1, 3, 5, 7),
    "rank3": (3, 5, 7),
    "row": (1, 33),
    "ids": (1, 9),
}


@dataclass(frozen=True)
class Probe:
    """A graph by name: its boundary, feeds {input: [STEPS, *shape]}, and what must come back, within `close` (L2)."""

    name: str
    contract: Contract
    feeds: Mapping[str, Array]
    expected: Mapping[str, Array]
    close: float
    nodes: Callable[[], list[Any]]

    def model(self) -> Any:
        """The ONNX model."""
        from onnx import helper, numpy_helper

        def values(tensors: tuple[Tensor, ...]) -> list[Any]:
            types = [helper.np_dtype_to_tensor_dtype(np.dtype(t.dtype)) for t in tensors]
            return [helper.make_tensor_value_info(t.name, k, t.shape) for t, k in zip(tensors, types, strict=True)]

        nodes = self.nodes()
        used = {x for node in nodes for x in node.input}
        constants = [numpy_helper.from_array(a, name) for name, a in _CONSTANTS.items() if name in used]
        sides = values(self.contract.inputs), values(self.contract.outputs)
        graph = helper.make_graph(nodes, self.name, *sides, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def probes() -> list[Probe]:
    return [_roundtrip(), _attention()]


def differences(probe: Probe, outputs: Mapping[str, Array]) -> list[str]:
    """What came back wrong, a line a tensor; empty where all is right. outputs: {name: [STEPS, *shape]}."""
    found = []
    for name, want in probe.expected.items():
        got = outputs.get(name)
        if got is None or got.shape != want.shape:
            found.append(f"{probe.name}: {name}: got {'nothing' if got is None else got.shape}, allowed: {want.shape}")
            continue
        how = next((text for a, b in zip(got, want, strict=True) if (text := _wrong(probe, name, a, b))), "")
        if how:
            found.append(f"{probe.name}: {name} {how}")
    return found


def _wrong(probe: Probe, name: str, got: Array, want: Array) -> str:
    error = metrics.l2(got.astype(np.float64), want.astype(np.float64))
    if error <= probe.close:
        return ""
    if not np.any(got):
        return "is all zero"
    axes = tuple(f"axis {i}" for i in range(want.ndim))
    how = metrics.permuted(got, want, axes) if want.ndim > 1 else None
    swapped = next((n for n, x in probe.expected.items() if n != name and _is(got, x)), None)
    return how or (f"is what {swapped} should be" if swapped else f"is off by {100 * error:.2g} %")


def _is(got: Array, steps: Array) -> bool:
    return any(got.shape == x.shape and np.array_equal(got, x) for x in steps)


def _roundtrip() -> Probe:
    feeds, inputs, outputs = {}, [], []
    for n, (name, shape) in enumerate(_SHAPES.items()):
        size = int(np.prod(shape))
        dtype = "int64" if name == "ids" else "float32"
        values = [(np.arange(size) + 100 * n + 7 * step) % 997 for step in range(STEPS)]
        feeds[name] = np.stack(values).reshape(STEPS, *shape).astype(dtype)
        inputs.append(Tensor(name, "probe", shape, dtype))
        outputs.append(Tensor(f"{name}.out", "probe", shape, dtype))
    expected = {f"{name}.out": array + 1 if name == "ids" else array * 2 for name, array in feeds.items()}

    def nodes() -> list[Any]:
        from onnx import helper

        how = {"ids": ("Add", "one")}
        return [
            helper.make_node(operator, [t.name, constant], [f"{t.name}.out"])
            for t in inputs
            for operator, constant in (how.get(t.name, ("Mul", "two")),)
        ]

    return Probe("roundtrip", _contract(inputs, outputs), feeds, expected, 0.0, nodes)


def _attention() -> Probe:
    generator = np.random.default_rng(0)
    names = ("query", "key", "value")
    feeds = {name: generator.integers(-4, 5, (STEPS, *_ATTENTION)).astype(np.float32) / 4 for name in names}
    feeds["value"] = np.repeat(feeds["value"][:, :, :, :1], _ATTENTION[2], axis=3)  # one row of channels in all slots
    inputs = [Tensor(name, "probe", _ATTENTION) for name in names]

    def nodes() -> list[Any]:
        from onnx import helper

        return [
            helper.make_node("Transpose", ["key"], ["turned"], perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", ["query", "turned"], ["raw"]),
            helper.make_node("Mul", ["raw", "scale"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
            helper.make_node("MatMul", ["weights", "value"], ["out"]),
        ]

    outputs = [Tensor("out", "probe", _ATTENTION)]
    return Probe("attention", _contract(inputs, outputs), feeds, {"out": feeds["value"]}, _CLOSE, nodes)


_CONSTANTS: Mapping[str, Array] = {
    "one": np.array(1, np.int64),
    "two": np.array(2, np.float32),
    "scale": np.array(0.125, np.float32),
}


def _contract(inputs: list[Tensor], outputs: list[Tensor]) -> Contract:
    return Contract("", "probe", "plain", "", 0, 0, Cache(0), (), (), (), tuple(inputs), tuple(outputs), "")
