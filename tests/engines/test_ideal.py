"""The ideal float16 run: what products read is rounded, nothing else."""

import numpy as np
import onnx
import onnx.reference
from kvgate.engines import ideal
from onnx import TensorProto, helper


def graph(nodes: list, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", "columns"]) for n in ("x", "y")]
    held = [onnx.numpy_helper.from_array(w, name) for name, w in weights.items()]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)])


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0]


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def test_operands_of_products_are_rounded_once_and_sums_are_not():
    rng = np.random.default_rng(0)
    x, w, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 8), (8, 8), (8, 4)))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["x", "a"], ["s"]),
        helper.make_node("MatMul", ["s", "v"], ["b"]),
        helper.make_node("Mul", ["b", "b"], ["y"]),
    ]
    made = ideal.rounded(graph(nodes, {"w": w, "v": v}))
    onnx.checker.check_model(made)
    s = x + half(x) @ half(w)
    b = half(s) @ half(v)
    np.testing.assert_allclose(run(made, x), b * b, rtol=1e-6)
    assert np.abs(run(made, x) - run(graph(nodes, {"w": w, "v": v}), x)).max() > 1e-5


def test_a_value_that_two_products_read_is_rounded_in_one_place():
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["x", "a"], ["y"])]
    made = ideal.rounded(graph(nodes, {"w": np.eye(2, dtype=np.float32)}))
    assert sum(n.op_type == "Cast" for n in made.graph.node) == 2 * 3  # x, w and a
