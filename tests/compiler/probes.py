"""What the real toolkit does to small graphs, one process for all of them: prints JSON by case. Not a test itself.

Run as `python probes.py CASE...`, in an empty folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

import habits
import numpy as np
import onnx
from kvgate import contract as c
from kvgate.compiler import risks
from kvgate.engines.simulator import Engine
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Sides = dict[str, tuple[int, list[int]]]


def save(nodes: list[tuple], inputs: Sides, outputs: Sides, constants: dict[str, Any], opset: int = 17) -> str:
    """nodes: (operator, inputs, output, attributes)."""
    made = [helper.make_node(op, ins, [out], name=out, **kw) for op, ins, out, kw in nodes]
    values = [[helper.make_tensor_value_info(n, *t) for n, t in side.items()] for side in (inputs, outputs)]
    weights = [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()]
    model = helper.make_model(
        helper.make_graph(made, "g", *values, weights), opset_imports=[helper.make_opsetid("", opset)], ir_version=8
    )
    onnx.save(model, "g.onnx")
    return "g.onnx"


def contract(inputs: dict[str, tuple], outputs: dict[str, tuple]) -> c.Contract:
    sides = [tuple(c.Tensor(n, c.STATE, s) for n, s in side.items()) for side in (inputs, outputs)]
    return c.Contract("cpu_managed", "decode", "plain", "", 1, 1, c.Cache(1), (), (), (), sides[0], sides[1], "")


def built(graph: str, platform: str = "rk3576", quantize: str = "", **config: Any) -> Any:
    from rknn.api import RKNN

    toolkit = RKNN(verbose=False)
    toolkit.config(target_platform=platform, **({"quantized_dtype": quantize} if quantize else {}), **config)
    assert toolkit.load_onnx(model=graph) == 0
    code = toolkit.build(do_quantization=bool(quantize), dataset="dataset.txt" if quantize else None)
    if code:
        raise ValueError(f"returned {code}")
    return toolkit


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def cube() -> dict[str, Any]:
    """A rank-4 cache whose extents are equal, fed by the toolkit's default and by the engine (F1, F2, F3)."""
    shape = [3, 8, 8, 8]
    graph = save([("Mul", ["k", "two"], "y", {})], {"k": (FLOAT, shape)}, {"y": (FLOAT, shape)}, {"two": np.float32(2)})
    toolkit = built(graph)
    toolkit.init_runtime()
    k = np.random.default_rng(0).normal(size=shape).astype(np.float32)  # non-zero, asymmetric
    boundary = contract({"k": tuple(shape)}, {"y": tuple(shape)})
    by_default = toolkit.inference(inputs=[k])[0]
    by_engine = Engine(toolkit, boundary).step({"k": k})["y"]
    refused = []
    for bad in (k.transpose(0, 2, 3, 1)[:, :4], k.astype(np.float64), k[:, :, :, :7]):
        try:
            Engine(toolkit, boundary).step({"k": bad})
        except ValueError as wrong:
            refused.append(str(wrong))
    double = habits.Toolkit(lambda feeds: {"y": 2 * feeds["k"]}, boundary)
    return {
        "double": [
            error(by_default, double.inference([k])[0]),
            error(by_engine, Engine(double, boundary).step({"k": k})["y"]),
        ],
        "default": error(by_default, 2 * k),
        "default_transposed": error(by_default, 2 * k.transpose(0, 3, 1, 2)),
        "engine": error(by_engine, 2 * k),
        "refused": refused,
    }


def counters() -> dict[str, Any]:
    """A state of int64 and one of float, past what float16 counts (F6, F13)."""
    graph = save(
        [("Add", ["n", "one"], "n.out", {}), ("Add", ["f", "unit"], "f.out", {})],
        {"n": (INT64, [2, 1]), "f": (FLOAT, [2, 1])},
        {"n.out": (INT64, [2, 1]), "f.out": (FLOAT, [2, 1])},
        {"one": np.array([1]), "unit": np.float32(1)},
    )
    toolkit = built(graph)
    toolkit.init_runtime()
    n = np.array([[2048], [70001]])
    out = toolkit.inference(inputs=[n, n.astype(np.float32) % 4000])
    return {"int64": out[0].ravel().tolist(), "float": out[1].ravel().tolist()}


def norms() -> dict[str, Any]:
    """x*x in place of Pow(x, 2) in a norm, one channel at 300 (F12)."""
    found = {}
    for name, square in (("pow", ("Pow", ["x", "two"], "q", {})), ("mul", ("Mul", ["x", "x"], "q", {}))):
        graph = save(
            [
                square,
                ("ReduceMean", ["q"], "m", {"axes": [-1]}),
                ("Add", ["m", "e"], "a", {}),
                ("Sqrt", ["a"], "s", {}),
                ("Reciprocal", ["s"], "r", {}) if name == "mul" else ("Div", ["x", "s"], "y", {}),
                *([("Mul", ["x", "r"], "y", {})] if name == "mul" else []),
            ],
            {"x": (FLOAT, [1, 1, 64])},
            {"y": (FLOAT, [1, 1, 64])},
            {"two": np.float32(2), "e": np.float32(1e-5)},
        )
        toolkit = built(graph)
        toolkit.init_runtime()
        x = np.random.default_rng(0).normal(size=(1, 1, 64)).astype(np.float32)
        x[0, 0, 7] = 300
        y = toolkit.inference(inputs=[x])[0]
        found[name] = error(y, x / np.sqrt(np.mean(x * x) + 1e-5))
    return found


def sessions() -> dict[str, Any]:
    """The simulator's outputs with its own sessions and with ours, bit for bit, at several inputs."""
    from kvgate.engines import contiguous

    shape = [1, 1, 64]
    rng = np.random.default_rng(0)
    constants = {n: rng.normal(size=(64, 64)).astype(np.float32) / 8 for n in ("v", "w")}
    graph = save(
        [("MatMul", ["x", "v"], "h", {}), ("Relu", ["h"], "r", {}), ("MatMul", ["r", "w"], "y", {})],
        {"x": (FLOAT, shape)},
        {"y": (FLOAT, shape)},
        constants,
    )
    feeds = [rng.normal(size=shape).astype(np.float32) for _ in range(4)]

    def outputs() -> list[bytes]:
        toolkit = built(graph)
        toolkit.init_runtime()
        return [toolkit.inference(inputs=[x])[0].tobytes() for x in feeds]

    plain = outputs()
    kind = contiguous.install(["x"])
    return {"equal": outputs() == plain, "different": len(set(plain)), "kept": kind.kept}


def arguments() -> dict[str, list[str]]:
    """The keyword arguments of RKNN.config, which names them all when it refuses one, and of RKNN.build."""
    import ast
    import inspect
    import re

    from rknn.api import RKNN

    text = ""
    try:
        RKNN().config(target_platform="rk3576", no_such_argument=1)
    except ValueError as refusal:
        text = str(refusal)
    (known,) = re.findall(r"ValueError: Valid input is (\[.*?\])", text)
    return {"config": ast.literal_eval(known), "build": list(inspect.signature(RKNN.build).parameters)[1:]}


def groups() -> dict[str, float]:
    """How far w4a16 in groups of 32 moves a matrix and a convolution that are on our grid, and how far one that is not.

    Of a convolution over (1, 4) positions a group is 32 channels at all of them.
    """
    from kvgate.prepare import int4_grid

    rng, positions = np.random.default_rng(0), 4
    weight = (rng.normal(size=(64 * positions, 48)) * np.exp(rng.normal(size=(64 * positions, 1)))).astype(np.float32)
    moved = {}
    for name, rows in (("matrix", 32), ("convolution", 32 * positions), ("convolution_by_rows", 32)):
        on_grid = int4_grid.nearest(weight, rows)
        whole = name == "matrix"
        shape = [1, 1, len(weight)] if whole else [1, 64, 1, positions]
        stored = on_grid if whole else np.ascontiguousarray(on_grid.T).reshape(48, 64, 1, positions)
        np.save("x.npy", rng.normal(size=shape).astype(np.float32))
        Path("dataset.txt").write_text("x.npy\n")
        out = [1, 1, 48] if whole else [1, 48, 1, 1]
        nodes: list[tuple] = [("MatMul" if whole else "Conv", ["x", "w"], "y", {})]
        graph = save(nodes, {"x": (FLOAT, shape)}, {"y": (FLOAT, out)}, {"w": stored})
        toolkit = built(graph, quantize="w4a16", quantized_method="group32")
        toolkit.init_runtime()
        engine = Engine(toolkit, contract({"x": tuple(shape)}, {"y": tuple(out)}))
        rows_seen = [
            engine.step({"x": one.reshape(shape)})["y"].ravel() for one in np.eye(len(weight), dtype=np.float32)
        ]
        moved[name] = error(np.array(rows_seen), on_grid)
    return moved


def outer() -> dict[str, Any]:
    """k^T v + S, the outer product as a MatMul over one channel and as Mul, in rank 3 and 4: how far each is from the
    sum and from the product alone, and what `risks` says."""
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for operator, first in (("MatMul", []), ("MatMul", [1]), ("Mul", [])):
        column, row, whole = ([*first, 4, *rest] for rest in ([16, 1], [1, 16], [16, 16]))
        k, v, s = (rng.normal(size=shape).astype(np.float32) for shape in (column, row, whole))
        name = f"{operator} {len(whole)}"
        graph = save(
            [(operator, ["k", "v"], "p", {}), ("Add", ["p", "s"], "y", {})],
            {"k": (FLOAT, column), "v": (FLOAT, row), "s": (FLOAT, whole)},
            {"y": (FLOAT, whole)},
            {},
        )
        toolkit = built(graph)
        toolkit.init_runtime()
        boundary = contract({"k": tuple(column), "v": tuple(row), "s": tuple(whole)}, {"y": tuple(whole)})
        y = Engine(toolkit, boundary).step({"k": k, "v": v, "s": s})["y"]
        named = sum(x.startswith("F32") for x in risks.find(onnx.load(graph), boundary, {}, 0))
        found[name] = {"sum": error(y, k * v + s), "product": error(y, k * v), "risks": named}
    return found


def platform(pair: str) -> str:
    """Whether a platform builds a dtype: `ok`, or the refusal's last line."""
    chip, dtype = pair.split(":")
    graph = save(
        [("MatMul", ["x", "w"], "h", {}), ("MatMul", ["h", "w"], "y", {})],
        {"x": (FLOAT, [1, 4, 64])},
        {"y": (FLOAT, [1, 4, 64])},
        {"w": np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8},
    )
    for i in range(2):
        np.save(f"{i}.npy", np.random.default_rng(i).normal(size=(1, 4, 64)).astype(np.float32))
    Path("dataset.txt").write_text("0.npy\n1.npy\n")
    try:
        built(graph, chip, "" if dtype == "fp16" else dtype)
    except (Exception, SystemExit) as wrong:
        return (str(wrong).strip().splitlines() or ["?"])[-1]
    return "ok"


if __name__ == "__main__":
    results = {}
    for case in sys.argv[1:]:
        results[case] = platform(case) if ":" in case else globals()[case]()
        Path("results.json").write_text(json.dumps(results))
