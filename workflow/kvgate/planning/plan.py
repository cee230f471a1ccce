"""Every job of a sweep with its key (kvgate.jobs.keys), made once, while planning. Nothing heavy is imported here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from string import Formatter
from typing import Any

from kvgate.contract import canonical
from kvgate.jobs import digest, keys
from kvgate.jobs.entries.board import Board
from kvgate.jobs.entries.model import Source
from kvgate.jobs.entries.program import Programs
from kvgate.jobs.job import RECORDS, record_path
from kvgate.jobs.rows import DECODE, HOST_MASK, HOST_PLATFORM, ONNXRUNTIME, SIMULATOR, parts
from kvgate.planning import sweep
from kvgate.planning.config import load
from kvgate.remote import agent_zip
from kvgate.report import bundle
from kvgate.sources import folder

_HUGGING_FACE = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
# What each stage computes with: another version of one of these is another result.
PACKAGES: dict[str, tuple[str, ...]] = {
    "fetch": (*_HUGGING_FACE, "gguf", "accelerate", "huggingface_hub"),
    "trace": (*_HUGGING_FACE, "Jinja2"),
    "prepare": _HUGGING_FACE,
    "export": ("torch", "transformers", "numpy", "onnx", "onnxscript", "onnx_ir"),
    "check": ("onnxruntime", "onnx", "numpy"),
    "build": ("rknn-toolkit2", "onnx", "onnxruntime", "numpy", "scipy", "protobuf"),
    "probe": ("rknn-toolkit2", "onnx", "numpy"),
    "selftest": ("numpy",),
    "run": ("numpy",),
    "verify": ("numpy",),
    "judge": (),
    "accuracy": ("rknn-toolkit2", "onnx", "onnxruntime", "numpy", "scipy", "protobuf", "PyYAML"),
    "diagnose": ("numpy", "opencv-python-headless"),
    "tabulate": ("numpy", "transformers", "tokenizers"),
}


@dataclass(frozen=True)
class Node:
    """One job: its stage and names, its part of the config, the modules that are its code, the jobs it reads from."""

    stage: str
    wildcards: dict[str, str]
    config: Mapping[str, object]
    inputs: "dict[str, Node]"
    roots: tuple[str, ...]
    texts: dict[str, str]  # path relative to the repository -> keys.file_state
    key: str

    @cached_property
    def record(self) -> str:
        """The record's path below the results folder."""
        return record_path(self.stage, self.wildcards)

    @cached_property
    def reads(self) -> list[str]:
        """Records that it reads and that nothing else it reads has read: what the workflow's graph needs as edges."""
        below = {x.record for node in self.inputs.values() for x in node.inputs.values()}
        return [record for record in dict.fromkeys(x.record for x in self.inputs.values()) if record not in below]

    @cached_property
    def short(self) -> str:
        return keys.short(self.key)


class Plan:
    """The jobs of a config's sweep, made when asked for and kept. Raises config.ConfigError."""

    def __init__(self, base: Path, override: Mapping[str, Any], results: Path = Path("results")) -> None:
        """results: where digests of large source files are remembered."""
        self.base, self.results = base, results
        self.config = load(base, override)
        self.rows = sweep.rows(self.config, base)
        self.name: str = self.config["sweep"]["name"]
        self._nodes: dict[tuple[str, ...], Node] = {}
        self._texts: dict[str, str] = {}
        self._codes: dict[tuple[str, ...], str] = {}
        lock = base / "envs" / "lock.txt"
        self._versions = {stage: digest.locked(lock, packages) for stage, packages in PACKAGES.items()}
        self._ordered: list[Node] = []

    def node(self, stage: str, wildcards: dict[str, str]) -> Node:
        """The job of a stage for these wildcards. Raises ConfigError on names that the config does not have."""
        names = (stage, *[wildcards[name] for name in _names(stage)])
        found = self._nodes.get(names)
        if found is None:
            sweep.check_target(self.config, wildcards)
            found = self._nodes[names] = getattr(self, f"_{stage}")(wildcards)
        return found

    def table(self) -> Node:
        return self.node("tabulate", {"sweep": self.name})

    def nodes(self) -> list[Node]:
        """Every job of the sweep, each after those that it reads from."""
        ordered: dict[str, Node] = {}

        def visit(node: Node) -> None:
            if node.record not in ordered:
                for below in node.inputs.values():
                    visit(below)
                ordered[node.record] = node

        if not self._ordered:
            visit(self.table())
            self._ordered = list(ordered.values())
        return self._ordered

    def made(self) -> list[Node]:
        """Every job that was asked for so far, also those of no sweep, like a diagnosis."""
        return list(self._nodes.values())

    def beside(self, results: Path) -> list[Node]:
        """The diagnoses that there are of the sweep's rows, each after its accuracy analysis."""
        found = []
        for row in self.rows:
            w = row.wildcards()
            if any((results / record_path(stage, w)).exists() for stage in ("accuracy", "diagnose")):
                node = self.node("diagnose", w)
                found += [x for label, x in node.inputs.items() if label == "accuracy"] + [node]
        return found

    def of_stage(self, stage: str) -> list[Node]:
        return [node for node in self.nodes() if node.stage == stage]

    # One function a stage: what it reads

    def _fetch(self, w: dict[str, str]) -> Node:
        source = self.config["models"][w["model"]]["source"]
        texts = _source_files(self.base, source, self.results)
        return self._make("fetch", w, {"source": source}, {}, (f"sources.{source['kind']}",), texts)

    def _trace(self, w: dict[str, str]) -> Node:
        entry = self.config["programs"][w["program"]]
        program, text = {k: v for k, v in entry.items() if k != "histories"}, entry["text"]
        return self._make(
            "trace", w, {"program": program}, {"fetch": self.node("fetch", w)}, (), {text: self._text(text)}
        )

    def _prepare(self, w: dict[str, str]) -> Node:
        entry = self.config["weights"][w["weights"]]
        roots = tuple(f"weights.{step['name']}" for step in entry["steps"])
        inputs = {"fetch": self.node("fetch", w)} | (self._calibration(w) if entry["calibrate"] else {})
        return self._make("prepare", w, {"weights": entry}, inputs, roots)

    def _export(self, w: dict[str, str]) -> Node:
        strategy = self.config["strategies"][w["strategy"]]
        entry: Mapping[str, object] = strategy
        if w["part"] == DECODE:  # the same graph, whatever reads the prompt
            entry = {k: v for k, v in strategy.items() if k != "prefill"}
        inputs = {"fetch": self.node("fetch", w)}
        if strategy["form"] == "exporter":
            roots = ("export.exporter",)
        else:
            inputs["prepare"] = self.node("prepare", w | {"form": strategy["form"]})
            roots = (f"strategies.{strategy['module']}.graph",)
        config: dict[str, object] = {"strategy": entry}
        if strategy["layers"] == "auto":
            config["build_mb"] = self.config["models"][w["model"]]["build_mb"]
        return self._make("export", w, config, inputs, roots)

    def _check(self, w: dict[str, str]) -> Node:
        inputs = {"export": self.node("export", w)} | self._traces(w)
        if w["part"] != DECODE:
            inputs["decode"] = self.node("export", w | {"part": DECODE})
        config = {"programs": self._programs(), "isolated": self.config["sweep"]["isolated"], "mask": HOST_MASK}
        return self._make("check", w, config, inputs, (self._host_half(w),))

    def _build(self, w: dict[str, str]) -> Node:
        inputs, config = self._compiled(w)
        inputs = {"export": inputs.pop("export"), "check": self.node("check", w)} | inputs
        return self._make("build", w, config, inputs, ("compiler.child", self._host_half(w)))

    def _compiled(self, w: dict[str, str]) -> tuple[dict[str, Node], dict[str, object]]:
        """What is compiled, and how."""
        quant = self.config["quants"][w["quant"]]
        inputs = {"export": self.node("export", w)} | self._traces(w)
        config = {
            "quant": quant,
            "programs": self._programs(),
            "isolated": self.config["sweep"]["isolated"],
            "timeout": self.config["limits"]["build_seconds"],
        }
        if quant["calibrate"]:
            inputs |= self._calibration(w)
            config["calibration"] = {"samples": self.config["calibration"]["samples"]}
        return inputs, config

    def _probe(self, w: dict[str, str]) -> Node:
        return self._make("probe", w, {"timeout": self.config["limits"]["build_seconds"]}, {}, ("compiler.child",))

    def _selftest(self, w: dict[str, str]) -> Node:
        board, config = self._board(w)
        inputs = {"probe": self.node("probe", {"platform": board["platform"]})}
        return self._make("selftest", w, config, inputs, _on_board(board, ""))

    def _run(self, w: dict[str, str]) -> Node:
        decode = w | {"part": DECODE}
        board, config = self._board(w)
        inputs = {stage: self.node(stage, decode) for stage in ("export", "check")}
        config |= {"programs": self._programs(), "isolated": self.config["sweep"]["isolated"]}
        config |= {"timing": self.config["timing"], "mask": HOST_MASK}
        stages = ["export", "check"]
        if w["platform"] != HOST_PLATFORM:
            inputs["build"] = self.node("build", decode)
            stages.append("build")
            config["mask"] = self.config["quants"][w["quant"]]["mask"]
        for part in self._more_parts(w):
            inputs |= {f"{stage}.{part}": self.node(stage, w | {"part": part}) for stage in stages}
        inputs |= self._traces(w) | {"selftest": self.node("selftest", w)}
        module = self.config["strategies"][w["strategy"]]["module"]
        return self._make("run", w, config, inputs, _on_board(board, module))

    def _board(self, w: dict[str, str]) -> tuple[Board, dict[str, object]]:
        """A board's entry, and what its stages read of the config."""
        board, limits = self.config["boards"][w["backend"]], self.config["limits"]
        return board, {"board": board, "limits": {k: limits[k] for k in ("run_seconds", "step_seconds")}}

    def _verify(self, w: dict[str, str]) -> Node:
        decode = w | {"part": DECODE}
        ran = {SIMULATOR: "build", ONNXRUNTIME: "check"}.get(w["backend"], "run")
        inputs = {"export": self.node("export", decode), "observed": self.node(ran, decode)}
        if w["platform"] != HOST_PLATFORM:
            inputs["build"] = self.node("build", decode)
        for part in self._more_parts(w):
            inputs |= {f"export.{part}": self.node("export", w | {"part": part})}
            if ran != "run":  # a board's job is of all parts
                inputs |= {f"observed.{part}": self.node(ran, w | {"part": part})}
        config = {"programs": self._programs(), "isolated": self.config["sweep"]["isolated"]}
        return self._make("verify", w, config, inputs | self._traces(w), (self._host_half(w),))

    def _judge(self, w: dict[str, str]) -> Node:
        decode = w | {"part": DECODE}
        inputs = {stage: self.node(stage, decode) for stage in ("export", "check")}
        if w["platform"] != HOST_PLATFORM:
            inputs["build"] = self.node("build", decode)
        for part in self._more_parts(w):
            stages = ("check",) if w["platform"] == HOST_PLATFORM else ("check", "build")
            inputs |= {f"{stage}.{part}": self.node(stage, w | {"part": part}) for stage in stages}
        inputs["verify"] = self.node("verify", w)
        if w["backend"] in self.config["boards"]:
            inputs |= {stage: self.node(stage, w) for stage in ("run", "selftest")}
            if w["platform"] != HOST_PLATFORM:  # the same artifact in the simulator, to tell whose fault it is
                inputs["simulator"] = self.node("judge", w | {"backend": SIMULATOR})
        return self._make("judge", w, {"thresholds": self.config["thresholds"]}, inputs, ())

    def _accuracy(self, w: dict[str, str]) -> Node:
        decode = w | {"part": DECODE}
        inputs, config = self._compiled(decode)
        inputs |= {"build": self.node("build", decode), "verify": self.node("verify", w)}
        return self._make("accuracy", w, config, inputs, ("compiler.analysis", self._host_half(w)))

    def _diagnose(self, w: dict[str, str]) -> Node:
        inputs = {stage: self.node(stage, w) for stage in ("judge", "verify")}
        inputs["export"] = self.node("export", w | {"part": DECODE})
        if w["platform"] != HOST_PLATFORM:
            inputs["build"] = self.node("build", w | {"part": DECODE})
            inputs["accuracy"] = self.node("accuracy", w)
        config = {"programs": list(self._programs()), "thresholds": self.config["thresholds"]}
        return self._make("diagnose", w, config, inputs | self._traces(w), (self._host_half(w),))

    def _tabulate(self, w: dict[str, str]) -> Node:
        # Padded, as the key's JSON sorts them: their order is the table's.
        inputs = {f"judge.{n:05}": self.node("judge", row.wildcards()) for n, row in enumerate(self.rows)}
        config = {
            "rows": [list(row.wildcards().values()) for row in self.rows],
            "store_gb": self.config["limits"]["store_gb"],
            "bundle": self.config["sweep"]["bundle"],
        }
        halves = sorted({self.config["strategies"][row.strategy]["module"] for row in self.rows})
        return self._make("tabulate", w, config, inputs, bundle.modules(halves))

    def _more_parts(self, w: dict[str, str]) -> list[str]:
        """The row's parts beside `decode`."""
        return [x for x in parts(self.config["strategies"][w["strategy"]]) if x != DECODE]

    def _programs(self) -> Programs:
        return {name: self.config["programs"][name] for name in self.config["sweep"]["programs"]}

    def _traces(self, w: dict[str, str]) -> dict[str, Node]:
        return {f"trace.{p}": self.node("trace", {"model": w["model"], "program": p}) for p in self._programs()}

    def _calibration(self, w: dict[str, str]) -> dict[str, Node]:
        texts = self.config["calibration"]["texts"]
        return {f"calibration.{x}": self.node("trace", {"model": w["model"], "program": x}) for x in texts}

    def _host_half(self, w: dict[str, str]) -> str:
        return f"strategies.{self.config['strategies'][w['strategy']]['module']}.host"

    def _text(self, path: str) -> str:
        if path not in self._texts:
            self._texts[path] = keys.file_state(self.base / path, self.results)
        return self._texts[path]

    def _make(
        self,
        stage: str,
        wildcards: dict[str, str],
        config: Mapping[str, object],
        inputs: dict[str, Node],
        modules: tuple[str, ...],
        texts: dict[str, str] | None = None,
    ) -> Node:
        wildcards = {name: wildcards[name] for name in _names(stage)}
        roots = tuple(f"{digest.PACKAGE}.{m}" for m in (f"stages.{stage}", *modules))
        if roots not in self._codes:
            self._codes[roots] = digest.code_digest(roots)
        key = canonical(
            {
                "stage": stage,
                "wildcards": wildcards,
                "code": {"roots": roots, "digest": self._codes[roots]},
                "versions": self._versions[stage],
                "config": config,
                "texts": texts or {},
                "inputs": {label: [node.record, node.short] for label, node in inputs.items()},
            }
        )
        return Node(stage, wildcards, config, inputs, roots, texts or {}, key)


def _source_files(base: Path, source: Source, results: Path) -> dict[str, str]:
    """The state of a local source's files."""
    path = source.get("path")
    if source["kind"] not in ("folder", "gguf") or not isinstance(path, str):
        return {}
    root = base / path
    files = folder.matching(root, folder.PATTERNS + folder.FALLBACK) if root.is_dir() else [root]  # what fetch takes
    return {os.path.relpath(p, base): keys.file_state(p, results) for p in files}


def _on_board(board: Board, strategy: str) -> tuple[str, ...]:
    """The modules that a board's stages run: the agent there, the driver here."""
    return *agent_zip.roots(board["engine"], strategy), f"remote.drivers.{board['driver']}"


@cache
def _names(stage: str) -> tuple[str, ...]:
    """The wildcards of a stage: the fields of its record's path."""
    return tuple(name for _, name, _, _ in Formatter().parse(RECORDS[stage]) if name)
