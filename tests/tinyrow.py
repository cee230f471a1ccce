"""A tiny random llama taken through the real stages to a verdict and its bundle, without the workflow. Not a test."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from graphs import Model
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.judging import behaviour
from kvgate.stages import check, judge, tabulate, trace, verify
from synthetic import THRESHOLDS
from tiny import fetched, random_source, trace_job, traced

CAPACITY = 48
HOST = {"platform": "host", "quant": "fp32", "backend": "onnxruntime"}
CHIP = {"platform": "rk3576", "quant": "fp16", "backend": "simulator"}
HISTORIES = ["isolated", "forced", "free"]


class Rows:
    """Results of one model and strategy: a row of ONNX Runtime, and one of a chip with the same observations."""

    def __init__(
        self,
        root: Path,
        module: str = "cpu_managed",
        seed: int = 3,
        text: str = "Hi",
        new: int = 12,
        config: dict[str, Any] | None = None,
    ) -> None:
        """config: what the model's config.json has besides a tiny llama's, or instead."""
        self.results = root / "results"
        self.artifact = b"no artifact"
        fetched(self.results, random_source(max_position_embeddings=CAPACITY + 16, **(config or {})) | {"seed": seed})
        body, path = traced(self.results, text, root, kind="chat", tokens=new)
        record.write(path.with_name("trace.json"), body | {"status": "ok"})
        self.trace = body
        (root / "full.txt").write_text("To the last slot of the cache. " * 9)
        full = trace_job(self.results, {"text": "full.txt", "kind": "text", "tokens": CAPACITY}, root, "full")
        self._run(trace, full)
        graph = Model(self.results, "tiny").export(module, capacity=CAPACITY)
        self.graph, self.strategy = graph.folder, graph.folder.parent.name
        self.programs = {"program": {"kind": "chat", "histories": HISTORIES}}
        self.programs["full"] = {"kind": "text", "histories": ["forced"]}
        config = {"programs": self.programs, "isolated": 4, "mask": -1e4}
        checked = self.job("check", config, ["export", "trace.program"])
        checked.inputs["trace.full"] = full.record
        self._run(check, checked)

    def job(self, stage: str, config: dict[str, Any], inputs: list[str], **more: str) -> Job:
        names = {"model": "tiny", "weights": "plain", "strategy": self.strategy, "part": "decode", "program": "program"}
        names |= more

        def at(label: str) -> Path:
            return Job(label.partition(".")[0], names, {}, {}, self.results).record

        made = Job(stage, names, config, {label: at(label) for label in inputs}, self.results)
        made.folder.mkdir(parents=True, exist_ok=True)
        return made

    def judged(self, row: dict[str, str]) -> Path:
        """The row's verdict.json. A chip's artifact is a stand-in; its observations are ONNX Runtime's."""
        if row["platform"] != "host":
            self._artifact(row)
        config = {"programs": self.programs, "isolated": 4}
        verified = self.job("verify", config, ["export", "trace.program"], **row)
        verified.inputs["trace.full"] = self.job("trace", {}, [], program="full").record
        verified.inputs["observed"] = self.job("check", {}, []).record
        self._run(verify, verified)
        labels = ["export", "check", "verify"] + (["build"] if row["platform"] != "host" else [])
        made = self.job("judge", {"thresholds": THRESHOLDS}, labels, **row)
        wildcards = {k: v for k, v in made.wildcards.items() if k not in ("part", "program")}
        self._run(judge, Job("judge", wildcards, made.config, made.inputs, self.results))
        return made.record

    def tabulated(self, *verdicts: Path, sweep: str = "s") -> dict[str, Any]:
        inputs = {f"judge.{n:05}": path for n, path in enumerate(verdicts)}
        config = {"rows": [], "store_gb": 1, "bundle": behaviour.SHIPS}
        return tabulate.run(Job("tabulate", {"sweep": sweep}, config, inputs, self.results))

    def bundle(self, row: dict[str, str]) -> Path:
        """The folder of the row's bundle."""
        (folder,) = self.tabulated(self.judged(row))["bundles"]
        return self.results / folder

    @property
    def prompt(self) -> list[int]:
        return list(self.trace["tokens"][: self.trace["prompt"]])

    @property
    def generated(self) -> list[int]:
        return list(self.trace["tokens"][self.trace["prompt"] :])

    def _artifact(self, row: dict[str, str]) -> None:
        build = self.job("build", {}, [], **row)
        record.write_bytes(build.folder / "model.rknn", self.artifact)
        identity = {"mask_value": -1e4, "toolkit": "2.5.0", "quant": {"config": {}}}
        record.write(build.folder / "contract.json", {"identity": identity, "custom_string": "x"})
        files = {name: record.sha256(build.folder / name) for name in ("model.rknn", "contract.json")}
        figures = {
            "files": files,
            "artifact_bytes": 11,
            "cycles": 36_400_000,
            "traffic_bytes": 270 * 2**20,
            "cpu_operators": {},
        }
        record.write(build.record, {"status": "ok", "findings": [], "risks": ["F1 a risk"], **figures})

    @staticmethod
    def _run(stage: Any, job: Job) -> None:
        record.write(job.record, stage.run(job) | {"status": "ok"})


def generate(bundle: Path, *words: str, input: str = "", program: str = "generate.py") -> Any:
    """Run a program of a bundle as a user would, in a process that knows nothing of this package."""
    command = [sys.executable, "-I", str(bundle / program), *words]
    return subprocess.run(command, input=input, capture_output=True, text=True, cwd="/", env=bare(), timeout=120)


def bare() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}


def interruptible() -> None:
    """In a child before it starts: a shell's background jobs, a CI's among them, ignore ctrl-C and hand that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
