"""check: is the graph the model? Every program in ONNX Runtime against the trace, before anything is compiled.

Where a preparation has moved weights on purpose the trace's differences are recorded, and the graph is held to the
moved weights' own logits instead. Of other graphs it says what float16 itself costs: the errors of an ideal float16
run. A graph in pieces runs as these, one at a time, and is held to the whole one.
Reads the graph's files beside its record, and the traces. Writes observations/{program}.npz (the rows of platform
`host` are verified from them) and check.json.
"""

import io
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.compiler import in_turn, joined
from kvgate.contract import Contract
from kvgate.engines import ideal
from kvgate.engines.onnxruntime import Engine
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.jobs.rows import DECODE, PREFILL
from kvgate.judging import compare, measures, metrics
from kvgate.observe import Trace, histories, observe
from kvgate.strategies.host import Host

LIMIT = 1e-4  # normalized L2 of logits and of every K/V delta


def run(job: Job) -> dict[str, Any]:
    """Raises record.Blocked where the graph differs from the model, with the first difference."""
    contract = graph_files.contract(job)
    for name, program in job.config["programs"].items():
        prompt = _trace(job, name).prompt
        if program["kind"] == "chat" and prompt > contract.cache.capacity:
            text = f"program {name}: got a prompt of {prompt} tokens, the strategy holds {contract.cache.capacity}"
            raise record.Blocked(text)
    programs, files = _compared(job, contract)
    exported = job.read("export")
    # Matrices as sums of two are for int4, and an exporter's graph is not ours to run ideally.
    of_float16 = "moved.npz" not in exported["files"] and contract.part == DECODE and contract.form != "exporter"
    float16 = _float16(job, contract) if of_float16 and not exported["terms"] else None
    return {"programs": programs, "limit": LIMIT, "float16": float16, "files": files}


def _compared(job: Job, contract: Contract) -> tuple[dict[str, Any], dict[str, str]]:
    """Every program's differences from its trace, and the observations' files. Raises record.Blocked."""
    host, pieces = graph_files.opened(job, contract, job.config["mask"]), graph_files.pieces(job)
    # Beside the pieces the whole graph only has to be as good: its weights are not copied.
    engine = Engine(graph_files.graph(job), contract, mapped=bool(pieces))
    files, programs, isolated = {}, {}, False
    findings: list[Mapping[str, Any]] = []
    moved = "moved.npz" in job.read("export")["files"]
    if moved:
        tokens, logits = _given(job.file("export", "moved.npz"))
        findings += (
            _like_decode(job, engine, host, tokens) if "decode" in job.inputs else _moved(engine, host, tokens, logits)
        )
    with _in_turn(job, pieces) as made:
        for name, program in job.config["programs"].items():
            trace = _trace(job, name)
            if pieces:
                seen = _joined(engine, host, trace, joined.observation(name, made, trace, program["histories"]))
                findings += _in_pieces(engine, host, seen, trace, job.config["isolated"])
            else:
                asked = histories(contract, program["histories"])
                seen = observe(engine, host, trace, asked, job.config["isolated"], _say(name))
            programs[name], differs = compare.differences(contract, trace, seen, LIMIT)
            found: list[Mapping[str, Any]] = [*differs]
            if contract.part == PREFILL and program["kind"] == "chat" and not moved:
                found += _spoken(job, engine, contract, trace)
            isolated |= "isolated/positions" in seen
            findings += [{**x, "program": name} for x in found if not moved]
            buffer = io.BytesIO()
            np.savez(buffer, **seen)  # type: ignore[arg-type]
            file = f"observations/{name}.npz"
            files[file] = record.write_bytes(job.folder / file, buffer.getvalue())
    if findings:
        findings.sort(key=compare.place)
        why = compare.reason(findings, isolated)
        raise record.Blocked(f"the graph differs from the model: {why}", findings, programs=programs, files=files)
    return programs, files


def _trace(job: Job, program: str) -> Trace:
    return Trace.load(str(job.file(f"trace.{program}", "trace.npz")))


@contextmanager
def _in_turn(
    job: Job, pieces: Sequence[tuple[Path, Contract]], what: str = ""
) -> Iterator[list[tuple[Contract, Path]]]:
    """The pieces after they have run all programs (in_turn.run); what they wrote goes with the context."""
    work, programs = job.folder / ".pieces", {}
    shutil.rmtree(work, ignore_errors=True)  # of a killed job
    for name, program in job.config["programs"].items():
        asked = [_float16_history(program)] if what else program["histories"]
        programs[name] = (job.file(f"trace.{name}", "trace.npz"), asked)

    def opened(contract: Contract) -> Host:
        return graph_files.opened(job, contract, job.config["mask"])

    try:
        yield in_turn.run(pieces, work, programs, opened, job.config["isolated"], lambda name: _say(f"{what}{name}"))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _joined(engine: Engine, host: Host, trace: Trace, seen: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """An observation of pieces as the whole graph's would be: in its order, and with what it says after it diverged."""
    if int(seen.get("free/diverged", -1)) >= 0:
        spoken = observe(engine, host, trace, ["forced", "free"], 0, _say("whole"))
        seen |= {name: x for name, x in spoken.items() if name.startswith("free/")}
    told = ("positions", "tokens", "logits", "disturbed", *(x.name for x in host.contract.kept()))
    order = [f"{history}/{name}" for history in ("isolated", "forced", "free") for name in told]
    return {name: seen[name] for name in (*order, *seen) if name in seen}


def _float16(job: Job, contract: Contract) -> dict[str, float | None]:
    """The worst of each measure that has a least error in float16, of an ideal float16 run, over the programs' forced
    histories; the isolated ones where a program has no other."""
    folder, pieces = job.folder / "ideal", graph_files.pieces(job)
    host = graph_files.opened(job, contract, job.config["mask"])
    found: dict[str, list[float | None]] = {}
    try:
        written = [(ideal.written(graph, folder), of) for graph, of in pieces]
        engine = None if pieces else Engine(ideal.written(graph_files.graph(job), folder), contract)
        with _in_turn(job, written, "float16 ") as made:
            for name, program in job.config["programs"].items():
                trace, history = _trace(job, name), _float16_history(program)
                if engine is None:
                    seen = joined.observation(name, made, trace, [history])
                else:
                    seen = observe(engine, host, trace, [history], job.config["isolated"], _say(f"float16 {name}"))
                figures = compare.compare(contract, trace, seen)[0]["histories"][history]
                for measure in measures.every():
                    worst = measure.worst(figures)
                    if worst is not None:
                        found.setdefault(measure.name, []).append(worst["value"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {k: None if None in values else max(values) for k, values in found.items()}  # type: ignore[type-var]


def _float16_history(program: dict[str, Any]) -> str:
    return "isolated" if program["histories"] == ["isolated"] else "forced"


def _in_pieces(
    engine: Engine, host: Host, seen: Mapping[str, np.ndarray], trace: Trace, isolated: int
) -> list[dict[str, Any]]:
    """The pieces one after the other are the whole graph; a finding at the first tensor that says no."""
    history = "isolated" if "isolated/positions" in seen else "forced"
    want = observe(engine, host, trace, [history], isolated, _say("whole"))
    for name in (*(x.name for x in host.contract.kept()), "logits"):
        error = float(np.max(metrics.l2_rows(seen[f"{history}/{name}"], want[f"{history}/{name}"])))  # NaN stays
        if not error <= LIMIT:
            return [
                record.finding("differs", f"in pieces: {name} {error:.3g} off the whole graph's, allowed {LIMIT:g}")
            ]
    return []


def _spoken(job: Job, engine: Engine, contract: Contract, trace: Trace) -> list[dict[str, Any]]:
    """The prompt in chunks, then token by token: the reference's answer."""
    decode = graph_files.contract(job, "decode")
    host, one = graph_files.opened(job, decode, job.config["mask"]), Engine(graph_files.graph(job, "decode"), decode)
    chunked, prompt = host.chunked(contract), trace.tokens[: trace.prompt].tolist()
    host.reset()
    for begin in range(0, len(prompt) - 1, contract.tokens):
        chunk = prompt[begin : min(begin + contract.tokens, len(prompt) - 1)]
        chunked.take(engine.step(chunked.feeds(chunk)), len(chunk))
    token = prompt[-1]
    for position in range(len(prompt) - 1, min(len(trace.tokens) - 1, decode.cache.capacity)):
        token = int(host.take(one.step(host.feeds([token]))).logits.argmax())
        if token != trace.tokens[position + 1]:
            text = f"prefill, then decode: token {token} instead of {trace.tokens[position + 1]} at position {position}"
            return [record.finding("differs", text, gate="tokens", history="free")]
    return []


def _given(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [T], and the logits [T, V] that weights which were moved on purpose give."""
    with np.load(path) as file:
        return file["tokens"], file["logits"]


def _like_decode(job: Job, engine: Engine, host: Host, tokens: np.ndarray) -> list[dict[str, Any]]:
    """A prefill graph of moved weights is held to the decode graph of the same, which is held to what they give."""
    decode = graph_files.contract(job, "decode")
    one, other = Engine(graph_files.graph(job, "decode"), decode), graph_files.opened(job, decode, job.config["mask"])
    trace = Trace(tokens, len(tokens), False, (), {}, np.zeros((len(tokens), 1), np.float32))
    want = observe(one, other, trace, ["forced"], 0, _say("moved, decode"))
    got = observe(engine, host, trace, ["forced"], 0, _say("moved"))
    for state in host.contract.kept():
        name = f"forced/{state.name}"
        error = float(np.max(metrics.l2_rows(got[name], want[name])))  # NaN stays, and is no more than nothing
        if not error <= LIMIT:
            text = f"moved weights: {state.name} {error:.3g} off the decode graph's, allowed {LIMIT:g}"
            return [record.finding("differs", text)]
    return []


def _moved(engine: Engine, host: Any, tokens: np.ndarray, logits: np.ndarray) -> list[dict[str, Any]]:
    """A graph whose weights were moved on purpose is held to what these weights give, not to the checkpoint's."""
    seen = observe(engine, host, Trace(tokens, len(tokens), False, (), {}, logits), ["forced"], 0, _say("moved"))
    wanted = logits[seen["forced/positions"]]  # as far as the cache reaches
    # NaN stays, and is no more than nothing.
    error = np.max([metrics.l2(got, want) for got, want in zip(seen["forced/logits"], wanted, strict=True)])
    if error <= LIMIT:
        return []
    return [record.finding("differs", f"moved weights: logits_l2 {error:.3g}, allowed {LIMIT:g}")]


def _say(name: str) -> Any:
    return lambda text: print(f"{name}: {text}", file=sys.stderr)
