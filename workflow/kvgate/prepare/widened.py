"""A product whose input is widened: beside its channels it reads sums of each group of them, with fixed signs.

y = [x, u] [Q; M] for x W, where u = x in groups @ signs, so M gives each group of channels an offset of its own, of any
pattern that the signs span. One product in the graph, and sums that cost next to nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


@dataclass(frozen=True)
class Widened:
    matrix: np.ndarray  # [in + kinds * in / group, out]: Q, then M with a kind's rows together, a row a group
    signs: np.ndarray  # [group, kinds]

    def flat(self) -> np.ndarray:
        """The matrix [in, out] that it stands for."""
        return flat(self.matrix, self.signs)


# What stands for a matrix in the graph: the terms of a sum, or a product whose input is widened.
Terms = tuple[np.ndarray, ...] | Widened


def rows(matrix: Any, signs: np.ndarray) -> int:
    """Input channels of a widened matrix."""
    group, kinds = signs.shape
    return len(matrix) * group // (group + kinds)


def flat(matrix: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The matrix [in, out] that a widened one stands for."""
    count = rows(matrix, signs)
    return matrix[:count] + spread(matrix[count:], signs)


def spread(more: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """What the rows M [kinds * in / group, out] add to the channels' own: [in, out]."""
    parts = more.reshape(signs.shape[1], -1, more.shape[1])
    exact = parts.astype(np.float64)  # in float32 the sums would be the PC's
    return np.einsum("ik,kgn->gin", signs, exact, optimize=True).reshape(-1, more.shape[1]).astype(np.float32)


def widen(
    model: onnx.ModelProto, matrices: Mapping[str, str], signs: Mapping[str, np.ndarray], tokens: int = 1
) -> None:
    """Give the products with these matrices their wider input. Products that read the same tensor share it.

    matrices: name in the graph to the name of its signs. tokens: of a step. Raises ValueError where there is no such
    MatMul.
    """
    made: dict[tuple[str, str], str] = {}
    nodes: list[onnx.NodeProto] = []
    left = dict(matrices)
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in left:
            key = (node.input[0], left.pop(node.input[1]))
            if key not in made:
                shape = next(x.dims for x in model.graph.initializer if x.name == node.input[1])
                sums, made[key] = _sums(model.graph, *key, signs[key[1]], int(shape[0]), tokens)
                nodes += sums
            node.input[0] = made[key]
        nodes.append(node)
    if left:
        raise ValueError(f"graph: got no product with {min(left)!r}, whose input is widened")
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _sums(
    graph: onnx.GraphProto, x: str, name: str, signs: np.ndarray, wide: int, tokens: int
) -> tuple[list[onnx.NodeProto], str]:
    """Nodes of [x, sums of x] and their output; x: [1, T, in], wide: the matrix's rows.

    A row a group into the product, a row a kind out: any other order costs a permutation in weights.
    """
    group, kinds = signs.shape
    groups = wide // (group + kinds)
    constants: dict[str, np.ndarray] = {
        name: signs.astype(np.float32),
        f"{name}.{groups}.in": np.array([tokens, groups, group], np.int64),
        f"{name}.{groups}.out": np.array([1, tokens, kinds * groups], np.int64),
    }
    known = {constant.name for constant in graph.initializer}
    graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items() if n not in known)
    parts, summed, turned, sums, made = (f"{x}.{what}.{name}" for what in ("parts", "summed", "turned", "sums", "wide"))
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Reshape", [x, f"{name}.{groups}.in"], parts, {}),
        ("MatMul", [parts, name], summed, {}),
        ("Transpose", [summed], turned, {"perm": [0, 2, 1]}),
        ("Reshape", [turned, f"{name}.{groups}.out"], sums, {}),
        ("Concat", [x, sums], made, {"axis": 2}),
    ]
    return [helper.make_node(operator, ins, [out], name=out, **more) for operator, ins, out, more in steps], made
