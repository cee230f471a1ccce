"""What a row's bundle is made of: the files of its stages, each held to the record of the stage that wrote it."""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from kvgate.contract import Contract, canonical, sha256_text
from kvgate.jobs import digest, hashed, record
from kvgate.jobs.job import Job, changed, record_path
from kvgate.jobs.rows import DECODE, HOST_MASK, HOST_PLATFORM, ONNXRUNTIME
from kvgate.judging import behaviour
from kvgate.judging.records import Verdict

GRAPH = ("model.onnx", "weights.bin")  # the second one only where the graph has its weights outside
TOKENIZER, TABLES = "tokenizer.json", "host.npz"
_MAKES = 2  # another number where bundle.half or bundle.tokenizer make something else of the same files


class Refused(ValueError):
    """A bundle that cannot be made. One line: which file, what was got, what to do."""


@dataclass(frozen=True)
class Source:
    """A file of a stage, held to the stage's record."""

    results: Path
    above: Path  # the record
    name: str  # beside it
    sha256: str | None  # as its stage recorded it; None: the record has no such file
    large: bool = False  # made here and too large to have twice: linked. All else is copied: it may be a user's own

    @property
    def path(self) -> Path:
        return self.above.parent / self.name

    def put(self, target: Path) -> str:
        """Bring it to `target`; returns its sha256. Raises Refused; for what is linked `RowFiles.hold` does."""
        if self.large:
            record.link(self.path, target)
            return str(self.sha256)
        data = self.path.read_bytes()
        target.write_bytes(data)
        return self.held(record.sha256(target))

    def held(self, got: str | None = None) -> str:
        """Its sha256, which is the recorded one. Raises Refused."""
        got = got or record.sha256(self.path)
        if got != self.sha256:
            raise Refused(changed(self.results, self.above, self.name).reason)
        return got


class PartFacts(TypedDict):
    graph: str  # the graph's folder, seen from the bundle's
    contract_digest: str
    custom_string: str  # of the artifact; empty where there is none


class PieceFacts(TypedDict):
    part: str
    contract_digest: str
    custom_string: str


class Facts(PartFacts):
    """bundle.json but for the sizes: what runs the bundle goes by it. The part's own fields are those of `decode`."""

    version: int
    row: dict[str, str]
    verdict: str
    ships: str  # as what it is handed over: `pass`, `warn`, `behaves`
    platform: str
    engine: str
    artifact: str  # `model.rknn`, or `model.onnx` of a row of ONNX Runtime
    parts: dict[str, PartFacts]  # beside `decode`
    pieces: list[PieceFacts]  # of `decode`, in the order in which they run
    toolkit: str  # its version; empty where there is no artifact
    mask: float
    end_ids: list[int]
    special: dict[str, Any]  # the tokenizer's special tokens, as transformers gives them
    made_from: dict[str, str]  # files that take seconds to make, to what they are made from


class RowFiles:
    """A row's files and records in the results folder."""

    def __init__(self, results: Path, verdict: Verdict, folder: Path) -> None:
        """folder: where the bundle will lie."""
        self.results, self.verdict, self.folder = results, verdict, folder
        self.row: dict[str, str] = verdict["row"]
        self.chip = self.row["platform"] != HOST_PLATFORM
        judged = self.read("verify")["programs"].values()
        self.others = sorted({x.get("part", DECODE) for x in judged} - {DECODE})  # parts beside it
        self.contracts = {part: self._contract(part) for part in (DECODE, *self.others)}
        self.contract = self.contracts[DECODE]
        self.pieces: list[str] = self.read("export").get("pieces", []) if self.chip else []
        self.artifacts: dict[str, dict[str, Any]] = {part: {} for part in self.contracts}
        for part in self.contracts if self.chip else ():
            self.source("build", "contract.json", part=part).held()
            self.artifacts[part] = record.read(self.path("build", part=part).with_name("contract.json"))

    def _contract(self, part: str) -> Contract:
        """The graph contract of a part. Raises Refused."""
        source = self.source("export", "contract.json", part=part)
        source.held()
        made = Contract.from_json(source.path.read_text(encoding="utf-8"))
        exported = self.read("export", part=part)
        if (exported.get("contract"), exported["files"].get(TABLES)) != (made.digest, made.host_sha256):
            raise Refused(changed(self.results, source.above, source.name).reason)
        return made

    def read(self, stage: str, **names: str) -> dict[str, Any]:
        """A stage's record. Raises Refused where it was edited."""
        path = self.path(stage, **names)
        try:
            return record.held(path)
        except ValueError:
            raise Refused(changed(self.results, path, path.name).reason) from None

    def path(self, stage: str, **names: str) -> Path:
        return self.results / record_path(stage, self.row | {"part": DECODE} | names)

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's folder. Raises Refused where a file in it was changed or added."""
        try:
            return Job("fetch", self.row, {}, {"fetch": self.path("fetch")}, self.results).checkpoint()
        except record.Blocked as why:
            raise Refused(why.reason) from None

    def source(self, stage: str, name: str, large: bool = False, part: str = DECODE) -> Source:
        """A file that lies beside a stage's record, and is listed in it."""
        return Source(self.results, self.path(stage, part=part), name, self.listed(stage, part).get(name), large)

    def listed(self, stage: str, part: str = DECODE) -> dict[str, str]:
        """The files of a stage to their sha256, as it recorded them."""
        return dict(self.read(stage, part=part)["files"])

    def sources(self) -> dict[str, Source]:
        """Names in the bundle -> files that are in it as they are; parts beside `decode` have a folder each."""
        at, bytes_ = self.path("judge"), record.encoded(self.verdict)  # a record itself: what the table shows
        verdict = Source(self.results, at, at.name, hashlib.sha256(bytes_).hexdigest())
        found = {"verdict.json": verdict}
        for part in self.contracts:
            at_ = "" if part == DECODE else f"{part}/"
            found[f"{at_}graph_contract.json"] = self.source("export", "contract.json", part=part)
            if self.chip and part == DECODE and self.pieces:
                found["contract.json"] = self.source("build", "contract.json")
            elif self.chip:
                found[f"{at_}model.rknn"] = self.source("build", "model.rknn", True, part)
                found[f"{at_}contract.json"] = self.source("build", "contract.json", part=part)
            else:
                listed = self.listed("export", part)
                found |= {f"{at_}{x}": self.source("export", x, True, part) for x in GRAPH if x in listed}
        for piece in self.pieces:
            found[f"{piece}/graph_contract.json"] = self.source("export", f"{piece}.json")
            found[f"{piece}/model.rknn"] = self.source("build", f"{piece}/model.rknn", True)
            found[f"{piece}/contract.json"] = self.source("build", f"{piece}/contract.json")
        for name in self.listed("fetch"):
            known = name in ("vocab.json", "merges.txt", "generation_config.json")
            if known or any(x in name for x in ("token", "spiece")):
                found[name] = self.source("fetch", name)
        return found

    def hold(self) -> None:
        """Hold the bundle's links to their records: by content, as a new link is a move. Raises Refused."""
        for name, source in self.sources().items():
            if source.large:
                source.held(hashed.sha256(self.folder / name, self.results))

    def end_ids(self) -> list[int]:
        """Of the traces, which are all of this model."""
        program = next(name for name in self.read("verify")["programs"] if "/" not in name)  # of no other part
        return list(self.read("trace", program=program)["end_ids"])

    def engine(self) -> str:
        """What ran the row on its board; else the vendor's package for a chip."""
        ran = self.read("run").get("engine") if self.path("run").exists() else None
        return ran or ("lite" if self.chip else ONNXRUNTIME)

    @cached_property
    def tables(self) -> str:
        """What host.npz is made from."""
        return sha256_text(canonical([_MAKES, self.source("export", TABLES).sha256]))

    @cached_property
    def tokenizer(self) -> str:
        """What the tokenizer's files are made from. Raises Refused where one of them was changed."""
        kinds = (".json", ".model", ".txt", ".jinja")
        files = {x: self.source("fetch", x).held() for x in self.listed("fetch") if x.endswith(kinds)}
        return sha256_text(canonical([_MAKES, files, digest.installed(("transformers", "tokenizers"))]))

    def facts(self, special: dict[str, Any]) -> Facts:
        """bundle.json but for the sizes."""
        identity = self.artifacts[DECODE].get("identity", {})
        return {
            "version": 2,
            "row": self.row,
            "verdict": self.verdict["verdict"],
            "ships": behaviour.ships(self.verdict),
            "platform": self.row["platform"],
            "engine": self.engine(),
            "artifact": "model.rknn" if self.chip else "model.onnx",
            **self._of(DECODE),
            "parts": {part: self._of(part) for part in self.others},
            "pieces": [self._piece(x) for x in self.pieces],
            "toolkit": identity.get("toolkit", ""),
            "mask": identity["mask_value"] if self.chip else HOST_MASK,
            "end_ids": self.end_ids(),
            "special": special,
            "made_from": {TABLES: self.tables, TOKENIZER: self.tokenizer},
        }

    def _of(self, part: str) -> PartFacts:
        """Which graph and artifact a part is; the graph's folder from the bundle's own: a PC runs that."""
        graph = self.path("export", part=part).parent
        here = "." if part == DECODE else part
        return {
            "graph": os.path.relpath(graph, self.folder) if self.chip else here,
            "contract_digest": self.contracts[part].digest,
            "custom_string": self.artifacts[part].get("custom_string", ""),
        }

    def _piece(self, name: str) -> PieceFacts:
        """A piece of `decode`, in the order in which they run. Raises Refused."""
        told, built = self.source("export", f"{name}.json"), self.source("build", f"{name}/contract.json")
        told.held()
        built.held()
        contract = Contract.from_json(told.path.read_text(encoding="utf-8"))
        custom = str(record.read(built.path)["custom_string"])
        return {"part": name, "contract_digest": contract.digest, "custom_string": custom}
