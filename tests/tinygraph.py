"""A tiny cpu_managed decoder written by hand in ONNX, with contract, host tables, traces and jobs. Not a test itself.

Two layers of RMSNorm, attention over history and own token, residual; no rotation, learned positions. Enough for the
compiler to fuse what it fuses in a real model, and small enough to build in a second.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from kvgate import contract as c
from kvgate.engines import onnxruntime as engine
from kvgate.jobs import record
from kvgate.jobs.job import Job, record_path
from kvgate.observe import Trace
from kvgate.strategies.cpu_managed.host import Host
from onnx import helper, numpy_helper

# 17 slots: with 16 the artifact has no words that the compiler leaves as they lay on its stack.
LAYERS, HEADS, SIZE, SLOTS, VOCABULARY, HIDDEN = 2, 2, 16, 17, 64, 32
WILDCARDS = {
    "model": "tiny", "weights": "plain", "strategy": "s", "platform": "rk3576", "quant": "q", "part": "decode",
}  # fmt: skip


class Graph:
    """Nodes and initializers as they are written; every node is named like its output."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}

    def constant(self, name: str, value: Any) -> str:
        self.constants[name] = np.asarray(value)
        return name

    def node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def model(self, contract: c.Contract, opset: int = 17) -> Any:
        def values(tensors: tuple[c.Tensor, ...]) -> list[Any]:
            kinds = [helper.np_dtype_to_tensor_dtype(np.dtype(t.dtype)) for t in tensors]
            return [helper.make_tensor_value_info(t.name, k, t.shape) for t, k in zip(tensors, kinds, strict=True)]

        constants = [numpy_helper.from_array(a, n) for n, a in self.constants.items()]
        graph = helper.make_graph(self.nodes, "tiny", values(contract.inputs), values(contract.outputs), constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def contract(mask: str = "mask.0") -> c.Contract:
    cache = c.Cache(SLOTS)
    states = tuple(x for i in range(LAYERS) for x in c.key_value(i, HEADS, SIZE, SIZE, SLOTS))
    inputs = [c.Tensor("embedding", c.EMBEDDING, (1, 1, HIDDEN)), c.Tensor(mask, c.MASK, (1, SLOTS + 1))]
    inputs += c.cache_tensors(cache, states, SLOTS)
    outputs = [c.Tensor("logits", c.LOGITS, (1, 1, VOCABULARY)), *c.cache_tensors(cache, states, 1, ".out")]
    return c.Contract(
        "cpu_managed", "decode", "plain", "by hand", VOCABULARY, HIDDEN, cache, states,
        (c.Layer(rotation=None),) * LAYERS, (None,), tuple(inputs), tuple(outputs), "",
    )  # fmt: skip


def decoder(boundary: c.Contract) -> Graph:
    rng, g = np.random.default_rng(0), Graph()
    mask = next(t.name for t in boundary.inputs if t.role == c.MASK)
    g.constant("two", np.float32(2)), g.constant("epsilon", np.float32(1e-5))
    g.constant("scale", np.float32(SIZE**-0.5))
    g.constant("to_query", np.array([HEADS, 1, 1, SIZE])), g.constant("to_slot", np.array([HEADS, SIZE, 1, 1]))
    g.constant("to_hidden", np.array([1, 1, HEADS * SIZE]))

    def linear(x: str, name: str, inner: int, outer: int) -> str:
        weight = rng.normal(size=(inner, outer)) / np.sqrt(inner)
        return g.node("MatMul", [x, g.constant(f"{name}.weight", weight.astype(np.float32))], name)

    def norm(x: str, name: str) -> str:
        gain = g.constant(f"{name}.gain", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
        mean = g.node("ReduceMean", [g.node("Pow", [x, "two"], f"{name}.square")], f"{name}.mean", axes=[-1])
        root = g.node("Sqrt", [g.node("Add", [mean, "epsilon"], f"{name}.add")], f"{name}.root")
        return g.node("Mul", [g.node("Div", [x, root], f"{name}.div"), gain], name)

    x = "embedding"
    for i in range(LAYERS):
        n = norm(x, f"norm{i}")
        q = g.node("Reshape", [linear(n, f"q{i}", HIDDEN, HEADS * SIZE), "to_query"], f"query{i}")
        seen = []
        for role in ("key", "value"):
            own = linear(n, f"{role}{i}", HIDDEN, HEADS * SIZE)
            own = g.node("Reshape", [own, "to_slot"], f"{role}.{i}.out")
            seen.append(g.node("Concat", [f"{role}.{i}", own], f"{role}s{i}", axis=3))
        k = g.node("Transpose", [seen[0]], f"kt{i}", perm=[0, 2, 1, 3])
        v = g.node("Transpose", [seen[1]], f"vt{i}", perm=[0, 2, 3, 1])
        scores = g.node("Mul", [g.node("MatMul", [q, k], f"qk{i}"), "scale"], f"scaled{i}")
        p = g.node("Softmax", [g.node("Add", [scores, mask], f"masked{i}")], f"p{i}", axis=-1)
        mixed = g.node("Reshape", [g.node("MatMul", [p, v], f"mixed{i}"), "to_hidden"], f"flat{i}")
        x = g.node("Add", [x, linear(mixed, f"out{i}", HEADS * SIZE, HIDDEN)], f"x{i}")
    linear(norm(x, "norm"), "logits", HIDDEN, VOCABULARY)
    return g


def tables(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "embedding": rng.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32),
        "position": rng.normal(size=(SLOTS, HIDDEN)).astype(np.float32) * 0.3,
    }


def trace(graph: Path, boundary: c.Contract, ids: np.ndarray, prompt: int) -> Trace:
    """A program's trace, by running the graph itself over its own cache in ONNX Runtime."""
    host, run = Host(boundary, tables(), -1e4), engine.Engine(graph, boundary)
    steps = [host.take(run.step(host.feeds([int(t)]))) for t in ids[:SLOTS]]
    states = {name: np.stack([s.states[name] for s in steps]) for name in steps[0].states}
    return Trace(ids, prompt, False, (), states, np.stack([s.logits for s in steps]))


def exported(export: Path, boundary: c.Contract, *more: str) -> None:
    """Write what lies beside a graph, and the record. more: other files that are listed in it."""
    folder = export.parent
    np.savez(folder / "host.npz", **tables())  # type: ignore[arg-type]
    boundary = replace(boundary, host_sha256=record.sha256(folder / "host.npz"))
    (folder / "contract.json").write_text(boundary.to_json())
    files = {n: record.sha256(folder / n) for n in ("model.onnx", "contract.json", "host.npz", *more)}
    record.write(export, {"status": "ok", "contract": boundary.digest, "files": files})


def prepare(
    results: Path,
    quant: dict[str, Any],
    change: Callable[[Any], None] = lambda model: None,
    boundary: c.Contract | None = None,
    samples: int = 8,
    timeout: float = 100,
    **wildcards: str,
) -> Job:
    """A build job with all that it reads, as the stages before it leave it. change: edits the ONNX model in place."""
    names, boundary = WILDCARDS | wildcards, boundary or contract()
    export = results / record_path("export", names)
    export.parent.mkdir(parents=True, exist_ok=True)
    folder = export.parent
    model = decoder(boundary).model(boundary)
    onnx.save(model, str(folder / "whole.onnx"))
    rng = np.random.default_rng(5)
    inputs = {"export": export, "check": results / record_path("check", names)}
    texts = {"trace.text": 0, "calibration.a": 1, "calibration.b": 2}
    for label in texts if quant.get("calibrate") else ["trace.text"]:
        path = results / record_path("trace", names | {"program": label.partition(".")[2]})
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = rng.integers(0, VOCABULARY, SLOTS)
        trace(folder / "whole.onnx", boundary, ids, SLOTS).save(str(path.with_name("trace.npz")))
        record.write(path, {"status": "ok", "files": {"trace.npz": record.sha256(path.with_name("trace.npz"))}})
        inputs[label] = path
    change(model)
    onnx.save(model, str(folder / "model.onnx"))
    exported(export, boundary)
    config = {
        "quant": {"mask": -1e4, "calibrate": False, "config": {}, "build": {}, "hybrid": {}} | quant,
        "programs": {"text": {"histories": ["isolated", "forced", "free"]}},
        "isolated": 5,
        "calibration": {"samples": samples},
        "timeout": timeout,
    }
    job = Job("build", names, json.loads(json.dumps(config)), inputs, results)
    job.folder.mkdir(parents=True, exist_ok=True)
    return job
