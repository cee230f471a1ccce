"""check: is the graph the model? Every program in ONNX Runtime against the trace, before anything is compiled.

Where a preparation has moved weights on purpose the trace's differences are recorded, and the graph is held to the
moved weights' own logits instead. Of other graphs it says what float16 itself costs: the errors of an ideal float16
run. Reads the graph's files beside its record, and the traces. Writes observations/{program}.npz (the rows of platform
`host` are verified from them) and check.json.
"""

import io
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.board.chain import Chain
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
    host = graph_files.opened(job, contract, job.config["mask"])
    engine = Engine(graph_files.graph(job), contract)
    pieces = [(Engine(graph, of), of) for graph, of in graph_files.pieces(job)]
    files, programs, isolated = {}, {}, False
    findings: list[Mapping[str, Any]] = []
    exported = job.read("export")
    moved = "moved.npz" in exported["files"]
    if moved:
        tokens, logits = _given(job.file("export", "moved.npz"))
        findings += (
            _like_decode(job, engine, host, tokens) if "decode" in job.inputs else _moved(engine, host, tokens, logits)
        )
    for name, program in job.config["programs"].items():
        trace = Trace.load(str(job.file(f"trace.{name}", "trace.npz")))
        if program["kind"] == "chat" and trace.prompt > contract.cache.capacity:
            raise record.Blocked(
                f"program {name}: got a prompt of {trace.prompt} tokens, the strategy holds {contract.cache.capacity}"
            )
        if pieces:
            findings += _in_pieces(engine, host, Chain(pieces), trace, job.config["isolated"])
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
    # Matrices as sums of two are for int4, and an exporter's graph is not ours to run ideally.
    of_float16 = not moved and contract.part == DECODE and contract.form != "exporter" and not exported["terms"]
    float16 = _float16(job, contract, host) if of_float16 else None
    return {"programs": programs, "limit": LIMIT, "float16": float16, "files": files}


def _float16(job: Job, contract: Contract, host: Any) -> dict[str, float | None]:
    """The worst of each measure that has a least error in float16, of an ideal float16 run, over the programs' forced
    histories; the isolated ones where a program has no other. K/V, the logits, and what else the graph returns."""
    try:
        engine = Engine(ideal.written(graph_files.graph(job), job.folder / "ideal"), contract)
    finally:
        shutil.rmtree(job.folder / "ideal")
    found: dict[str, list[float | None]] = {}
    for name, program in job.config["programs"].items():
        trace = Trace.load(str(job.file(f"trace.{name}", "trace.npz")))
        history = "isolated" if program["histories"] == ["isolated"] else "forced"
        seen = observe(engine, host, trace, [history], job.config["isolated"], _say(f"float16 {name}"))
        figures = compare.compare(contract, trace, seen)[0]["histories"][history]
        for of in measures.every():
            worst = of.worst(figures)
            if worst is not None:
                found.setdefault(of.name, []).append(worst["value"])
    return {k: None if None in values else max(values) for k, values in found.items()}  # type: ignore[type-var]


def _in_pieces(engine: Engine, host: Host, pieces: Chain, trace: Trace, isolated: int) -> list[dict[str, Any]]:
    """The pieces one after the other are the whole graph; a finding at the first tensor that says no."""
    want = observe(engine, host, trace, ["isolated"], isolated, _say("whole"))
    got = observe(pieces, host, trace, ["isolated"], isolated, _say("pieces"))
    for name in (*(x.name for x in host.contract.kept()), "logits"):
        error = float(np.max(metrics.l2_rows(got[f"isolated/{name}"], want[f"isolated/{name}"])))  # NaN stays
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
