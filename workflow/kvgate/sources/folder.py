"""Source `folder`: a local checkpoint folder, {"kind": "folder", "path": folder}. Files are hard-linked or copied."""

import hashlib
from pathlib import Path
from typing import Any

from kvgate import record
from kvgate.record import blocked, sha256

__all__ = ["fetch", "hold", "one_line", "sha256"]

REQUIRED = {"path": ""}  # keys, and the form of what they hold
# What a checkpoint consists of; weights of other frameworks, ONNX exports and pictures stay behind.
PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "README.md")
FALLBACK = ("pytorch_model*.bin",)  # only where there is no safetensors file


def fetch(source: dict[str, Any], into: Path) -> dict[str, Any]:
    """Link the checkpoint's files into `into`. Raises Blocked where the folder is missing or holds no weights."""
    return take(Path(source["path"]), into, f"folder {source['path']}")


def take(origin: Path, into: Path, name: str) -> dict[str, Any]:
    """Link the checkpoint files of `origin` into `into`; `name` opens the error lines. Returns {revision, licence}."""
    if not origin.is_dir():
        raise blocked("missing", f"{name}: got no such folder, allowed: a folder with config.json and weights")
    files = matching(origin, PATTERNS)
    if not any(path.suffix == ".safetensors" for path in files):
        weights = matching(origin, FALLBACK)
        if not weights:
            raise blocked("missing", f"{name}: got no weights, allowed: *.safetensors or pytorch_model*.bin")
        files += weights
    if not (origin / "config.json").is_file():
        raise blocked("missing", f"{name}: got no config.json, allowed: a transformers checkpoint")
    for path in files:
        record.link(path.resolve(), into / path.name)  # a hub cache holds symbolic links
    return {"revision": _revision(files), "licence": _licence(origin / "README.md")}


def hold(path: Path, wanted: str | None, name: str) -> None:
    """Raises Blocked where a pinned sha256 is not the file's."""
    if wanted and sha256(path) != wanted:
        text = f"{name}: got sha256 {sha256(path)}, allowed: {wanted}"
        raise blocked("corrupt", text)


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of its text, at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].strip()}"[:300]


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
    head = card.read_text(errors="replace").split("\n---", 1)[0]
    found = [line.split(":", 1)[1].strip() for line in head.splitlines() if line.startswith("license:")]
    return found[0] if found else None
