"""Weights that are kept contiguous between steps: which arrays, and that a changed one is seen."""

import numpy as np
import onnx
import onnxruntime
import pytest
from kvgate.engines import contiguous
from onnx import TensorProto, helper


def model(weight: str = "w", output: str = "y") -> bytes:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 4]) for n in ("x", weight)]
    node = helper.make_node("MatMul", ["x", weight], [output])
    result = [helper.make_tensor_value_info(output, TensorProto.FLOAT, [4, 4])]
    graph = helper.make_graph([node], "g", values, result)
    return onnx.helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()  # fmt: skip


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.setattr(onnxruntime, "InferenceSession", onnxruntime.InferenceSession)  # put back afterwards
    return contiguous.install(["x"])


def test_a_constant_view_is_copied_once(kind: type) -> None:
    session = onnxruntime.InferenceSession(model(), providers=["CPUExecutionProvider"])
    weight = np.arange(16, dtype=np.float32).reshape(4, 4)
    for n in range(3):
        x = np.full((4, 4), n, np.float32).T  # an input's view is not kept
        assert np.array_equal(session.run(None, {"x": x, "w": weight.T})[0], x @ weight.T)
    assert kind.kept == 1  # type: ignore[attr-defined]
    assert np.array_equal(session.run(None, {"x": x, "w": (weight + 1).T})[0], x @ (weight + 1).T)
    assert kind.kept == 2  # type: ignore[attr-defined]


def test_what_another_session_returns_is_no_constant(kind: type) -> None:
    onnxruntime.InferenceSession(model("v", "w"), providers=["CPUExecutionProvider"])  # makes `w`
    session = onnxruntime.InferenceSession(model(), providers=["CPUExecutionProvider"])
    buffer = np.zeros((4, 4), np.float32)
    x = np.eye(4, dtype=np.float32)
    for n in range(3):
        buffer[...] = np.arange(16).reshape(4, 4) + n  # the same memory, other values
        assert np.array_equal(session.run(None, {"x": x, "w": buffer.T})[0], buffer.T)
    assert kind.kept == 0  # type: ignore[attr-defined]
