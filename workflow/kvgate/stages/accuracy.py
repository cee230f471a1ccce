"""accuracy: the toolkit's accuracy analysis of one state of a row, operator by operator. Made only for a diagnosis.

Compiles the row's graph once more, as its build did (only the compiling process can simulate), and runs the state whose
K/V were worst. Reads what the build reads, and the row's metrics. Writes accuracy.json, and beside it accuracy.log.
"""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.compiler import analysis, artifact, calibration, toolkit
from kvgate.compiler.snapshot import Snapshot, finite, parsed
from kvgate.contract import Contract
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.judging import errors, metrics
from kvgate.observe import Trace
from kvgate.stages import build

COMMAND = (sys.executable, "-m", "kvgate.compiler.analysis")
Array = np.ndarray
_ENDED = ("crash", "hang")  # of a build these are data; who asks for a diagnosis again wants it tried again


@dataclass(frozen=True)
class State:
    """The step that is analysed: fed the reference's cache, as in an isolated run."""

    program: str
    position: int
    history: str  # the one in which it was the worst
    error: float | None  # L2 of its worst K or V there; None where that is not finite


def run(job: Job) -> dict[str, Any]:
    """Raises Blocked where the toolkit refuses, crashes, hangs or runs out of memory, or leaves what cannot be read."""
    source = build.opened(job)
    if job.read("export").get("pieces"):
        text = "accuracy analysis: got a row in pieces, allowed: in one piece"
        raise record.Blocked(text, [record.finding("pieces", text)])
    state = _state(job, replaced=not all(x.appended for x in source.contract.states))
    trace = Trace.load(str(job.file(f"trace.{state.program}", "trace.npz")))
    host = build.host_of(job, source)
    what = f"accuracy analysis: state ({state.program}, {state.position})"
    feeds = calibration.feeds(source.contract, host, trace, state.position, what)
    work = toolkit.scratch(job.folder, ".analysis")
    try:
        facts = _analyse(job, source, feeds, work)
        built = job.read("build")
        snapshot = Snapshot(work, str(source.graph), built.get("hybrid", {}), source.quant.get("headroom", 1.0))
        operators = snapshot.operators(built.get("cpu_names", []), _owners(source), _layers(source.contract))
        scaled = any(row["scale"] for row in operators)
        return {
            "state": asdict(state),
            "artifact": _artifact(job, work),
            "golden": _compared(snapshot, source.contract, host, trace, feeds, "golden"),
            "simulator": _compared(snapshot, source.contract, host, trace, feeds, "simulator"),
            "fed": _fed(snapshot, feeds),
            "ranges": facts["ranges"] or ("" if scaled else analysis.NO_RANGES),  # of w4a16 the list is empty
            "operators": operators,
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _state(job: Job, replaced: bool = False) -> State:
    """The isolated step with the worst K/V; where there is none, the forced one, else the first program's first.

    replaced: the model has such states; then a step that the reference knows them before and after.
    """
    found: list[tuple[float, State]] = []
    for history in ("isolated", "forced"):
        for program in job.config["programs"]:
            with np.load(job.file("verify", f"{program}/metrics.npz")) as file:
                if f"{history}/kv" not in file.files or not file[f"{history}/kv"].size:
                    continue
                kv, positions = file[f"{history}/kv"], file[f"{history}/positions"]
            worst = np.where(np.isfinite(kv), kv, np.inf).reshape(len(kv), -1).max(axis=1)
            if replaced:
                trace = Trace.load(str(job.file(f"trace.{program}", "trace.npz")))
                worst = np.where(np.isin(positions, trace.steps(len(trace.tokens))), worst, -1)
            n = int(worst.argmax())
            found.append((worst[n], State(program, int(positions[n]), history, finite(float(worst[n])))))
        if found:
            return max(found, key=lambda x: x[0])[1]
    return State(next(iter(job.config["programs"])), 0, "", None)


def _analyse(job: Job, source: build.Source, feeds: Mapping[str, Array], work: Path) -> dict[str, Any]:
    """The child's facts; its files are in `work`."""
    names = [f"feed.{i}.npy" for i in range(len(feeds))]
    for name, array in zip(names, feeds.values(), strict=True):
        np.save(work / name, array)
    asked = build.asked(job, source, work)
    request = analysis.Analysis(**{**vars(asked), "programs": {}}, feeds=names)
    outcome = toolkit.compile(request, work, job.folder / "accuracy.log", job.config["timeout"], command=COMMAND)
    record.write(job.folder / "accuracy.phases.json", {"seconds": outcome.seconds, "peak_bytes": outcome.peak})
    if outcome.reason and (work / analysis.ANALYSED).exists():
        return {"ranges": outcome.reason}  # the analysis stands without
    if outcome.reason:
        why = outcome.blocked("accuracy analysis: ")
        why.facts |= {"again": True} if outcome.kind in _ENDED else {}
        raise why
    return record.read(Path(request.result))["facts"]


def _artifact(job: Job, work: Path) -> str:
    """`equal` where what was analysed is the row's artifact, by its content digest; else what differs."""
    made, built = parsed(work / "model.rknn", artifact.read).content_digest, job.read("build")["content_digest"]
    if made == built:
        return "equal" if not made.startswith("not comparable") else made
    return f"got content digest {made}, the row's is {built}"


def _fed(snapshot: Snapshot, feeds: Mapping[str, Array]) -> str:
    """Empty where the toolkit took every input as it was fed; else which one it did not."""
    for name, array in feeds.items():
        seen = snapshot.tensor(name, "golden")
        if seen is None:
            return f"{name}: not dumped"
        if seen.size != array.size or not np.array_equal(seen.reshape(-1), array.reshape(-1).astype(seen.dtype)):
            return f"{name}: got another array than was fed"
    return ""


def _compared(
    snapshot: Snapshot, contract: Contract, host: Any, trace: Trace, feeds: Mapping[str, Array], run: str
) -> dict[str, Any]:
    """The outputs of a run against the reference: L2 of the logits (mean removed) and of the worst K or V."""
    outputs = {}
    for t in contract.outputs:
        array = snapshot.tensor(t.name, run)
        if array is None or array.size != np.prod(t.shape):
            return {"logits_l2": None, "kv_l2": None, "why": f"output {t.name}: not dumped"}
        outputs[t.name] = array.reshape(t.shape).astype(t.dtype)
    position = host.length
    step = host.take(outputs)
    host.fill(trace.tokens.tolist(), trace.before(position), position)  # as it was
    logits = None
    if trace.logits is not None:
        logits = metrics.l2(metrics.centred(step.logits[None]), metrics.centred(trace.logits[position][None]))
    at = np.array([position])
    known = {x: got for x, got in step.states.items() if x not in trace.replaced or position in trace.at}
    pairs = [(got[None], errors.wanted(trace, name, at)) for name, got in known.items()]
    worst = float(np.max([metrics.l2(got, want) for got, want in pairs])) if pairs else None  # NaN stays
    return {
        "logits_l2": logits if logits is None else finite(logits),
        "kv_l2": worst if worst is None else finite(worst),
    }


def _owners(source: build.Source) -> dict[str, str]:
    """The exported graph's tensors and the names of the operators that give them."""
    import onnx

    model = onnx.load(str(source.graph), load_external_data=False)
    return {name: node.name for node in model.graph.node for name in node.output}


def _layers(contract: Contract) -> dict[str, int]:
    """The layer of every cache tensor that is one layer's."""
    layer = {x.name: x.layer for x in contract.states}
    tensors = ((t.name, {layer[x] for x in t.states}) for t in (*contract.cache_inputs(), *contract.cache_outputs()))
    return {name: layers.pop() for name, layers in tensors if len(layers) == 1}
