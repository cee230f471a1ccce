"""build: compile a graph for a platform and run the programs in the simulator, both in one child process.

Reads the graph's folder (export), the programs' and the calibration texts' traces, and the check's record only to know
that the graph is the model. Writes model.rknn, contract.json (the artifact's), table.txt (the compiler's layers),
observations/{program}.npz, and beside them toolkit.log and phases.json, which differ between equal builds.
"""

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kvgate.board.chain import Chain
from kvgate.compiler import artifact, calibration, joined, log, platforms, requirements, risks, toolkit
from kvgate.compiler.request import Request
from kvgate.contract import HIDDEN, Contract, canonical, sha256_text
from kvgate.engines.onnxruntime import Engine
from kvgate.jobs import graph_files, record, store
from kvgate.jobs.digest import code_digest
from kvgate.jobs.entries.program import History
from kvgate.jobs.entries.quant import Quant
from kvgate.jobs.job import Job
from kvgate.judging import coverage
from kvgate.observe import Trace
from kvgate.strategies.host import Host

_MODEL, _LOG = "model.rknn", "toolkit.log"
_KEPT = "@kept"


class Identity(TypedDict):
    """What makes an artifact, known before it is built: its digest is the artifact's custom string."""

    graph: str  # the contract's digest
    mask_value: float
    calibration: str  # the samples' digest
    platform: str
    quant: Quant
    toolkit: str


class Asked(TypedDict):
    """What the child is asked to run of a program."""

    trace: str
    histories: list[History]
    given: NotRequired[str]  # the stream of every step, of a piece that has others before it


class Boundary(TypedDict):
    inputs: list[dict[str, object]]  # artifact.Tensor
    outputs: list[dict[str, object]]


@dataclass(frozen=True)
class Source:
    """What a build reads, opened."""

    graph: Path
    told: Path  # the contract's file
    contract: Contract
    quant: Quant  # `@kept` replaced by the graph's own
    platform: str
    samples: list[calibration.Sample]
    calibration: str  # digest of the samples, empty where there are none
    into: Path  # where its files go
    below: Path | None = None  # of a piece: where the observations are of the one before it, the stream's among them


def run(job: Job) -> dict[str, Any]:
    """Raises Blocked where the toolkit refuses, crashes, hangs or runs out of memory, or a gate does not hold."""
    source = opened(job)
    pieces = _pieces(job, source)
    bodies = [_built(job, x) for x in pieces or [source]]
    return joined.body(job, [(x.contract, x.into) for x in pieces], bodies) if pieces else bodies[0]


def _built(job: Job, source: Source) -> dict[str, Any]:
    """A graph's artifact and observations, made or brought back; its record."""
    _clear(job, source)
    model = _graph(source)
    key = store.key(_identity(job, source))
    stored = _stored(job, source, key)
    if not stored:
        work = toolkit.scratch(source.into)
        try:
            _compile(job, source, model, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    body = _body(job, source, model)
    job.unmoved()
    if not stored:
        store.put(job.results, key, source.into, body["files"] | {_LOG: record.sha256(source.into / _LOG)})
    return body


def _pieces(job: Job, source: Source) -> list[Source]:
    """The graph's pieces; each is fed the stream that the one before it has given."""
    found: list[Source] = []
    for graph, contract in graph_files.pieces(job):
        below = next((x.into for x in reversed(found) if any(t.role == HIDDEN for t in x.contract.outputs)), None)
        into = job.folder / contract.part
        into.mkdir(parents=True, exist_ok=True)
        told = graph.with_name(f"{contract.part}.json")
        found.append(replace(source, graph=graph, told=told, contract=contract, into=into, below=below))
    return found


def _stored(job: Job, source: Source, key: str) -> bool:
    """Whether the store had it. An entry of another artifact than its key promises goes."""
    if not store.get(job.results, key, source.into):
        return False
    held = record.read(source.into / "contract.json")["custom_string"]
    if artifact.read(source.into / _MODEL, digests=False).custom == held == _custom(source):
        return True
    store.drop(job.results, key)
    _clear(job, source)
    return False


def _clear(job: Job, source: Source) -> None:
    for name in (*_files(job), _LOG, "phases.json"):
        (source.into / name).unlink(missing_ok=True)


def opened(job: Job) -> Source:
    """Raises Blocked where the platform has no such dtype, or the calibration texts do not do."""
    contract, graph = graph_files.contract(job), graph_files.graph(job)
    quant, platform = _with_kept(job.config["quant"], job.read("export").get("kept", [])), job.wildcards["platform"]
    if platforms.dtype(quant) not in platforms.supported(platform):
        raise record.Blocked(
            f"{platform}: got {platforms.dtype(quant)}, supported: {', '.join(platforms.supported(platform))}"
        )
    samples, digest = [], ""
    replaced = [x.name for x in contract.states if not x.appended]
    if replaced and quant["calibrate"]:
        raise record.Blocked(f"calibration: got the replaced state {replaced[0]}, allowed: a quant without calibration")
    if quant["calibrate"]:
        capacity = contract.cache.capacity
        texts, drawn = calibration.tokens(_traces(job, "calibration"))
        verified, _ = calibration.tokens(_traces(job, "trace"))
        calibration.refuse_verified(texts, drawn, verified, capacity)
        samples = calibration.choose(texts, capacity, job.config["calibration"]["samples"], drawn)
        digest = calibration.digest(samples, _sha256(job, "calibration"))
    told = job.file("export", "contract.json")
    return Source(graph, told, contract, quant, platform, samples, digest, job.folder)


def _with_kept(quant: Quant, kept: list[str]) -> Quant:
    """The quant with a pattern for each matrix that stays in float16; with none it is the quant without `@kept`."""
    hybrid = quant.get("hybrid", {})
    if _KEPT not in hybrid:
        return quant
    rest = {pattern: dtype for pattern, dtype in hybrid.items() if pattern != _KEPT}
    return {**quant, "hybrid": rest | {f"@{name}": hybrid[_KEPT] for name in kept}}


def _traces(job: Job, stage: str) -> dict[str, Path]:
    """The trace.npz of every program (`trace`) or calibration text (`calibration`)."""
    return {x.partition(".")[2]: job.file(x, "trace.npz") for x in job.labels(stage)}


def _sha256(job: Job, stage: str) -> dict[str, str]:
    return {x.partition(".")[2]: job.read(x)["files"]["trace.npz"] for x in job.labels(stage)}


def _identity(job: Job, source: Source) -> dict[str, object]:
    """All that can change what a build gives. Names and paths cannot."""
    half = f"kvgate.strategies.{source.contract.strategy}.host"
    return {
        "graph": _reads(job, source),
        "contract": source.contract.digest,
        "calibration": source.calibration,
        "quant": source.quant,
        "platform": source.platform,
        "versions": job.key.get("versions", {}),
        "programs": {
            name: [digest, sorted(job.config["programs"][name]["histories"])]
            for name, digest in _sha256(job, "trace").items()
        },
        "isolated": job.config["isolated"],
        "portable": toolkit.portable(),
        "code": code_digest(["kvgate.compiler.child", "kvgate.compiler.calibration", half]),
    }


def _reads(job: Job, source: Source) -> dict[str, str]:
    """The files that are built from, each with its sha256."""
    files: dict[str, str] = job.read("export")["files"]
    if source.into == job.folder:
        return files
    names = (source.graph.name, source.told.name, "weights.bin", "head.bin", "host.npz")
    mine = {x: files[x] for x in names if x in files}
    below = sorted((source.below / "observations").glob("*.npz")) if source.below else []
    return mine | {f"below/{x.name}": record.sha256(x) for x in below}


def _graph(source: Source) -> Any:
    """The ONNX model without its weights, if it may be compiled."""
    import onnx

    model = onnx.load(str(source.graph), load_external_data=False)
    _hold(requirements.graph(model, source.graph.parent, source.contract))
    return model


def _hold(found: list[dict[str, Any]], more: list[dict[str, Any]] | None = None) -> None:
    if found:
        raise record.Blocked(found[0]["text"], [*found, *(more or [])])


def _artifact(source: Source) -> Identity:
    return {
        "graph": source.contract.digest,
        "mask_value": source.quant["mask"],
        "calibration": source.calibration,
        "platform": source.platform,
        "quant": source.quant,
        "toolkit": toolkit.version(),
    }


def _custom(source: Source) -> str:
    return canonical({"kvgate": sha256_text(canonical(_artifact(source)))})


def _compile(job: Job, source: Source, model: Any, work: Path) -> None:
    """Leave all files of the job in its folder."""
    request = asked(job, source, work)
    outcome = toolkit.compile(request, work, source.into / _LOG, job.config["timeout"])
    record.write(source.into / "phases.json", {"seconds": outcome.seconds, "peak_bytes": outcome.peak})
    if outcome.reason:
        names = requirements.long_names(model)
        long = (
            f"; a name of {len(names[0])} characters, allowed: {requirements.NAME_LIMIT}: {names[0]}" if names else ""
        )
        raise replace(outcome, reason=outcome.reason + long).blocked()
    _hold([x for x in outcome.findings if x["kind"] == "random_weights"], outcome.findings)
    built = artifact.read(Path(request.artifact))
    if built.custom != request.custom:
        raise record.Blocked(f"artifact's custom string: got {built.custom!r}, allowed: {request.custom!r}")
    table = log.table((source.into / _LOG).read_text(errors="replace", encoding="utf-8"))
    contract = {"identity": _artifact(source), "custom_string": request.custom, "boundary": _boundary(built)}
    observations = source.into / "observations"
    shutil.rmtree(observations, ignore_errors=True)
    Path(request.observations).rename(observations)
    Path(request.artifact).replace(source.into / _MODEL)
    record.write_bytes(source.into / "table.txt", table.text.encode())
    record.write(source.into / "contract.json", contract)


def _body(job: Job, source: Source, model: Any) -> dict[str, Any]:
    """The record, from the job's files alone: the same whether they were made now or came from the store."""
    built = artifact.read(source.into / _MODEL)
    text = (source.into / _LOG).read_text(errors="replace", encoding="utf-8")
    figures = log.table(text).summary()
    memory = sum(figures[name] or 0 for name in ("weight_bytes", "internal_bytes")) + source.contract.history_bytes()
    boundary = _boundary(built)
    outside = _own_coverage(job, source, boundary)
    algorithm = source.quant["config"].get("quantized_algorithm", "normal")
    return {
        **figures,
        "tokens": source.contract.tokens,
        "artifact_bytes": built.size,
        "sha256": built.sha256,
        "content_digest": built.content_digest,
        "toolkit": built.version,
        "compiler": built.compiler,
        "boundary": boundary,
        "hybrid": log.hybrid(text),
        "findings": log.findings(text) + coverage.saturated(outside, boundary, algorithm),
        "risks": risks.find(model, source.contract, figures["operators"], memory),
        "calibration": {
            "digest": source.calibration,
            "samples": [[s.text, s.position] for s in source.samples],
            "outside": outside,
        },
        "files": {name: record.sha256(source.into / name) for name in _files(job) if name != _MODEL}
        | {_MODEL: built.sha256},
    }


def _own_coverage(job: Job, source: Source, boundary: Boundary) -> dict[str, float]:
    """Share of the calibration samples' own values outside the ranges made of them, by cache tensor."""
    if not source.samples:
        return {}
    used = {s.text for s in source.samples}
    traces = {t: Trace.load(str(path)) for t, path in _traces(job, "calibration").items() if t in used}
    samples = [(s.text, s.position) for s in source.samples]
    return coverage.own(host_of(job, source), samples, traces, boundary)


def host_of(job: Job, source: Source) -> Host:
    """The host half of what is built, of a piece that of the whole, with the quant's mask."""
    whole = graph_files.contract(job) if source.into != job.folder else source.contract
    return graph_files.opened(job, whole, source.quant["mask"])


def _before(job: Job, source: Source) -> Chain | None:
    """The pieces that run before a piece, in float32; None where there are none."""
    found = []
    for graph, contract in graph_files.pieces(job) if source.below else ():
        if not any(t.role == HIDDEN for t in contract.outputs) or contract.part == source.contract.part:
            break
        found.append((Engine(graph, contract), contract))
    return Chain(found) if found else None


def _boundary(built: artifact.Artifact) -> Boundary:
    return {"inputs": [asdict(t) for t in built.inputs], "outputs": [asdict(t) for t in built.outputs]}


def _files(job: Job) -> list[str]:
    return [_MODEL, "contract.json", "table.txt"] + [
        f"observations/{x.partition('.')[2]}.npz" for x in job.labels("trace")
    ]


def asked(job: Job, source: Source, work: Path) -> Request:
    """The child's request; its calibration files are written on the way."""
    dataset = None
    if source.samples:
        # A bare name: the toolkit cannot read paths with a space in them.
        traces = _traces(job, "calibration")
        host, before = host_of(job, source), _before(job, source)
        dataset = calibration.write(work, source.contract, host, traces, source.samples, before).name
    (work / "observations").mkdir()
    return Request(
        graph=str(source.graph.resolve()),
        contract=str(source.told.resolve()),
        tables=str(job.file("export", "host.npz").resolve()),
        artifact=str((work / "model.rknn").resolve()),
        result=str((work / "result.json").resolve()),
        observations=str((work / "observations").resolve()),
        platform=source.platform,
        dtype=platforms.dtype(source.quant),
        config=source.quant.get("config", {}),
        build=source.quant.get("build", {}),
        hybrid=source.quant.get("hybrid", {}),
        headroom=source.quant.get("headroom", 1),
        dataset=dataset,
        custom=_custom(source),
        mask=source.quant["mask"],
        programs={name: _program(job, source, name, path.resolve()) for name, path in _traces(job, "trace").items()},
        isolated=job.config["isolated"],
    )


def _program(job: Job, source: Source, name: str, trace: Path) -> Asked:
    asked: Asked = {"trace": str(trace), "histories": job.config["programs"][name]["histories"]}
    if source.below:
        asked["given"] = str((source.below / "observations" / f"{name}.npz").resolve())
    return asked
