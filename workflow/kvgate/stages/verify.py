"""verify: what a backend returned for the programs against their reference traces. Metrics, no judgement.

Reads the contract and host.npz beside the graph, trace.npz of every program, and observations/{program}.npz beside the
build's, check's or run's record. Writes {program}/metrics.npz (every step, layer and tensor) and metrics.json (the
figures, and how much of the cache lies outside the artifact's calibrated ranges).
"""

import io
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.contract import Contract
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.judging import compare, coverage
from kvgate.observe import Trace


def run(job: Job) -> dict[str, Any]:
    """Raises ValueError where nothing could be compared: that is a bug of ours, not a red row."""
    contract = graph_files.contract(job)
    found, files, traces = {}, {}, []
    for name, program in job.config["programs"].items():
        trace = Trace.load(str(job.file(f"trace.{name}", "trace.npz")))
        traces.append(trace)
        path = job.file("observed", f"observations/{name}.npz")
        with np.load(path) as seen:
            _all_ran(program["histories"], seen, path)
            body, arrays = compare.compare(contract, trace, seen)
            body["steps"] = compare.counted(contract, trace, seen, program["histories"], job.config["isolated"])
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        file = f"{name}/metrics.npz"
        files[file] = record.write_bytes(job.folder / file, buffer.getvalue())
        body["findings"] += job.read(f"trace.{name}").get("findings", [])  # what the reference says of itself
        found[name] = {"kind": "text" if trace.prompt == len(trace.tokens) else "chat", **body}
    return {"programs": found, "files": files, "coverage": _coverage(job, contract, traces)}


def _coverage(job: Job, contract: Contract, traces: list[Trace]) -> dict[str, float]:
    if "build" not in job.inputs:
        return {}
    host = graph_files.opened(job, contract, -1.0)
    return coverage.measure(host, traces, job.read("build").get("boundary", {}))


def _all_ran(histories: list[str], seen: Any, path: Path) -> None:
    """A history that was asked for and is not there must not pass by being absent."""
    missing = [h for h in histories if f"{h}/tokens" not in seen]
    if missing:
        raise ValueError(f"{path.name}: lacks the history {', '.join(missing)}, which the program has")
