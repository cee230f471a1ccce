"""Graphs of the random models by the real stages, without the workflow. Not a test itself."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import families
import numpy as np
from kvgate.contract import Contract
from kvgate.engines.onnxruntime import Engine
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.observe import Trace
from kvgate.stages import build, export, prepare
from kvgate.strategies.host import Host

STRATEGIES = ("dynamic_concat", "cpu_managed", "fixed_max_scatter", "fixed_max_blend")


@dataclass(frozen=True)
class Model:
    """A checkpoint in a results folder; stages run on it as the workflow runs them."""

    results: Path
    name: str

    @staticmethod
    def of(results: Path, family: str, size: families.Size = families.TINY, layers: int = 2, seed: int = 0) -> "Model":
        families.checkpoint(results / "models" / family / "checkpoint", family, size, layers, seed)
        return Model(results, family)

    @property
    def checkpoint(self) -> Path:
        return self.results / "models" / self.name / "checkpoint"

    def prepare(self, form: str, *steps: str) -> dict[str, Any]:
        """weights.json of a form and of preparations without options; made once."""
        entry = {"steps": [{"name": name, "options": {}} for name in steps]}
        job = self._job("prepare", {"form": form, "weights": _weights(steps)}, {"weights": entry}, {})
        if not job.record.exists():
            record.write(job.record, prepare.run(job) | {"status": "ok"})
        return record.read(job.record)

    def export(
        self, module: str, form: str = "recipe", capacity: int = 8, steps: Sequence[str] = (), **cache: Any
    ) -> "Graph":
        """A graph of the strategy; made once. steps: preparations; cache: layout, rank, packing, layers of a piece and
        tokens of a prefill step if not the defaults."""
        rest = {"layout": "channels", "rank": 4, "packing": "apart", "layers": 0, "prefill": 0} | cache
        strategy = {"module": module, "capacity": capacity, "form": form, **rest}
        name = "_".join(str(x) for x in (module, form, *rest.values(), capacity))
        inputs, names = {"fetch": self.checkpoint / "manifest.json"}, {"weights": _weights(steps)}
        if form != "exporter":
            self.prepare(form, *steps)
            inputs["prepare"] = self._job("prepare", {"form": form, **names}, {}, {}).record
        names["part"] = "prefill" if rest["prefill"] else "decode"
        job = self._job("export", {"strategy": name, **names}, {"strategy": strategy}, inputs)
        if not job.record.exists():
            record.write(job.record, export.run(job) | {"status": "ok"})
        return Graph(job.folder)

    def prefill(
        self,
        module: str,
        form: str = "recipe",
        capacity: int = 8,
        tokens: int = 4,
        steps: Sequence[str] = (),
        **cache: Any,
    ) -> "Graph":
        """The prefill part of the same row, on the same weights file; made once."""
        return self.export(module, form, capacity, steps, prefill=tokens, **cache)

    def build(
        self,
        graph: "Graph",
        trace: Trace | None,
        isolated: int = 4,
        quant: dict[str, Any] | None = None,
        calibration: Sequence[Trace] = (),
    ) -> dict[str, Any]:
        """build.json of a graph for rk3576, the trace's isolated steps simulated. Raises record.Blocked.

        quant: an entry of quants.yaml, of fp16 where there is none; 8 samples of the calibration texts.
        """
        name = graph.folder.parent.name
        inputs, programs = {"export": graph.folder / "graph.json"}, {}
        if trace:
            inputs["trace.text"] = self._saved(name, trace)
            programs["text"] = {"histories": ["isolated"]}
        for n, text in enumerate(calibration):
            inputs[f"calibration.{n}"] = self._saved(f"{name}_{n}", text)
        entry = {"mask": -10000, "calibrate": False, "config": {}, "build": {}, "hybrid": {}} | (quant or {})
        config = {"quant": entry, "programs": programs, "isolated": isolated, "timeout": 300}
        config["calibration"] = {"samples": 8}
        names = {"strategy": name, "platform": "rk3576", "quant": "q", "part": graph.folder.name}
        job = self._job("build", names, config, inputs)
        body = build.run(job) | {"status": "ok"}
        record.write(job.record, body)
        return body | ({"observed": dict(np.load(job.folder / "observations" / "text.npz"))} if trace else {})

    def _saved(self, program: str, trace: Trace) -> Path:
        """The record of a trace that is written as the stage writes it."""
        path = self._job("trace", {"program": program}, {}, {}).folder / "trace.npz"
        trace.save(str(path))
        record.write(path.with_name("trace.json"), {"status": "ok", "files": {"trace.npz": record.sha256(path)}})
        return path.with_name("trace.json")

    def text(self, count: int, seed: int = 1) -> Trace:
        """The reference of random ids."""
        vocabulary = int(record.read(self.checkpoint / "config.json")["vocab_size"])
        tokens = np.random.default_rng(seed).integers(3, vocabulary, count)
        return families.trace(self.checkpoint, tokens)

    def _job(self, stage: str, names: dict[str, str], config: dict[str, Any], inputs: dict[str, Path]) -> Job:
        wildcards = {"model": self.name, "weights": "plain", "part": "decode", **names}
        job = Job(stage, wildcards, config, inputs or {"fetch": self.checkpoint / "manifest.json"}, self.results)
        job.folder.mkdir(parents=True, exist_ok=True)
        return job


@dataclass(frozen=True)
class Graph:
    """An exported graph's folder, opened as the stages open it."""

    folder: Path

    @cached_property
    def record(self) -> dict[str, Any]:
        return record.read(self.folder / "graph.json")

    @cached_property
    def contract(self) -> Contract:
        return Contract.from_json((self.folder / "contract.json").read_text())

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / "host.npz"))

    @cached_property
    def engine(self) -> Engine:
        return Engine(self.folder / "model.onnx", self.contract)

    def host(self, mixin: type | None = None, mask_value: float = -1e4) -> Host:
        """The strategy's host half; `mixin` goes before it (a wrong way to be tried)."""
        right = importlib.import_module(f"kvgate.strategies.{self.contract.strategy}.host").Host
        made = type("Host", (mixin, right), {}) if mixin else right
        host: Host = made(self.contract, self.tables, mask_value)
        return host


def _weights(steps: Sequence[str]) -> str:
    return "_".join(steps) or "plain"


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """||a - b|| / ||b|| in float64; shapes must be equal."""
    assert a.shape == b.shape, (a.shape, b.shape)
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def worst(found: dict[str, np.ndarray], trace: Trace, history: str) -> tuple[float, float]:
    """The largest L2 of a step's logits and of a step's K or V delta. Raises AssertionError where nothing was run."""
    at = found[f"{history}/positions"]
    assert len(at) and trace.logits is not None
    logits = [relative(x, trace.logits[p]) for x, p in zip(found[f"{history}/logits"], at, strict=True)]
    deltas = [0.0]
    for name, rows in trace.states.items():
        steps = found.get(f"{history}/{name}")
        deltas += [] if steps is None else [relative(x, rows[p]) for x, p in zip(steps, at, strict=True)]
    return max(logits), max(deltas)
