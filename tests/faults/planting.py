"""Tiny sweeps whose jobs run in this process as the workflow runs them, to plant faults in. Not a test itself."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvgate.__main__ import main
from kvgate.jobs import record
from kvgate.jobs.job import RECORDS, record_path
from kvgate.planning.plan import Plan

BASE = Path(__file__).parents[2]
SLOTS, WINDOW, LAYERS = 32, 6, 3
# Layers 0 and 1 see everything, layer 2 a window: both kinds of mask. Weights large enough for attention to choose.
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 2,
}
PROGRAMS = {
    # Every position is an isolated step, so the first place of a fault is one place.
    "fill": {"kind": "text", "text": "tests/texts/fill.txt", "tokens": SLOTS, "histories": ["isolated", "forced"]},
    "talk": {"kind": "chat", "text": "tests/texts/hi.txt", "tokens": 6, "histories": ["forced", "free"]},
    "warm_a": {"kind": "calibration", "text": "tests/texts/calibration_a.txt", "tokens": SLOTS},
    "warm_b": {"kind": "calibration", "text": "tests/texts/calibration_b.txt", "tokens": SLOTS},
}


def config(*blocks: dict[str, list[str]], **changes: Any) -> dict[str, Any]:
    return {
        "sweep": {
            "name": "faults",
            "programs": ["fill", "talk"],
            "isolated": SLOTS,
            "blocks": [{"models": ["tiny"], **block} for block in blocks],
        },
        "calibration": {"texts": ["warm_a", "warm_b"], "samples": 4},
        "models": {"tiny": {"build_mb": 1500, "source": {"kind": "random", "seed": 1, "config": MODEL}}},
        "strategies": {
            "managed": {"module": "cpu_managed", "capacity": SLOTS},
            "blend": {"module": "fixed_max_blend", "capacity": SLOTS},
        },
        "programs": PROGRAMS,
    } | changes


HOST = config({"strategies": ["managed", "blend"], "platforms": ["host"], "quants": ["fp32"]})
CHIP = config({"strategies": ["managed"], "platforms": ["rk3576"], "quants": ["fp16"]})
INT8 = config({"strategies": ["managed"], "platforms": ["rk3576"], "quants": ["w8a8"]})


@dataclass(frozen=True)
class Place:
    """Where a fault must be named first."""

    stage: str
    layer: int | None = None
    tensor: str = ""
    position: int | None = None
    history: str = "isolated"
    program: str = "fill"
    says: str = ""  # a pattern that the row's reason has
    finds: str = ""  # the kind of one of its findings
    gate: str = ""
    strategy: str = "managed"


class Faults:
    """A table of faults: functions that plant one, each with the place that must be named."""

    def __init__(self, stage: str, **usual: Any) -> None:
        """usual: what the places have in common."""
        self.stage, self.usual = stage, usual
        self.all: dict[str, tuple[Callable[..., Any], Place]] = {}

    def __call__(self, layer: int | None = None, tensor: str = "", position: int | None = None, **more: Any) -> Any:
        place = Place(
            **{"stage": self.stage, **self.usual, **more, "layer": layer, "tensor": tensor, "position": position}
        )

        def add(plant: Callable[..., Any]) -> Callable[..., Any]:
            assert plant.__name__ not in self.all
            self.all[plant.__name__] = plant, place
            return plant

        return add

    def cases(self) -> list[Any]:
        """A test's parameters (plant, place), named as the functions are."""
        return [pytest.param(*x, id=name.replace("_", " ")) for name, x in self.all.items()]


def red(sweep: "Sweep", place: Place) -> None:
    """The row is red, ships nothing, and its verdict names the place."""
    verdict = sweep.body("judge")
    assert verdict["verdict"] in ("fail", "blocked"), verdict["reason"]
    assert not shipped(sweep), verdict["reason"]
    assert verdict["first"]["stage"] == place.stage, verdict["reason"]
    assert re.search(place.says, verdict["reason"]), verdict["reason"]
    assert not place.finds or place.finds in {x["kind"] for x in verdict["findings"]}, verdict["findings"]
    named = next(iter(verdict["findings"]), {}) if verdict["verdict"] == "blocked" else verdict["first"]
    assert place.gate in ("", named.get("gate")), verdict["reason"]
    if place.tensor:
        tensor = named.get("tensor") or {"disturbed": "cache"}.get(named["gate"], "logits")
        got = [named.get(x) for x in ("program", "history", "position", "layer")] + [tensor]
        assert got == [place.program, place.history, place.position, place.layer, place.tensor], verdict["reason"]


def shipped(sweep: "Sweep") -> list[Path]:
    """The row's bundles that say it is right. One that fails may be handed over as what behaves, marked by it."""
    names = ("model", "weights", "strategy", "platform", "quant")
    folder = sweep.results / "bundles" / sweep.names["sweep"] / "/".join(sweep.names[x] for x in names)
    return [x for end in ("pass", "warn") for x in folder.glob(f"{sweep.names['backend']}-{end}")]


class Sweep:
    """Results of a sweep below `root`. A stage's names default to those of the sweep's first row."""

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self.root, self.config, self.results = root, config, root / "results"
        self.plan = Plan(BASE, config, self.results)
        self.names = self.plan.rows[0].wildcards() | {"part": "decode", "program": "fill", "form": "recipe"}
        self.names["sweep"] = self.plan.name
        self.failed: dict[str, str] = {}  # by stage, the last line of the jobs that failed in the last run

    def of(self, **names: str) -> "Sweep":
        """The same results; a stage's names are these where none are given."""
        self.names |= names
        return self

    def planned(self, config: dict[str, Any]) -> "Sweep":
        """The same results under another config."""
        return Sweep(self.root, config)

    def run(self, since: str = "fetch", until: str = "tabulate", **only: str) -> "Sweep":
        """Every job of these stages, whatever there is. only: names of the rows; jobs without such a name run too."""
        stages = list(RECORDS)
        asked = stages[stages.index(since) : stages.index(until) + 1]
        todo = [x for x in self.plan.nodes() if x.stage in asked]
        todo = [x for x in todo if all(x.wildcards.get(k, v) == v for k, v in only.items())]
        self.failed = {}
        for node in todo:
            (self.results / node.record).unlink(missing_ok=True)
        for node in todo:
            if all((self.results / x.record).exists() for x in node.inputs.values()):
                with _heard() as said:
                    code = main([node.stage, node.key, "--results", str(self.results), "--base", str(BASE)])
                if code:
                    self.failed[node.stage] = said[-1]
        return self

    def key(self, stage: str) -> str:
        """Of the row's job."""
        return self.plan.node(stage, self.names).key

    def command(self, name: str) -> int:
        """A command for people, on this sweep: its exit code."""
        return main([name, "--config", json.dumps(self.config), "--results", str(self.results), "--base", str(BASE)])

    def path(self, stage: str, file: str = "", **names: str) -> Path:
        """A stage's record, or a file beside it."""
        path = self.results / record_path(stage, self.names | names)
        return path.parent / file if file else path

    def body(self, stage: str, **names: str) -> dict[str, Any]:
        return record.read(self.path(stage, **names))

    def rewrite(self, stage: str, change: Callable[[dict[str, Any]], Any]) -> None:
        """Edit a stage's record in place."""
        body = self.body(stage)
        change(body)
        record.write(self.path(stage), body)

    def seal(self, stage: str) -> None:
        """Let the record say what its files are now: the fault is the stage's own, not one that came after it."""
        self.rewrite(
            stage, lambda body: body["files"].update({x: record.sha256(self.path(stage, x)) for x in body["files"]})
        )

    def copy(self, root: Path) -> "Sweep":
        """With the same hard links among its files, and none to these."""
        there: dict[int, str] = {}

        def copied(source: str, target: str) -> None:
            inode = Path(source).stat().st_ino
            if inode in there:
                os.link(there[inode], target)
            else:
                shutil.copy2(source, target)
                there[inode] = target

        shutil.copytree(self.results, root / "results", copy_function=copied)
        return Sweep(root, self.config)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What is written to the two standard descriptors, as lines that are there after it."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        for n in (1, 2):
            os.dup2(file.fileno(), n)
        try:
            yield lines
        finally:
            for n in (1, 2):
                os.dup2(kept[n - 1], n)
                os.close(kept[n - 1])
            file.seek(0)
            lines += [x for x in file.read().decode(errors="replace").splitlines() if x.strip()] or [""]
