"""Bundles: for each row that passes or warns a folder that generates text by itself, on the board or on a PC.

`results/bundles/{sweep}/{row}` holds the artifact (of a row of ONNX Runtime: the graph), both contracts, the host's
tables in float16, the tokenizer, the code that runs it, a README with the row's numbers, and checksums. Large files
are hard links. A bundle is whole or absent, and equal results give equal bytes.
"""

import filecmp
import io
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgate import agent_zip, bundle_text, digest, record, sweep, table
from kvgate.board import environment
from kvgate.columns import ROW
from kvgate.contract import Contract, canonical, sha256_text
from kvgate.job import record_path

FACTS, SUMS = "bundle.json", "SHA256SUMS"
_PROGRAMS = ("generate", "serve")
_TOKENIZER, _TEMPLATE, _TABLES = "tokenizer.json", "chat_template.jinja", "host.npz"
_MAKES = 1  # another number where `half` or `tokenizer` make something else of the same files
_ROUNDING = 1e-3  # L2 of a table against its float16; above, values lie below float16's normal range
_LICENSE = Path(__file__).parents[2] / "LICENSE"


def bundled(verdict: Mapping[str, Any]) -> bool:
    """Whether the row gets a bundle: it has an artifact that may be used, or passes in ONNX Runtime."""
    green = verdict["verdict"] in ("pass", "warn")
    return table.ships(verdict) or (green and verdict["row"]["platform"] == sweep.HOST_PLATFORM)


def modules(strategies: Iterable[str]) -> tuple[str, ...]:
    """The modules that bundles of these strategies run, below the package, without what they import."""
    engines = (name.partition(".")[2] for name in environment.ENGINES.values())
    return (*(f"board.{x}" for x in _PROGRAMS), *engines, *(f"strategies.{x}.host" for x in strategies))


def write(results: Path, name: str, verdicts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Make the bundles of a sweep what its verdicts say, and remove all others of it. Returns their folders, relative
    to `results`. Raises FileNotFoundError where a file that a bundle is made of is gone.
    """
    root, made = results / "bundles" / name, Made()
    wanted = {root / table.row_name(v["row"]): v for v in verdicts if bundled(v)}
    _clear(root, set(wanted))
    for folder, verdict in wanted.items():
        _replace(folder, _Row(results, verdict), made)
    return sorted(str(folder.relative_to(results)) for folder in wanted)


@dataclass
class Made:
    """What several bundles have in common and takes seconds to make, by what it was made from."""

    tables: dict[str, Path] = field(default_factory=dict)
    tokenizers: dict[str, dict[str, Any]] = field(default_factory=dict)


class _Row:
    """A row's files and records in the results folder."""

    def __init__(self, results: Path, verdict: Mapping[str, Any]) -> None:
        self.results, self.verdict = results, verdict
        self.row: dict[str, str] = verdict["row"]
        self.chip = self.row["platform"] != sweep.HOST_PLATFORM
        self.graph, self.checkpoint = self.path("export").parent, self.path("fetch").parent
        self.contract = Contract.from_json((self.graph / "contract.json").read_text())
        self.artifact: dict[str, Any] = {}
        if self.chip:
            self.artifact = record.read(self.path("build").with_name("contract.json"))

    def path(self, stage: str, **names: str) -> Path:
        return self.results / record_path(stage, self.row | {"part": "decode"} | names)

    def links(self) -> dict[str, Path]:
        """Names in the bundle -> files that are linked as they are."""
        found = {"graph_contract.json": self.graph / "contract.json", "verdict.json": self.path("judge")}
        if self.chip:
            build = self.path("build")
            found |= {name: build.with_name(name) for name in ("model.rknn", "contract.json")}
        else:
            found |= {name: self.graph / name for name in ("model.onnx", "weights.bin")}
            if not found["weights.bin"].exists():  # a graph written into one file
                del found["weights.bin"]
        for file in sorted(self.checkpoint.iterdir()):
            known = file.name in ("vocab.json", "merges.txt", "generation_config.json")
            if file.is_file() and (known or any(x in file.name for x in ("token", "spiece"))):
                found[file.name] = file
        return found

    def recorded(self) -> dict[str, str]:
        """The sha256 of the large files, as the stages that wrote them recorded it."""
        sums = record.read(self.path("export")).get("files", {})
        built = record.read(self.path("build")).get("files", {}) if self.chip else {}
        found = {name: sums.get(name) for name in ("model.onnx", "weights.bin")}
        return {k: v for k, v in (found | {"model.rknn": built.get("model.rknn")}).items() if v}

    def end_ids(self) -> list[int]:
        """Of the traces, which are all of this model."""
        program = next(iter(record.read(self.path("verify"))["programs"]))
        return list(record.read(self.path("trace", program=program))["end_ids"])

    def engine(self) -> str:
        """What ran the row on its board; else the vendor's package for a chip."""
        run = self.path("run")
        ran = record.read(run).get("engine") if run.exists() else None
        return ran or ("lite" if self.chip else sweep.ONNXRUNTIME)

    def tables(self) -> str:
        """What host.npz is made from."""
        found = record.read(self.path("export")).get("files", {}).get(_TABLES)
        return sha256_text(canonical([_MAKES, found or record.sha256(self.graph / _TABLES)]))

    def tokenizer(self) -> str:
        """What the tokenizer's files are made from."""
        kinds = (".json", ".model", ".txt", ".jinja")
        found = [x for x in self.checkpoint.iterdir() if x.suffix in kinds and not x.name.startswith("manifest")]
        files = {x.name: record.sha256(x) for x in found if x.is_file()}
        return sha256_text(canonical([_MAKES, files, digest.installed(("transformers", "tokenizers"))]))

    def facts(self, special: dict[str, Any]) -> dict[str, Any]:
        """bundle.json but for the sizes."""
        identity = self.artifact.get("identity", {})
        return {
            "version": 1,
            "row": self.row,
            "platform": self.row["platform"],
            "engine": self.engine(),
            "artifact": "model.rknn" if self.chip else "model.onnx",
            "contract_digest": self.contract.digest,
            "custom_string": self.artifact.get("custom_string", ""),
            "toolkit": identity.get("toolkit", ""),
            "mask": identity["mask_value"] if self.chip else sweep.HOST_MASK,
            "end_ids": self.end_ids(),
            "special": special,
            "made_from": {_TABLES: self.tables(), _TOKENIZER: self.tokenizer()},
        }


def _clear(root: Path, wanted: set[Path]) -> None:
    """Remove the bundles that are not wanted, what a killed job left, and folders that hold nothing."""
    for folder in sorted(root.rglob("*"), reverse=True) if root.exists() else []:
        if not folder.is_dir() or folder.is_symlink():
            continue
        if len(folder.relative_to(root).parts) == len(ROW):
            if folder not in wanted:
                shutil.rmtree(folder)
        elif not any(folder.iterdir()):
            folder.rmdir()


def _replace(folder: Path, row: _Row, made: Made) -> None:
    """Make a row's bundle beside `folder`, and put it there if it is another one."""
    part, old = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "old"))
    _remember(folder, made)
    part.mkdir(parents=True)
    try:
        _fill(part, row, made)
        made.tables = {k: folder / _TABLES if v.parent == part else v for k, v in made.tables.items()}
        if folder.exists() and _equal(part, folder):
            return
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    finally:
        for rest in (part, old):
            shutil.rmtree(rest, ignore_errors=True)


def _remember(folder: Path, made: Made) -> None:
    """Take over what a bundle of an earlier run has made, where its checksums still hold."""
    try:
        facts, sums = record.read(folder / FACTS), _sums(folder / SUMS)
        names = [x for x in (_TABLES, _TOKENIZER, _TEMPLATE) if x in sums]
        if any(record.sha256(folder / x) != sums[x] for x in names) or sums[FACTS] != record.sha256(folder / FACTS):
            return
        texts = {x: (folder / x).read_text() if x in sums else None for x in (_TOKENIZER, _TEMPLATE)}
        made.tokenizers.setdefault(facts["made_from"][_TOKENIZER], {**texts, "special": facts["special"]})
        made.tables.setdefault(facts["made_from"][_TABLES], folder / _TABLES)
    except (OSError, ValueError, KeyError, TypeError):
        return


def _fill(part: Path, row: _Row, made: Made) -> None:
    tokenizer = _tokenizer(row, made)
    facts = row.facts(tokenizer["special"])
    links, sums = row.links(), row.recorded()
    if tokenizer[_TOKENIZER] is None or not _same_json(links.get(_TOKENIZER), tokenizer[_TOKENIZER]):
        links.pop(_TOKENIZER, None)  # what the reference made of it is another one
    for name, source in links.items():
        record.link(source, part / name)
    texts = {name: tokenizer[name] for name in (_TOKENIZER, _TEMPLATE) if name not in links and tokenizer[name]}
    texts |= {f"{x}.py": bundle_text.entry(x) for x in _PROGRAMS}
    texts["requirements.txt"] = bundle_text.requirements(facts)
    licence = str(record.read(row.path("fetch")).get("licence", "unknown"))
    texts["README.md"] = bundle_text.readme(row.verdict, facts, row.contract.cache.capacity, licence)
    files = {name: text.encode() for name, text in texts.items()}
    files |= _code(row.contract.strategy)
    if _LICENSE.is_file():
        files[f"{digest.PACKAGE}/LICENSE"] = _LICENSE.read_bytes()
    for name, data in files.items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_bytes(data)
    _half(row, part / _TABLES, made)
    names = sorted(str(x.relative_to(part)) for x in part.rglob("*") if x.is_file())
    facts["sizes"] = {name: (part / name).stat().st_size for name in names}
    (part / FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    lines = [f"{sums.get(name) or record.sha256(part / name)}  {name}\n" for name in sorted([*names, FACTS])]
    (part / SUMS).write_text("".join(lines))


def _code(strategy: str) -> dict[str, bytes]:
    return agent_zip.tree(digest.closure(f"{digest.PACKAGE}.{x}" for x in modules([strategy])))


def _half(row: _Row, path: Path, made: Made) -> None:
    """host.npz in float16; made once for all rows that have the same."""
    source = row.tables()
    if source in made.tables:
        record.link(made.tables[source], path)
        return
    path.write_bytes(half(row.graph / _TABLES))
    made.tables[source] = path


def half(path: Path) -> bytes:
    """A .npz with its float32 arrays as float16, the same bytes for the same content.

    Integers stay as they are. A float array stays as it is where float16 would lose more than its rounding.
    """
    import numpy as np

    found = {}
    with np.load(path) as file:
        for name in file.files:
            array = found[name] = file[name]
            if array.dtype == np.float32:
                with np.errstate(over="ignore"):
                    small = array.astype(np.float16)
                error = np.linalg.norm((small - array).ravel())
                if np.isfinite(error) and error <= _ROUNDING * np.linalg.norm(array.ravel()):
                    found[name] = small
    buffer = io.BytesIO()
    np.savez(buffer, **found)  # type: ignore[arg-type]
    return buffer.getvalue()


def _tokenizer(row: _Row, made: Made) -> dict[str, Any]:
    """The tokenizer as the reference uses it: tokenizer.json and the template as text, None where there is none."""
    source = row.tokenizer()
    if source not in made.tokenizers:
        made.tokenizers[source] = tokenizer(row.checkpoint)
    return made.tokenizers[source]


def tokenizer(checkpoint: Path) -> dict[str, Any]:
    """Loaded as the reference loads it: transformers may make another tokenizer of the same files."""
    from kvgate import reference

    loaded = reference.load_tokenizer(checkpoint)
    backend = getattr(loaded, "backend_tokenizer", None)
    return {
        _TOKENIZER: backend.to_str() if backend is not None else None,
        _TEMPLATE: loaded.get_chat_template() if loaded.chat_template else None,
        "special": {"tokens": dict(loaded.special_tokens_map), "ids": sorted(loaded.all_special_ids)},
    }


def _same_json(path: Path | None, text: str) -> bool:
    if path is None:
        return False
    other = path.read_text()
    return other == text or json.loads(other) == json.loads(text)


def _sums(path: Path) -> dict[str, str]:
    return {name: sha for sha, _, name in (line.partition("  ") for line in path.read_text().splitlines())}


def _equal(one: Path, two: Path) -> bool:
    """Whether two bundles hold the same: the same links or bytes. Bytecode of one that was run does not count."""
    a, b = (
        {str(x.relative_to(folder)): x for x in folder.rglob("*") if x.is_file() and x.suffix != ".pyc"}
        for folder in (one, two)
    )
    return a.keys() == b.keys() and all(
        a[name].samefile(b[name]) or filecmp.cmp(a[name], b[name], shallow=False) for name in a
    )
