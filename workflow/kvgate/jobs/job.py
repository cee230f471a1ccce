"""A job: one stage for one set of wildcards. Where its record and its inputs lie, and its part of the config.

What a stage reads it gets from here, held to the record of the stage that wrote it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgate.jobs import hashed, record

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
_WRITERS = {path.rpartition("/")[2]: stage for stage, path in RECORDS.items()}


@dataclass(frozen=True)
class Job:
    """What a stage gets. Everything that may change its result is in here or in the files it reads.

    wildcards: the job's names (`model`, `strategy`, ...). config: the stage's part of the config.
    inputs: labels to the records of the jobs it reads from, e.g. {"fetch": ..., "trace.capital": ...}.
    """

    stage: str
    wildcards: dict[str, str]
    config: Mapping[str, Any]
    inputs: dict[str, Path]
    results: Path
    base: Path = Path()  # the repository's folder: text files in the config are relative to it
    key: Mapping[str, Any] = field(default_factory=dict)
    # What was opened and how it lay then: (label, file) to hashed.state.
    _opened: dict[tuple[str, str], hashed.State] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def record(self) -> Path:
        return self.results / record_path(self.stage, self.wildcards)

    @property
    def folder(self) -> Path:
        """The record's folder: the stage writes its large files here."""
        return self.record.parent

    def read(self, label: str) -> dict[str, Any]:
        """An input's record. Raises record.Blocked where it was edited."""
        try:
            return record.held(self.inputs[label])
        except ValueError:
            raise changed(self.results, self.inputs[label], self.inputs[label].name) from None

    def file(self, label: str, name: str, sha256: Callable[[Path, Path], str] = hashed.fresh) -> Path:
        """A file beside an input's record, held to its sha256 in there, by content. Raises record.Blocked."""
        above = self.inputs[label]
        path, recorded = above.parent / name, self.read(label).get("files", {}).get(name)
        try:
            now = hashed.state(path)
            if self._opened.get((label, name)) == now:
                return path
            holds = sha256(path, self.results) == recorded
        except OSError:
            holds = False
        if not holds:
            raise changed(self.results, above, name)
        self._opened[label, name] = now
        return path

    def checkpoint(self) -> Path:
        """The checkpoint's folder, with just the files that fetch recorded: a library opens what it finds there.

        Every trace reads it: large files that have not moved since they were hashed are believed.
        """
        above = self.inputs["fetch"]
        files = self.read("fetch")["files"]
        more = {x.name for x in above.parent.iterdir()} - {*files, above.name, above.with_suffix(".cost.json").name}
        for name in sorted(x for x in more if not x.startswith(".")):
            text = f"checkpoint: got {name}, which fetch did not write; remove it, then run again"
            raise record.Blocked(text, [record.finding("changed", text)], again=True)
        for name in files:
            self.file("fetch", name, hashed.sha256)
        return above.parent

    def unmoved(self) -> None:
        """Hold once more what was opened and has moved since: nobody knows which bytes were read.

        Raises record.Blocked.
        """
        for label, name in list(self._opened):
            self.file(label, name)

    def labels(self, stage: str) -> list[str]:
        """The labels of all inputs of a stage, e.g. `trace.capital`, `trace.fill`, in order."""
        return [x for x in self.inputs if x == stage or x.startswith(stage + ".")]


def record_path(stage: str, wildcards: dict[str, str]) -> str:
    return RECORDS[stage].format(**wildcards)


def changed(results: Path, above: Path, name: str) -> record.Blocked:
    """Of a file beside the record `above` that is not what its stage wrote. The next run makes it again."""
    record.doubt(above)
    path = above.parent / name
    path = path.relative_to(results) if path.is_relative_to(results) else path
    text = f"{path} is not what {_WRITERS.get(above.name, 'its stage')} wrote; run again: it is made again"
    return record.Blocked(text, [record.finding("changed", text)], again=True)
