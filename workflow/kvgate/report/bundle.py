"""Bundles: for each row that may be shipped a folder that generates text by itself, on the board or on a PC.

`results/bundles/{sweep}/{row}-{pass|warn|behaves}` holds the artifact (of a row of ONNX Runtime: the graph), both
contracts, the host's tables in float16, the tokenizer, the code that runs it, a README with the row's numbers, and
checksums. Large files are hard links. A bundle is whole or absent, and equal results give equal bytes.
"""

import filecmp
import io
import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgate.board import environment
from kvgate.jobs import digest, hashed, record
from kvgate.jobs.job import record_path
from kvgate.jobs.rows import ROW
from kvgate.judging.records import Verdict
from kvgate.remote import agent_zip
from kvgate.report import bundle_text, ship
from kvgate.report.bundle_row import TABLES, TOKENIZER, Facts, Refused, RowFiles, Source
from kvgate.serving import today

FACTS, SUMS = "bundle.json", "SHA256SUMS"
_PROGRAMS = ("generate", "serve")
_TEMPLATE = "chat_template.jinja"
_ROUNDING = 1e-3  # L2 of a table against its float16; above, values lie below float16's normal range
_LICENSE = Path(__file__).parents[3] / "LICENSE"


def modules(strategies: Iterable[str]) -> tuple[str, ...]:
    """The modules that bundles of these strategies run, below the package, without what they import."""
    engines = (name.partition(".")[2] for name in environment.ENGINES.values())
    return (*(f"serving.{x}" for x in _PROGRAMS), *engines, *(f"strategies.{x}.host" for x in strategies))


@dataclass(frozen=True)
class Written:
    """The bundles of a sweep by their folder below results/bundles/{sweep}."""

    made: dict[str, str] = field(default_factory=dict)  # to the sha256 of its SHA256SUMS
    refused: dict[str, str] = field(default_factory=dict)  # to the reason, one line


def write(results: Path, name: str, verdicts: Iterable[Verdict], wanted: Collection[str]) -> Written:
    """Make the bundles of a sweep what its verdicts say, and remove all others of it.

    wanted: the config's sweep.bundle. A row whose files are gone, or not what their stages recorded, is refused.
    """
    root, made, found = results / "bundles" / name, Made(), Written()
    rows = {path: v for v in verdicts if (path := ship.folder(v, wanted))}
    _clear(root, {root / path for path in rows})
    for path, verdict in rows.items():
        folder = root / path
        try:
            row = RowFiles(results, verdict, folder)
            _replace(folder, row, made)
            row.hold()
            found.made[path] = record.sha256(folder / SUMS)
        except Refused as why:
            made.forget(folder)
            found.refused[path] = str(why)
        except FileNotFoundError as why:
            lost = Path(str(why.filename))
            lost = lost.relative_to(results) if lost.is_relative_to(results) else lost
            found.refused[path] = f"{lost} is gone; run again"
    _clear(root, {root / path for path in found.made})
    return found


def broken(results: Path, bundles: Mapping[str, str]) -> list[str]:
    """The bundles that are gone or not what was written, of those that a table's record names.

    Planning stands before every run: large files that have not moved since they were hashed are believed.
    """
    return [path for path, sha in bundles.items() if not _whole(results, results / path, sha)]


def whole(results: Path, name: str) -> set[str]:
    """The bundles of a sweep that are there as they were written, below results/bundles/{sweep}."""
    try:
        made = record.held(results / record_path("tabulate", {"sweep": name}))["bundles"]
    except (OSError, ValueError, KeyError):
        return set()
    gone = broken(results, made)
    return {path.removeprefix(f"bundles/{name}/") for path in made if path not in gone}


def _whole(results: Path, folder: Path, sha: str) -> bool:
    try:
        if record.sha256(folder / SUMS) != sha:
            return False
        return all(hashed.sha256(folder / x, results) == digest_ for x, digest_ in sums(folder).items())
    except (OSError, ValueError):
        return False


@dataclass
class Made:
    """What several bundles have in common and takes seconds to make, by what it was made from."""

    tables: dict[str, Path] = field(default_factory=dict)
    tokenizers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def forget(self, *folders: Path) -> None:
        """What lies in these folders is not there any more."""
        self.tables = {k: v for k, v in self.tables.items() if v.parent not in folders}


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


def _replace(folder: Path, row: RowFiles, made: Made) -> None:
    """Make a row's bundle beside `folder`, and put it there if it is another one."""
    part, old = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "old"))
    _remember(folder, made)
    part.mkdir(parents=True)
    try:
        _fill(part, row, made)
        if not (folder.exists() and _equal(part, folder)):
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
        # What lay here before, and what was made in the part, is here now.
        made.forget(part, folder)
        made.tables.setdefault(row.tables, folder / TABLES)
    finally:
        for rest in (part, old):
            shutil.rmtree(rest, ignore_errors=True)


def _remember(folder: Path, made: Made) -> None:
    """Take over what a bundle of an earlier run has made, where its checksums still hold."""
    try:
        facts, known = record.read(folder / FACTS), sums(folder)
        names = [x for x in (TABLES, TOKENIZER, _TEMPLATE) if x in known]
        if any(record.sha256(folder / x) != known[x] for x in names) or known[FACTS] != record.sha256(folder / FACTS):
            return
        texts = {x: (folder / x).read_text(encoding="utf-8") if x in known else None for x in (TOKENIZER, _TEMPLATE)}
        made.tokenizers.setdefault(facts["made_from"][TOKENIZER], {**texts, "special": facts["special"]})
        made.tables.setdefault(facts["made_from"][TABLES], folder / TABLES)
    except (OSError, ValueError, KeyError, TypeError):
        return


def _fill(part: Path, row: RowFiles, made: Made) -> None:
    tokenizer = _tokenizer(row, made)
    facts, sources = row.facts(tokenizer["special"]), row.sources()
    if tokenizer[TOKENIZER] is None or not _same_json(sources.get(TOKENIZER), tokenizer[TOKENIZER]):
        sources.pop(TOKENIZER, None)  # what the reference made of it is another one
    for name in sources:
        (part / name).parent.mkdir(parents=True, exist_ok=True)
    known = {name: source.put(part / name) for name, source in sources.items()}
    texts = {name: tokenizer[name] for name in (TOKENIZER, _TEMPLATE) if name not in sources and tokenizer[name]}
    texts |= {f"{x}.py": bundle_text.entry(x) for x in _PROGRAMS}
    texts["requirements.txt"] = bundle_text.requirements(facts)
    licence = str(row.read("fetch").get("licence", "unknown"))
    day = today.TODAY if today.asked(tokenizer[_TEMPLATE] or "") else None
    texts["README.md"] = bundle_text.readme(row.verdict, facts, row.contract.cache.capacity, licence, day)
    files = {name: text.encode() for name, text in texts.items()}
    files |= _code(row.contract.strategy)
    if _LICENSE.is_file():
        files[f"{digest.PACKAGE}/LICENSE"] = _LICENSE.read_bytes()
    for name, data in files.items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_bytes(data)
    _half(row, part / TABLES, made)
    seal(part, facts, known)


def seal(folder: Path, facts: Facts, known: Mapping[str, str]) -> None:
    """Write bundle.json with the sizes of all files, and SHA256SUMS. known: files to their sha256, where one knows."""
    names = sorted({str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file()} - {FACTS, SUMS})
    body = {**facts, "sizes": {name: (folder / name).stat().st_size for name in names}}
    (folder / FACTS).write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    lines = [f"{known.get(name) or record.sha256(folder / name)}  {name}\n" for name in sorted([*names, FACTS])]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _code(strategy: str) -> dict[str, bytes]:
    return agent_zip.tree(digest.closure(f"{digest.PACKAGE}.{x}" for x in modules([strategy])))


def _half(row: RowFiles, path: Path, made: Made) -> None:
    """host.npz in float16; made once for all rows that have the same."""
    if row.tables in made.tables:
        record.link(made.tables[row.tables], path)
        return
    source = row.source("export", TABLES)
    source.held()
    path.write_bytes(half(source.path))
    made.tables[row.tables] = path


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


def _tokenizer(row: RowFiles, made: Made) -> dict[str, Any]:
    """The tokenizer as the reference uses it: tokenizer.json and the template as text, None where there is none."""
    if row.tokenizer not in made.tokenizers:
        try:
            made.tokenizers[row.tokenizer] = tokenizer(row.checkpoint)
        except ValueError as error:
            raise Refused(str(error)) from None
    return made.tokenizers[row.tokenizer]


def tokenizer(checkpoint: Path) -> dict[str, Any]:
    """Loaded as the reference loads it: transformers may make another tokenizer of the same files.

    Raises ValueError where there is no one chat template.
    """
    from kvgate.checkpoint import reference

    loaded = reference.load_tokenizer(checkpoint)
    backend = getattr(loaded, "backend_tokenizer", None)
    return {
        TOKENIZER: backend.to_str() if backend is not None else None,
        _TEMPLATE: reference.template(loaded),
        "special": dict(loaded.special_tokens_map),
    }


def _same_json(source: Source | None, text: str) -> bool:
    if source is None:
        return False
    other = source.path.read_text(encoding="utf-8")
    return other == text or json.loads(other) == json.loads(text)


def sums(folder: Path) -> dict[str, str]:
    """A bundle's SHA256SUMS: names to sha256."""
    lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    return {name: sha for sha, _, name in (line.partition("  ") for line in lines)}


def _equal(one: Path, two: Path) -> bool:
    """Whether two bundles hold the same: the same links or bytes. Bytecode of one that was run does not count."""
    a, b = (
        {str(x.relative_to(folder)): x for x in folder.rglob("*") if x.is_file() and x.suffix != ".pyc"}
        for folder in (one, two)
    )
    return a.keys() == b.keys() and all(
        a[name].samefile(b[name]) or filecmp.cmp(a[name], b[name], shallow=False) for name in a
    )
