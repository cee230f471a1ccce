"""A job: one stage for one set of wildcards. Where its record and its inputs lie, and its part of the config."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgate import record

_MODEL = "models/{model}"
_GRAPH = "{weights}/{strategy}/{part}"
_TUPLE = "{weights}/{strategy}/{platform}/{quant}"

# Every stage's record, below the results folder. Large files lie beside it, listed in it with their sha256.
RECORDS = {
    "fetch": f"{_MODEL}/checkpoint/manifest.json",
    "trace": f"{_MODEL}/traces/{{program}}/trace.json",
    "prepare": f"{_MODEL}/weights/{{weights}}/{{form}}/weights.json",
    "export": f"{_MODEL}/graphs/{_GRAPH}/graph.json",
    "check": f"{_MODEL}/checks/{_GRAPH}/check.json",
    "build": f"{_MODEL}/artifacts/{_TUPLE}/{{part}}/build.json",
    "probe": "probes/{platform}/probe.json",
    "selftest": "boards/{backend}/selftest.json",
    "run": f"{_MODEL}/rows/{_TUPLE}/{{backend}}/run.json",
    "verify": f"{_MODEL}/rows/{_TUPLE}/{{backend}}/metrics.json",
    "judge": f"{_MODEL}/rows/{_TUPLE}/{{backend}}/verdict.json",
    "accuracy": f"{_MODEL}/rows/{_TUPLE}/{{backend}}/accuracy.json",
    "diagnose": f"{_MODEL}/rows/{_TUPLE}/{{backend}}/diagnosis.json",
    "tabulate": "tables/{sweep}/acceptance.json",
}


@dataclass(frozen=True)
class Job:
    """What a stage gets. Everything that may change its result is in here or in the files it reads.

    wildcards: the job's names (`model`, `strategy`, ...). config: the stage's part of the config.
    inputs: labels to the records of the jobs it reads from, e.g. {"fetch": ..., "trace.capital": ...}.
    """

    stage: str
    wildcards: dict[str, str]
    config: dict[str, Any]
    inputs: dict[str, Path]
    results: Path
    base: Path = Path()  # the repository's folder: text files in the config are relative to it
    key: dict[str, Any] = field(default_factory=dict)

    @property
    def record(self) -> Path:
        return self.results / record_path(self.stage, self.wildcards)

    @property
    def folder(self) -> Path:
        """The record's folder: the stage writes its large files here."""
        return self.record.parent

    def read(self, label: str) -> dict[str, Any]:
        """An input's record."""
        return record.read(self.inputs[label])

    def labels(self, stage: str) -> list[str]:
        """The labels of all inputs of a stage, e.g. `trace.capital`, `trace.fill`, in order."""
        return [x for x in self.inputs if x == stage or x.startswith(stage + ".")]


def record_path(stage: str, wildcards: dict[str, str]) -> str:
    return RECORDS[stage].format(**wildcards)
