"""Calibration's convolutions by numpy: the same sums as ONNX Runtime's, and left to it where they are others."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgate.compiler import pinned
from onnx import TensorProto, helper


def conv(x: tuple[int, ...], weight: tuple[int, ...], bias: bool = False, **attributes) -> bytes:
    """A model of one Conv whose weights are fed, as the toolkit's sessions are."""
    shapes = {"x": x, "w": weight} | ({"b": weight[:1]} if bias else {})
    node = helper.make_node("Conv", [*shapes], ["y"], **attributes)
    value = helper.make_tensor_value_info
    inputs = [value(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph([node], "one", inputs, [value("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9).SerializeToString()


def run(model: bytes, *shapes: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """What ONNX Runtime gives, what the pinned session gives, and how many runs it did itself."""
    draw = np.random.default_rng(seed)
    feeds = {n: draw.normal(size=s).astype(np.float32) for n, s in zip("xwb", shapes, strict=False)}
    (want,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    with pinned.convolutions() as session:
        (got,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    return want, got, session.pinned


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_a_plain_convolution_is_the_product(batch, inside, out, high, wide, whole, bias):
    kernel = (high, wide) if whole else (1, 1)
    shapes = ((batch, inside, high, wide), (out, inside, *kernel), (out,))
    want, got, count = run(conv(*shapes[:2], bias), *shapes[: 2 + bias])
    assert count == 1
    assert got.shape == want.shape
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("attributes", "shapes"),
    [
        ({"strides": [2, 2]}, ((1, 4, 6, 6), (3, 4, 1, 1))),
        ({"group": 2}, ((1, 4, 5, 5), (6, 2, 1, 1))),
        ({"pads": [1, 1, 1, 1]}, ((1, 4, 3, 3), (6, 4, 3, 3))),
        ({"auto_pad": "SAME_UPPER"}, ((1, 4, 3, 3), (6, 4, 3, 3))),
        ({"dilations": [2, 2]}, ((1, 4, 5, 5), (6, 4, 3, 3))),
        ({}, ((1, 4, 5, 5), (6, 4, 3, 3))),  # a kernel that moves
    ],
)
def test_other_convolutions_stay_with_onnx_runtime(attributes, shapes):
    want, got, count = run(conv(*shapes, **attributes), *shapes)
    assert count == 0
    np.testing.assert_array_equal(got, want)


def test_another_operator_and_what_comes_after_are_left_alone():
    before = onnxruntime.InferenceSession
    graph = onnx.load_from_string(conv((1, 2, 1, 1), (2, 2, 1, 1)))
    graph.graph.node[0].op_type = "Add"
    with pinned.convolutions() as session:
        two = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
        ones = np.ones((1, 2, 1, 1), np.float32)
        two.run(None, {"x": ones, "w": np.ones((2, 2, 1, 1), np.float32)})
        assert session.pinned == 0
    assert onnxruntime.InferenceSession is before
