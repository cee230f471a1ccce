"""Source `folder`: a local checkpoint folder, {"kind": "folder", "path": folder, "licence": optional}.

The path is relative to the repository. Files are copied: a link would let what happens here reach the user's own.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import NotRequired, TypedDict

from kvgate.jobs.record import blocked, one_line, sha256
from kvgate.sources import Fetched

REQUIRED = {"path": ".+"}  # keys, and the form of the text that they hold
OPTIONAL = {"licence": ".+"}
LOCAL = ("path",)  # keys that are paths, relative to the repository
# What a checkpoint consists of; weights of other frameworks, ONNX exports and pictures stay behind.
PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "README.md")
FALLBACK = ("pytorch_model*.bin",)  # only where there is no safetensors file
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # or an index of this name with .index.json, in this order
_LFS = b"version https://git-lfs.github.com/"
_ADAPTERS = ("adapter_config.json", "adapter_model.*")


class Source(TypedDict):
    kind: str
    path: str
    licence: NotRequired[str]


def fetch(source: Source, into: Path) -> Fetched:
    """Copy the checkpoint's files into `into`. Raises Blocked where the folder is missing or holds no weights."""
    return take(Path(source["path"]), into, f"folder {source['path']}")


def take(origin: Path, into: Path, name: str) -> Fetched:
    """Copy the checkpoint files of `origin` into `into`; `name` opens the error lines."""
    if not origin.is_dir():
        raise blocked("missing", f"{name}: got no such folder, allowed: a folder with config.json and weights")
    _no_adapter(origin, name)
    weights = _weights(origin, name)
    if not (origin / "config.json").is_file():
        raise blocked("missing", f"{name}: got no config.json, allowed: a transformers checkpoint")
    found = set(matching(origin, PATTERNS + FALLBACK))
    others = {path for path in found if path.name.endswith((".safetensors", ".bin", ".index.json"))} - set(weights)
    files = sorted(found - others)
    for path in files:
        _not_a_pointer(path)
        copy(path, into / path.name)
    left = {path.name: f"the weights are those of {weights[0].name}" for path in others}
    return {"revision": _revision(files), "licence": _licence(origin / "README.md"), "left_out": left}


def copy(source: Path, target: Path) -> None:
    """The bytes, as a file of its own. Where the file system shares blocks of equal files this costs nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file, target.open("wb") as to:
        left = os.fstat(file.fileno()).st_size
        try:
            while left and (done := os.copy_file_range(file.fileno(), to.fileno(), left)):
                left -= done
        except OSError:  # of a kernel or a file system that cannot
            left = max(left, 1)
        if left:
            file.seek(0)
            to.seek(0)
            shutil.copyfileobj(file, to)


def _no_adapter(origin: Path, name: str) -> None:
    found = matching(origin, _ADAPTERS)
    if not found:
        return
    alone = not any((origin / x).is_file() or (origin / f"{x}.index.json").is_file() for x in _WEIGHTS)
    beside = "" if alone else " beside a model, which would be taken without it"
    raise blocked("adapter", f"{name}: got {found[0].name}{beside}, an adapter: merge it first")


def _weights(origin: Path, name: str) -> list[Path]:
    """The weight files that transformers would read, an index first. Raises Blocked where none, or not to be told."""
    for single in _WEIGHTS:
        index = origin / f"{single}.index.json"
        shards = _shards(index, name) if index.is_file() else []
        if shards and (origin / single).is_file() and origin / single not in shards:
            text = f"{name}: got {single} and {index.name} of other files, allowed: one of the two"
            raise blocked("weights", text)
        if shards:
            return [index, *shards]
        if (origin / single).is_file():
            return [origin / single]
    known = " or ".join(f"{x} (or {x}.index.json and its files)" for x in _WEIGHTS)
    raise blocked("missing", f"{name}: got no weights, allowed: {known}")


def _shards(index: Path, name: str) -> list[Path]:
    """The files that an index names, all there and beside it."""
    _not_a_pointer(index)
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise blocked("weights", f"{name}: {index.name}: cannot be read: {one_line(error)}") from error
    there = {path.name for path in matching(index.parent, PATTERNS + FALLBACK)}
    for x in named:
        if x not in there:
            raise blocked("missing", f"{name}: got no {x}, which {index.name} names, allowed: its files beside it")
    return [index.parent / x for x in named]


def _not_a_pointer(path: Path) -> None:
    """Raises Blocked where a clone without Git LFS left a pointer in the file's place."""
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            text = f"{path.name}: got a Git LFS pointer, allowed: the file itself (git lfs pull)"
            raise blocked("corrupt", text)


def hold(path: Path, wanted: str | None, name: str) -> None:
    """Raises Blocked where a pinned sha256 is not the file's."""
    if wanted and sha256(path) != wanted:
        text = f"{name}: got sha256 {sha256(path)}, allowed: {wanted}"
        raise blocked("corrupt", text)


def matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _revision(files: list[Path]) -> str:
    """One sha256 over names and contents: a local folder has no other version."""
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name} {sha256(path)}\n".encode())
    return total.hexdigest()


def _licence(card: Path) -> str | None:
    """`license:` of a model card's front matter."""
    if not card.is_file():
        return None
    head = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
    found = [line.split(":", 1)[1].strip() for line in head.splitlines() if line.startswith("license:")]
    return found[0] if found else None
