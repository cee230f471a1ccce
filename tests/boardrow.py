"""A row on a board, ready to run: the tiny hand-written graph, a chat and a text. Not a test itself."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tinygraph
from kvgate.jobs import record
from kvgate.jobs.job import Job, record_path

WILDCARDS = {
    "model": "tiny", "weights": "plain", "strategy": "s", "platform": "host", "quant": "fp32", "part": "decode",
    "backend": "onnxruntime-here",
}  # fmt: skip
PROGRAMS = {
    "sky": {"kind": "chat", "histories": ["isolated", "forced", "free"]},
    "text": {"kind": "text", "histories": ["forced"]},
}


def board(work: Path, **change: Any) -> dict[str, Any]:
    """An entry of boards.yaml: this machine."""
    entry = {"platform": "host", "driver": "local", "address": "", "user": "", "port": 0, "adb_port": 0}
    entry |= {"work": str(work), "python": sys.executable, "engine": "onnxruntime", "core_mask": "auto"}
    return entry | {"clocks": "record"} | change


def row(results: Path, entry: dict[str, Any], ballast: int = 0, steps: int = 8, run_seconds: float = 60) -> Job:
    """ballast: bytes of a file beside the graph that has to travel with it."""
    boundary = tinygraph.contract()
    model = tinygraph.decoder(boundary).model(boundary)
    export = results / record_path("export", WILDCARDS)
    folder = export.parent
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(folder / "model.onnx"))
    if ballast:
        (folder / "weights.bin").write_bytes(np.random.default_rng(1).bytes(ballast))
    tinygraph.exported(export, boundary, *(["weights.bin"] if ballast else []))
    inputs = {"export": export}
    rng = np.random.default_rng(5)
    for name, program in PROGRAMS.items():
        path = results / record_path("trace", WILDCARDS | {"program": name})
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = rng.integers(0, tinygraph.VOCABULARY, tinygraph.SLOTS)
        prompt = 5 if program["kind"] == "chat" else tinygraph.SLOTS
        trace = path.with_name("trace.npz")
        tinygraph.trace(folder / "model.onnx", boundary, ids, prompt).save(str(trace))
        record.write(path, {"status": "ok", "files": {"trace.npz": record.sha256(trace)}})
        inputs[f"trace.{name}"] = path
    config = {
        "board": entry,
        "limits": {"run_seconds": run_seconds, "step_seconds": 10},
        "programs": PROGRAMS,
        "isolated": 5,
        "timing": {"warmup": 2, "steps": steps},
        "mask": -1e4,
    }
    job = Job("run", WILDCARDS, config, inputs, results)
    job.folder.mkdir(parents=True, exist_ok=True)
    return job
