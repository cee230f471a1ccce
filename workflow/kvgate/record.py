"""Stage records: one JSON a job, written last and whole. An expected failure is a record with status `blocked`."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Blocked(Exception):
    """An expected failure: the stage writes it as data, the stages after it pass it on, the row reads `blocked: ...`.

    findings: dicts with at least `kind` (a short fixed word) and `text` (one line).
    """

    def __init__(self, reason: str, findings: Iterable[dict[str, Any]] = (), **facts: Any) -> None:
        super().__init__(reason)
        self.reason, self.findings, self.facts = reason, list(findings), facts


def finding(kind: str, text: str, **where: Any) -> dict[str, Any]:
    return {"kind": kind, "text": text, **where}


def blocked(kind: str, text: str) -> Blocked:
    """Of one finding, which is the reason."""
    return Blocked(text, [finding(kind, text)])


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def write(path: Path, body: dict[str, Any]) -> None:
    """Write JSON that is equal for equal content (sorted keys; NaN is refused), whole or not at all."""
    write_bytes(path, (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = partial(path)
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def partial(path: Path) -> Path:
    """The name under which a file is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def link(source: Path, target: Path) -> None:
    """Hard-link `source` to `target` (copy across file systems), replacing whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = partial(target)
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:
        import shutil

        shutil.copyfile(source, part)
    part.replace(target)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
