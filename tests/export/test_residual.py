"""The residual stream of a graph: which sums are its own, their order, and what compensation keeps in float16."""

from typing import Any

import numpy as np
import onnx
import onnx.reference
from kvgate.export import residual
from onnx import TensorProto, helper


def parallel(order: list[tuple[str, str, str]]) -> onnx.ModelProto:
    """Sums of two products and a residual, in the given order of (left, right, out)."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in ("r", "out")]
    weights = [helper.make_tensor(n, TensorProto.FLOAT, [4, 4], [1.0] * 16) for n in ("w", "u")]
    nodes = [helper.make_node("MatMul", ["r", w], [f"{w}x"]) for w in ("w", "u")]
    nodes += [helper.make_node("Add", [a, b], [c]) for a, b, c in order]
    return helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], weights))


def test_parallel_sums_take_the_residual_first():
    changed = parallel([("ux", "wx", "s"), ("s", "r", "out")])
    assert residual.reorder(changed) == 1
    assert [list(n.input) for n in changed.graph.node if n.op_type == "Add"] == [["r", "wx"], ["s", "ux"]]
    kept = parallel([("r", "wx", "s"), ("s", "ux", "out")])
    assert residual.reorder(kept) == 0


def stream(*sums: tuple[str, str, str], extra: tuple = (), factors: tuple = (), dtype: type = np.float32) -> Any:
    """Sums (stream, branch, out), each branch a product of a value with a diagonal matrix: ("x", "x>w", "y")."""
    nodes, names = [], []
    for left, right, out in sums:
        source, _, weight = right.partition(">")
        names.append(weight)
        nodes.append(helper.make_node("MatMul", [source, weight], [f"{out}.product"], name=f"{out}.product"))
        nodes.append(helper.make_node("Add", [left, f"{out}.product"], [out], name=out))
    nodes += extra
    matrices = [np.eye(8, dtype=dtype) * dtype(f) for f in factors or [0.5] * len(names)]
    held = [onnx.numpy_helper.from_array(m, w) for m, w in zip(matrices, names, strict=True)]
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ends = [helper.make_tensor_value_info(n, kind, [1, 8]) for n in ("x", nodes[-1].output[0])]
    return helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], held))


def computed(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0]


def test_the_stream_is_the_longest_chain_of_sums():
    sequential = stream(("x", "x>a", "y"), ("y", "y>b", "z"))
    assert [(s.stream, s.added) for s in residual.sums(sequential.graph)] == [("x", "y.product"), ("y", "z.product")]
    parallel = stream(("x", "x>a", "y"), ("y", "x>b", "z"))  # the second branch was made from what was before the first
    assert [s.stream for s in residual.sums(parallel.graph)] == ["x", "y"]
    turned = stream(("x", "x>a", "y"), ("y", "y>b", "z"))
    for node in turned.graph.node:
        if node.op_type == "Add":
            node.input[:] = node.input[::-1]
    assert [s.stream for s in residual.sums(turned.graph)] == ["x", "y"]


def test_an_activation_or_a_sum_of_terms_is_no_stream():
    assert residual.sums(stream(("x", "x>a", "y")).graph) == []  # as in GELU's tanh form
    terms = stream(("x", "x>a", "y"), extra=(helper.make_node("Add", ["y.product", "y.product"], ["out"]),))
    assert residual.sums(terms.graph) == []
    assert residual.compensate(terms) == 0


def test_a_compensated_stream_keeps_what_float16_loses():
    """A channel at 600 takes small sums for a while and is taken back: what is left is the sum of the small ones."""
    factors = (600.0, *np.random.default_rng(0).uniform(0.01, 0.2, 60), -600.0)
    names = ["x", *(f"s{n}" for n in range(len(factors)))]
    made = stream(
        *((names[n], f"x>w{n}", names[n + 1]) for n in range(len(factors))), factors=factors, dtype=np.float16
    )
    one = np.ones((1, 8), np.float16)
    exact = 1 + sum(float(np.float16(f)) for f in factors)
    assert np.abs(computed(made, one) - exact).max() > 0.5
    assert residual.compensate(made) == len(factors)
    # Half of float16's step at 600: what is kept is rounded once, with the sum that takes the channel back.
    assert np.abs(computed(made, one) - exact).max() <= 0.25


def test_compensation_is_the_same_function_and_its_operators_are_counted():
    made = stream(*[(f"s{n}" if n else "x", f"s{n}>w{n}" if n else "x>w0", f"s{n + 1}") for n in range(5)])
    x = np.random.default_rng(1).standard_normal((1, 8)).astype(np.float32)
    before, count = computed(made, x), len(made.graph.node)
    assert residual.compensate(made) == 5
    onnx.checker.check_model(made)
    # A sum is five instead of one, two where nothing is carried on; the first has nothing to add yet.
    assert len(made.graph.node) - count == 4 * 4 + 1 - 1
    np.testing.assert_allclose(computed(made, x), before, rtol=1e-6)
