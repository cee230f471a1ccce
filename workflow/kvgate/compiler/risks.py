"""Patterns that a PC simulator runs right and boards have been seen to get wrong, and one that the compiler gets wrong
without a warning: listed on a row, never judged.

Each is a public report (docs name them by the same number); the graph or its artifact has the pattern, no more is said.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvgate.contract import LOGITS, Contract

_LONG_ROW = 8192  # Transposes of longer rows fell back to the CPU
_WIDE_HEAD = 131_072  # a head of 151,936 columns hit a register limit; 49,152 built
_DOMAIN = 4 << 30  # bytes of one address domain of the NPU


def find(model: Any, contract: Contract, operators: Mapping[str, int], memory: int) -> list[str]:
    """Risks of an ONNX model and its built artifact.

    operators: the build record's (`Name@Target`: count). memory: bytes of weights, internal tensors and cache.
    """
    constants = {t.name for t in model.graph.initializer}
    constants |= {n.output[0] for n in model.graph.node if n.op_type == "Constant"}
    found = _boundary(contract)
    for label, text, test in _NODES:
        hits = [n for n in model.graph.node if test(n, constants)]
        if hits:
            found.append(f"{label} {text} ({len(hits)}x)")
    if _wide_transpose(model):
        found.append(f"F17 Transpose of rows of {_LONG_ROW} and more")
    lost = _lost_sums(model)
    if lost:
        found.append(f"F32 MatMul over one channel, then an Add: the compiler was seen to leave the Add out ({lost}x)")
    columns = max((t.shape[-1] for t in contract.outputs if t.role == LOGITS), default=0)
    if columns >= _WIDE_HEAD:
        found.append(f"F17 head of {columns} columns in one piece")
    if any(name.startswith("exSDPAttention@") for name in operators):
        found.append("F10 exSDPAttention: returned zeros at [1,8,64,64] with one runtime")
    if memory > _DOMAIN:
        found.append(f"F26 weights, internal memory and cache take {memory / (1 << 30):.1f} GiB: more than one domain")
    return found


def _boundary(contract: Contract) -> list[str]:
    """Risks of the cache tensors as they cross the boundary."""
    inputs, outputs = contract.cache_inputs(), contract.cache_outputs()
    found = []
    if any(len(t.shape) == 4 for t in inputs):
        found.append("F1 rank-4 cache: wrong from the first Concat on unless fed with its data_format")
    if any(len(t.shape) == 4 for t in outputs):
        found.append("F3 rank-4 cache comes back NCHW, its input expects NHWC")
    if any(len(t.shape) > 4 for t in (*inputs, *outputs)):
        found.append("F4 rank-5 cache: reported with fewer elements than it has")
    if any(t.shape[0] > 1 for t in inputs):
        found.append("F4 first dimension of a cache tensor above 1")
    if any(t.dtype == "int64" for t in contract.outputs):
        found.append("F6 int64 output: aborted a compiler")
    return found


def _axis(node: Any, default: int = 0) -> int:
    return next((a.i for a in node.attribute if a.name == "axis"), default)


_NODES: tuple[tuple[str, str, Callable[[Any, set[str]], bool]], ...] = (
    (
        "F7",
        "ScatterND with a runtime index: garbage on RK3588",
        lambda n, constants: n.op_type == "ScatterND" and n.input[1] not in constants,
    ),
    (
        "F8",
        "Gather on axis 0 with constant indices: board cosine 0.35 to 0.86",
        lambda n, constants: n.op_type == "Gather" and _axis(n) == 0 and n.input[1] in constants,
    ),
    (
        "F9",
        "Concat: its submit failed at some extents",
        lambda n, constants: n.op_type == "Concat" and not all(x in constants for x in n.input),
    ),
    ("F16", "TopK or ArgMax: differs from the simulator", lambda n, constants: n.op_type in ("TopK", "ArgMax")),
)


def _shapes(model: Any) -> dict[str, list[int]]:
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    found = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
    return found | {t.name: list(t.dims) for t in model.graph.initializer}


def _lost_sums(model: Any) -> int:
    """Products over one channel whose result an Add reads: in rank 3 lost always, in rank 4 beside some operators."""
    from onnx import shape_inference

    shapes = _shapes(shape_inference.infer_shapes(model, data_prop=True))
    added = {name for node in model.graph.node if node.op_type == "Add" for name in node.input}
    products = (n for n in model.graph.node if n.op_type == "MatMul" and n.output[0] in added)
    sides = ((shapes.get(n.input[0], []), shapes.get(n.input[1], [])) for n in products)
    return sum(max(len(a), len(b)) > 2 and a[-1:] == [1] for a, b in sides)


def _wide_transpose(model: Any) -> bool:
    shapes = _shapes(model)
    return any(
        max((shapes.get(name) or [0]), default=0) >= _LONG_ROW
        for node in model.graph.node
        if node.op_type == "Transpose"
        for name in (*node.input, *node.output)
    )
