"""A bundle's folder, opened: what it says of itself, its engine, its context, its tokenizer; and the common options.

Python 3.9, numpy only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import signal
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.board import environment, parts
from kvgate.board.chain import Chain
from kvgate.board.engine import EngineError
from kvgate.board.opened import beside
from kvgate.contract import PREFILL, Contract
from kvgate.serving import fields
from kvgate.serving.context import KEEP, Context
from kvgate.serving.terminal import Terminal
from kvgate.serving.text import Text, Unavailable
from kvgate.strategies.host import Host

FACTS, CONTRACT, TABLES = "bundle.json", "graph_contract.json", "host.npz"
VERSION = 2
# What bundle.json must have beside its version and its digest: damaged, it would be another file's or no error at all.
_KINDS = {
    "row": "an object", "special": "an object", "sizes": "an object", "end_ids": "a list", "mask": "a number",
    "engine": "a text", "platform": "a text", "artifact": "a text", "custom_string": "a text", "toolkit": "a text",
}  # fmt: skip
_PCS = ("x86_64", "AMD64")
CORE_MASKS = {"auto": 0, "0": 1, "1": 2, "2": 4, "0_1": 3, "0_1_2": 7, "all": 0xFFFF}


class Refused(Exception):
    """A bundle that cannot be opened here. One line: what was got, what is allowed."""


class Bundle:
    def __init__(self, folder: Path) -> None:
        """Raises Refused where a file is missing, cut short or of another version."""
        self.folder = folder
        try:
            self.facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            self.contract = Contract.from_json((folder / CONTRACT).read_text(encoding="utf-8"))
            self.parts = {
                part: Contract.from_json((folder / part / CONTRACT).read_text(encoding="utf-8"))
                for part in self.facts["parts"]
            }
            self.pieces = [
                Contract.from_json((folder / x["part"] / CONTRACT).read_text(encoding="utf-8"))
                for x in self.facts["pieces"]
            ]
            self._check()
        except Refused:
            raise
        except parts.Unfit as error:
            raise Refused("{}: {}".format(folder, error)) from None
        except OSError as error:
            raise Refused("{}: {}".format(error.filename, error.strerror)) from None
        except Exception as error:  # whatever damaged JSON leads to
            raise Refused("{}: no bundle of this version: {}".format(folder, one_line(error))) from None

    def _check(self) -> None:
        if self.facts["version"] != VERSION:
            raise ValueError("got version {!r}, known: {}".format(self.facts["version"], VERSION))
        if self.contract.digest != self.facts["contract_digest"]:
            raise Refused("{}: is not the contract that {} names".format(CONTRACT, FACTS))
        named = [(part, contract, self.facts["parts"][part]) for part, contract in self.parts.items()]
        named += [(x["part"], contract, x) for contract, x in zip(self.pieces, self.facts["pieces"])]
        for part, contract, told in named:
            if contract.digest != told["contract_digest"] or contract.part != part:
                raise Refused("{}/{}: is not the contract that {} names".format(part, CONTRACT, FACTS))
        parts.hold_pieces(self.contract, self.pieces)
        for one in self.parts.values():
            parts.hold_part(self.contract, one)
        for name, allowed in _KINDS.items():
            found = fields.kind(self.facts[name])
            if found != allowed:
                raise ValueError("{}: got {}, allowed: {}".format(name, found, allowed))
        if not all(type(x) is int for x in self.facts["end_ids"]):
            raise ValueError("end_ids: got {}, allowed: token ids".format(fields.short(self.facts["end_ids"])))
        for name, size in self.facts["sizes"].items():
            path = self.folder / name
            got = path.stat().st_size if path.is_file() else None
            artifact = name.rpartition("/")[2] == self.facts["artifact"]  # a PC may do without it
            if got != size and not (got is None and artifact):
                raise Refused(
                    "{}: got {}, allowed: {} bytes (sha256sum -c SHA256SUMS)".format(
                        path, "no file" if got is None else "{} bytes".format(got), size
                    )
                )

    @property
    def name(self) -> str:
        return str(self.facts["row"]["model"])

    def graph(self, part: str = "") -> Path | None:
        """The folder of a part's graph where it is to be found: in the bundle itself, or where that was made."""
        facts, contract = (self.facts["parts"][part], self.parts[part]) if part else (self.facts, self.contract)
        place, own = self.folder / facts.get("graph", "."), self.folder / part
        same = place == own or _digest(place / "contract.json") == contract.digest
        return place if same and (place / "model.onnx").is_file() else None

    def text(self) -> Text:
        """Raises text.Unavailable."""
        return Text(self.folder, self.facts["special"])

    def context(
        self,
        engine: str,
        graph: Path | None,
        core_mask: str,
        terminal: Terminal,
        threads: int | None = None,
        keep: int = KEEP,
    ) -> Context:
        """Load the artifact, or with engine `onnxruntime` the graph in the folder `graph`; says what was found.

        threads: of ONNX Runtime (None: one a core); keep: bytes for earlier conversations. Raises Refused, EngineError.
        """
        place = self._place(engine, graph)
        if util.find_spec(environment.ENGINES[engine]) is None:
            raise Refused("backend: got {}, this bundle has: {}".format(engine, ", ".join(engines())))
        job = {
            **{name: self.facts[name] for name in ("platform", "mask")},
            "engine": engine,
            "core_mask": CORE_MASKS[core_mask],
            "perf": False,
            "threads": threads or len(os.sched_getaffinity(0)),
        }
        made = []  # type: list[Any]
        try:
            if self.pieces and engine != "onnxruntime":
                for contract, told in zip(self.pieces, self.facts["pieces"]):
                    opened = self._open(made, job, place / told["part"], contract, told)
                whole = Chain(list(zip(made, self.pieces)))  # type: Any
            else:
                opened = self._open(made, job, place, self.contract, self.facts)
                whole = made[0]
            host = self._host(whole)
            chunk = self._prefill(made, job, graph, host)
        except BaseException as error:
            for one in made:
                with contextlib.suppress(Exception):
                    one.close()
            if isinstance(error, (EngineError, Refused, KeyboardInterrupt)):
                raise
            # A vendor's package raises what it likes when it is imported, SystemExit too.
            raise EngineError("engine_missing", "{}: {}".format(engine, one_line(error))) from None
        lines = ["{}: {}".format(x["kind"], x["text"]) for x in opened["findings"]] + terminal.errors()
        if engine != "onnxruntime":
            lines.append(
                environment.versions_differ(opened["versions"].get("runtime"), self.facts["toolkit"], "built by")
            )
        for line in filter(None, lines):
            terminal.say(line)
        return Context(whole, host, self.facts["end_ids"], terminal.heed, keep, chunk)

    def _open(
        self, made: list[Any], job: dict[str, Any], place: Path, contract: Contract, of: dict[str, Any]
    ) -> dict[str, Any]:
        """A part's engine, appended to `made` before it is opened; what it says of itself."""
        known = {name: of[name] for name in ("custom_string", "contract_digest")}
        module = importlib.import_module(environment.ENGINES[job["engine"]])
        made.append(module.Engine({**job, **known}, place, contract))
        opened: dict[str, Any] = made[-1].open(lambda phase: None)
        return opened

    def _prefill(self, made: list[Any], job: dict[str, Any], graph: Path | None, host: Host) -> Any:
        """Engine and host half that take a prompt's tokens many at once; None where the bundle has none that can be
        had here."""
        contract = self.parts.get(PREFILL)
        if contract is None:
            return None
        place = self.folder / PREFILL
        if job["engine"] == "onnxruntime":
            place = graph / PREFILL if graph else self.graph(PREFILL) or place
        name = "model.onnx" if job["engine"] == "onnxruntime" else self.facts["artifact"]
        if not (place / name).is_file():
            return None
        self._open(made, job, place, contract, self.facts["parts"][PREFILL])
        half = beside(made[-1], contract, host)
        _unobserved(half)
        return made[-1], half

    def _host(self, engine: Any) -> Host:
        """The strategy's host half, over the engine's own memory where the engine offers it."""
        half = importlib.import_module("kvgate.strategies.{}.host".format(self.contract.strategy)).Host
        make = getattr(engine, "host", None)
        try:
            with np.load(self.folder / TABLES) as file:
                tables, mask = dict(file), float(self.facts["mask"])
        except Exception as error:
            raise Refused("{}: is damaged: {} (sha256sum -c SHA256SUMS)".format(TABLES, one_line(error))) from None
        host: Host = half(self.contract, tables, mask) if make is None else make(half, tables, mask)
        _unobserved(host)
        return host

    def _place(self, engine: str, graph: Path | None) -> Path:
        """The folder with what the engine loads. Raises Refused where it is not this bundle's."""
        if engine == "onnxruntime":
            place = graph or self.graph() or self.folder
            if not (place / "model.onnx").is_file():
                raise Refused(
                    "backend onnxruntime: got no model.onnx in {}, allowed: --graph FOLDER, the graph's folder".format(
                        place
                    )
                )
            beside = place / "contract.json"
            if graph and beside.is_file() and _digest(beside) != self.contract.digest:
                raise Refused("{}: is the contract of another graph".format(beside))
            return place
        if graph:
            raise Refused("--graph: got {}, allowed: with --backend onnxruntime only".format(graph))
        folders = [self.folder / x["part"] for x in self.facts["pieces"]] or [self.folder]
        lost = [x for x in folders if not (x / "model.rknn").is_file()]
        if self.facts["artifact"] != "model.rknn" or lost:
            raise Refused(
                "backend {}: got no model.rknn in {}, allowed: onnxruntime".format(engine, (lost or folders)[0])
            )
        compatible = environment.record()["compatible"]
        wanted = "rockchip,{}".format(self.facts["platform"])
        if compatible and wanted not in compatible:
            raise Refused("platform: got {}, allowed: {}".format(" ".join(filter(None, compatible)), wanted))
        return self.folder


def _unobserved(host: Host) -> None:
    """Nobody looks at what the graph gives back beside the new slots."""
    if hasattr(host, "observes"):
        host.observes = False


def engines() -> list[str]:
    """The engines whose code is here."""
    return [name for name, module in environment.ENGINES.items() if util.find_spec(module) is not None]


def options(parser: argparse.ArgumentParser, folder: Path) -> None:
    """The options that say what is opened, and on what."""
    parser.add_argument(
        "--bundle", type=Path, default=folder, metavar="FOLDER", help="the bundle (default: this program's folder)"
    )
    parser.add_argument(
        "--backend", choices=engines(), help="lite: rknnlite; native: librknnrt.so itself; onnxruntime: no NPU, any PC"
    )
    parser.add_argument(
        "--graph", type=Path, metavar="FOLDER", help="with --backend onnxruntime: the folder that has model.onnx"
    )
    parser.add_argument(
        "--threads", type=number(int, 1), metavar="N", help="of ONNX Runtime on a PC (default: one a core)"
    )
    parser.add_argument(
        "--keep",
        type=number(int, 0),
        default=KEEP >> 20,
        metavar="MIB",
        help="memory for earlier conversations, which then go on at once (default: {})".format(KEEP >> 20),
    )
    parser.add_argument("--core-mask", choices=list(CORE_MASKS), default="auto", help="NPU cores (default: auto)")
    parser.add_argument(
        "--show-runtime", action="store_true", help="let the runtime print; failures that it only prints go unseen then"
    )


def number(kind: type, low: float, high: float | None = None) -> Callable[[str], Any]:
    """An argparse type: a number from `low` to `high`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
            if value >= low and (high is None or value <= high):
                return value
        except ValueError:
            pass
        limits = "{} or more".format(low) if high is None else "{} to {}".format(low, high)
        raise argparse.ArgumentTypeError("got {!r}, allowed: {}".format(text, limits))

    return read


def text(argument: str) -> str:
    """An argparse type: the argument's bytes as UTF-8, whatever the locale took them for.

    Paths stay as they came: the same locale makes bytes of them again.
    """
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        raise argparse.ArgumentTypeError("got {!r}, allowed: UTF-8".format(argument)) from None


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """While things are loaded or closed ctrl-C ends the process itself: a package that is being imported may turn the
    exception into another one."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or of someone else
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_context(args: argparse.Namespace, bundle: Bundle, terminal: Terminal) -> Context:
    """As the command line asks; without a word there, a PC runs the graph if it is to be found.

    Raises Refused, EngineError.
    """
    engine = args.backend or bundle.facts["engine"]
    here = args.backend is None and engine != "onnxruntime" and platform.machine() in _PCS
    if here and (args.graph or bundle.graph()):
        terminal.say("this PC has no NPU: the graph runs in ONNX Runtime, not {}".format(bundle.facts["artifact"]))
        engine = "onnxruntime"
    return bundle.context(engine, args.graph, args.core_mask, terminal, args.threads, args.keep << 20)


def one_line(error: BaseException) -> str:
    """What an error says; what kind it is where that is not one that is meant for people."""
    text = " ".join((error.text if isinstance(error, EngineError) else str(error)).split())
    if text and isinstance(error, (EngineError, Refused, Unavailable, ValueError)):
        return text
    return "{}: {}".format(type(error).__name__, text) if text else type(error).__name__


def _digest(path: Path) -> str:
    try:
        return Contract.from_json(path.read_text(encoding="utf-8")).digest
    except Exception:  # whatever damaged JSON leads to
        return ""
