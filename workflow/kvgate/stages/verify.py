"""verify: what a backend returned for the programs against their reference traces. Metrics, no judgement.

Reads the contract and host.npz beside the graph, trace.npz of every program, and observations/{program}.npz beside the
build's, check's or run's record. Writes {program}/metrics.npz (every step, layer and tensor) and metrics.json (the
figures, and how much of the cache lies outside the artifact's calibrated ranges).
"""

import io
from pathlib import Path
from typing import Any

import numpy as np

from kvgate import observe
from kvgate.contract import Contract
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.jobs.rows import DECODE
from kvgate.judging import compare, coverage
from kvgate.observe import Trace


def run(job: Job) -> dict[str, Any]:
    """Raises ValueError where nothing could be compared: that is a bug of ours, not a red row.

    The programs of a part beside `decode` are named {part}/{program}.
    """
    found, files = {}, {}
    traces = {name: Trace.load(str(job.file(f"trace.{name}", "trace.npz"))) for name in job.config["programs"]}
    for label in job.labels("export"):
        part = label.removeprefix("export").removeprefix(".")
        contract = graph_files.contract(job, label)
        for name, program in job.config["programs"].items():
            path = _observation(job, part, name)
            asked = observe.histories(contract, program["histories"])
            with np.load(path) as seen:
                _all_ran(asked, seen, path)
                body, arrays = compare.compare(contract, traces[name], seen)
                body["steps"] = compare.counted(contract, traces[name], seen, asked, job.config["isolated"])
            buffer = io.BytesIO()
            np.savez(buffer, **arrays)  # type: ignore[arg-type]
            of = f"{part}/{name}" if part else name
            files[f"{of}/metrics.npz"] = record.write_bytes(job.folder / of / "metrics.npz", buffer.getvalue())
            said = [] if part else job.read(f"trace.{name}").get("findings", [])  # what the reference says of itself
            body["findings"] += said
            kind = "text" if traces[name].prompt == len(traces[name].tokens) else "chat"
            found[of] = {"kind": kind, "part": part or DECODE, **body}
    covered = _coverage(job, graph_files.contract(job), list(traces.values()))
    return {"programs": found, "files": files, "coverage": covered}


def _observation(job: Job, part: str, program: str) -> Path:
    """part: empty of `decode`. A board runs all parts in one job, whose record has them all."""
    label = f"observed.{part}"
    if not part or label in job.inputs:
        return job.file(label.rstrip("."), f"observations/{program}.npz")
    return job.file("observed", f"observations/{part}/{program}.npz")


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
