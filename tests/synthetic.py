"""Rows without a model: a contract, a trace, an observation that equals it, and a results folder made of them.

Not a test itself. Every test changes one thing in a row that passes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from kvgate import contract as c
from kvgate.jobs import record
from kvgate.jobs.job import Job, record_path
from kvgate.judging import behaviour
from kvgate.observe import Trace, planned
from kvgate.stages import judge, tabulate, verify

LAYERS, HEADS, SIZE, VOCABULARY, TOKENS, PROMPT = 3, 2, 8, 40, 24, 5
CAPACITY = TOKENS - 1  # what a chat fills: its last token is read by nobody
ISOLATED = 4
HISTORIES = ("isolated", "forced")
THRESHOLDS = yaml.safe_load((Path(__file__).parent.parent / "config" / "thresholds.yaml").read_text())
TUPLE = {"model": "tiny", "weights": "plain", "strategy": "cpu_managed", "platform": "rk3576", "quant": "fp16"}
ROW = TUPLE | {"backend": "simulator"}
BUILD = {
    "status": "ok",
    "rows": 50,
    "cycles": 36_400_000,
    "traffic_bytes": 270 * 2**20,
    "weight_bytes": 263 * 2**20,
    "artifact_bytes": 278 * 2**20,
    "cpu_operators": {},
    "risks": ["F1 rank-4 cache: may be misread on a board"],
    "findings": [],
}


def contract(**changes: Any) -> c.Contract:
    cache = c.Cache(capacity=CAPACITY)
    states = tuple(x for i in range(LAYERS) for x in c.key_value(i, HEADS, SIZE, SIZE, CAPACITY))
    inputs = (c.Tensor("embedding", c.EMBEDDING, (1, 1, 4)), c.Tensor("rotation.0", c.ROTATION, (1, SIZE, 1, SIZE)))
    outputs = (c.Tensor("logits", c.LOGITS, (1, 1, VOCABULARY)), *c.cache_tensors(cache, states, 1, ".out"))
    made = c.Contract(
        "cpu_managed", "decode", "recipe", "", VOCABULARY, 4, cache, states, (c.Layer(),) * LAYERS, (None,),
        (*inputs, *c.cache_tensors(cache, states, CAPACITY)), outputs, "",
    )  # fmt: skip
    return replace(made, **changes)


def trace(text: bool = False, tokens: int = TOKENS) -> Trace:
    """Random K and V; logits whose best token is the next one, by a margin of 5."""
    rng = np.random.default_rng(7)
    ids = rng.integers(0, VOCABULARY, tokens)
    logits = rng.normal(size=(tokens, VOCABULARY)).astype(np.float32)
    logits[np.arange(tokens), np.roll(ids, -1)] = logits.max(axis=1) + 5
    kv = rng.normal(size=(2, LAYERS, tokens, HEADS, SIZE)).astype(np.float32)
    states = {f"layers.{i}.{kind}": x[i] for i in range(LAYERS) for kind, x in zip(("key", "value"), kv, strict=True)}
    return Trace(ids, tokens if text else PROMPT, not text, (int(ids[-1]),), states, logits)


def observation(of: Trace) -> dict[str, np.ndarray]:
    """What a perfect backend returns."""
    assert of.logits is not None
    found = {}
    for history, steps in planned(of, CAPACITY, ("isolated", "forced"), ISOLATED).items():
        positions = np.array(steps)
        found[f"{history}/positions"] = positions
        found[f"{history}/tokens"] = of.tokens[positions]
        found[f"{history}/logits"] = of.logits[positions].copy()
        found[f"{history}/disturbed"] = np.zeros(len(positions))
        for i in range(LAYERS):
            found[f"{history}/layers.{i}.key"] = of.states[f"layers.{i}.key"][positions].copy()
            found[f"{history}/layers.{i}.value"] = of.states[f"layers.{i}.value"][positions].copy()
    if of.prompt < len(of.tokens):
        found |= {"free/tokens": of.tokens[PROMPT:].copy(), "free/diverged": np.array(-1)}
    return found


def off(array: np.ndarray, error: float) -> np.ndarray:
    """The array with a normalized L2 of `error` in each row."""
    return (array * (1 + error)).astype(np.float32)


class Results:
    """A results folder with one row, written as the stages before verify would."""

    def __init__(self, root: Path, row: dict[str, str] | None = None, dtype: str | None = None) -> None:
        """dtype: of the artifact; the quant's name where none is given."""
        self.root, self.row = root, row or ROW
        self.names = self.row | {"part": "decode"}
        self.programs: dict[str, dict[str, list[str]]] = {}
        facts = {"logits_l2": 2e-6, "kv_l2": 1e-6, "disturbed": 0.0, "steps": 27, "top1": 27}
        self.write("check", {"status": "ok", "findings": [], "programs": {"capital": facts}})
        identity = {"mask_value": -1e4, "quant": {"config": {"quantized_dtype": dtype or self.row["quant"]}}}
        record.write(self.path("build").with_name("contract.json"), {"identity": identity})
        record.write_bytes(self.path("build").with_name("model.rknn"), f"artifact {self.row['quant']}".encode())
        record.write_bytes(self.path("export").with_name("model.onnx"), b"a graph")
        np.savez(self.path("export").with_name("host.npz"), embedding=np.ones((VOCABULARY, 4), np.float32))
        for name in ("tokenizer.json", "model.safetensors"):
            record.write_bytes(self.path("fetch").with_name(name), name.encode())
        self.contract(contract())
        self.listed("fetch", {"status": "ok"}, "tokenizer.json", "model.safetensors")
        self.listed("build", BUILD, "model.rknn", "contract.json")

    def path(self, stage: str, **names: str) -> Path:
        return self.root / record_path(stage, self.names | names)

    def write(self, stage: str, body: dict[str, Any], **names: str) -> None:
        record.write(self.path(stage, **names), body)

    def listed(self, stage: str, body: dict[str, Any], *names: str) -> None:
        """Write a record that lists the files beside it."""
        self.write(stage, body | {"files": {x: record.sha256(self.path(stage).parent / x) for x in names}})

    def contract(self, made: c.Contract) -> None:
        """Write it, and the export's record."""
        made = replace(made, host_sha256=record.sha256(self.path("export").with_name("host.npz")))
        record.write_bytes(self.path("export").with_name("contract.json"), made.to_json().encode())
        files = ("model.onnx", "contract.json", "host.npz")
        self.listed("export", {"status": "ok", "contract": made.digest}, *files)

    def built(self, body: dict[str, Any]) -> None:
        """The build's record, which lists its observations too."""
        seen = sorted(f"observations/{x.name}" for x in self.path("build").parent.glob("observations/*.npz"))
        self.listed("build", body, "model.rknn", "contract.json", *seen)

    def verify(
        self,
        program: str,
        of: Trace,
        seen: dict[str, np.ndarray],
        histories: tuple[str, ...] = (),
        said: Sequence[dict] = (),
    ) -> dict:
        """histories: as the program asks for; those that were observed where none is given. said: the trace's own
        findings."""
        asked = histories or [h for h in ("isolated", "forced", "free") if f"{h}/tokens" in seen]
        self.programs[program] = {"histories": list(asked)}
        path = self.path("trace", program=program)
        path.parent.mkdir(parents=True, exist_ok=True)
        of.save(str(path.with_name("trace.npz")))
        files = {"trace.npz": record.sha256(path.with_name("trace.npz"))}
        record.write(path, {"status": "ok", "end_ids": list(of.end_ids), "findings": list(said), "files": files})
        observed = self.path("build").parent / "observations" / f"{program}.npz"
        observed.parent.mkdir(exist_ok=True)
        with observed.open("wb") as file:
            np.savez(file, **seen)
        self.built(record.read(self.path("build")))
        inputs = {f"trace.{p}": self.path("trace", program=p) for p in self.programs}
        inputs |= {"export": self.path("export"), "observed": self.path("build"), "build": self.path("build")}
        job = Job("verify", self.row, {"programs": self.programs, "isolated": ISOLATED}, inputs, self.root)
        body = {"status": "ok", **verify.run(job)}
        record.write(job.record, body)
        return body["programs"][program]

    def judge(self, thresholds: dict[str, Any] = THRESHOLDS) -> dict[str, Any]:
        if not self.path("verify").exists():
            self.write("verify", {"status": "ok", "programs": {}})
        inputs = {stage: self.path(stage) for stage in ("export", "check", "build", "verify")}
        job = Job("judge", self.row, {"thresholds": thresholds}, inputs, self.root)
        body = {"status": "ok", **judge.run(job)}
        record.write(job.record, body)
        return body


def judged(root: Path, change: Any = None, of: Trace | None = None, build: dict[str, Any] | None = None) -> dict:
    """The verdict of a row of one program; `change(observation)` breaks it."""
    results, of = Results(root), of or trace()
    if build:
        results.built(BUILD | build)
    seen = observation(of)
    if change:
        change(seen)
    results.verify("capital", of, seen)
    return results.judge()


def tabulated(
    root: Path, rows: list[dict[str, str]], sweep: str = "default", bundle: tuple[str, ...] = behaviour.SHIPS
) -> dict[str, Any]:
    inputs = {f"judge.{n}": root / record_path("judge", row) for n, row in enumerate(rows)}
    config = {"rows": [list(row.values()) for row in rows], "store_gb": 1, "bundle": bundle}
    job = Job("tabulate", {"sweep": sweep}, config, inputs, root)
    job.folder.mkdir(parents=True, exist_ok=True)
    body = tabulate.run(job)
    record.write(job.record, {"status": "ok", **body})
    return body
