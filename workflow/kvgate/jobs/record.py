"""Stage records: one JSON a job, written last and whole. An expected failure is a record with status `blocked`.

A record is sealed: its first field is the sha256 of the rest, so that one that was edited is not believed.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_SEAL = "sealed"


class Blocked(Exception):
    """An expected failure: the stage writes it as data, the stages after it pass it on, the row reads `blocked: ...`.

    findings: dicts with at least `kind` (a short fixed word) and `text` (one line).
    """

    def __init__(self, reason: str, findings: Iterable[Mapping[str, Any]] = (), **facts: Any) -> None:
        super().__init__(reason)
        self.reason, self.findings, self.facts = reason, list(findings), facts


def finding(kind: str, text: str, **where: Any) -> dict[str, Any]:
    return {"kind": kind, "text": text, **where}


def blocked(kind: str, text: str) -> Blocked:
    """Of one finding, which is the reason."""
    return Blocked(text, [finding(kind, text)])


def read(path: Path) -> dict[str, Any]:
    """A file of JSON. Raises ValueError where it is none, or is sealed and was edited since."""
    return _opened(path.read_bytes())[0]


def held(path: Path) -> dict[str, Any]:
    """A stage's record. Raises ValueError on what `write` did not write so."""
    body, sealed = _opened(path.read_bytes())
    if not sealed:
        raise ValueError("got no seal, allowed: a record as its stage wrote it")
    return body


def write(path: Path, body: Mapping[str, Any]) -> None:
    """Write sealed JSON that is equal for equal content (sorted keys; NaN is refused), whole or not at all."""
    write_bytes(path, encoded(body))


def encoded(body: Mapping[str, Any]) -> bytes:
    """What `write` writes."""
    rest = json.dumps(body, indent=1, sort_keys=True, allow_nan=False)[1:] + "\n"
    rest = ("," if body else "\n") + rest
    return _head(hashlib.sha256(rest.encode()).hexdigest()) + rest.encode()


def _head(seal: str) -> bytes:
    return f'{{\n "{_SEAL}": "{seal}"'.encode()


def _opened(data: bytes) -> tuple[dict[str, Any], bool]:
    """The body without its seal, and whether there was one. Raises ValueError where it does not hold."""
    body = json.loads(data)
    if not isinstance(body, dict) or _SEAL not in body:
        return body, False
    seal = str(body.pop(_SEAL))
    head = _head(seal)
    if not data.startswith(head) or hashlib.sha256(data[len(head) :]).hexdigest() != seal:
        raise ValueError("got other content than its seal says: it was edited")
    return body, True


def write_bytes(path: Path, data: bytes) -> str:
    """Write a file whole or not at all. Returns the sha256 of `data`."""
    return write_blocks(path, [data])


def write_blocks(path: Path, blocks: Iterable[bytes]) -> str:
    """As write_bytes, of bytes that are one after the other in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part, digest = partial(path), hashlib.sha256()
    try:
        with part.open("wb") as file:
            for block in blocks:
                file.write(block)
                digest.update(block)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return digest.hexdigest()


def doubt(path: Path) -> None:
    """Note beside a record that a file of it was found changed: planning then reads what it otherwise believes."""
    with suppress(OSError):  # the finding itself is told by the job that made it
        _doubts(path).touch()


def doubted(path: Path) -> bool:
    return _doubts(path).exists()


def settle(path: Path) -> None:
    """The record is made again, or its files hold after all."""
    _doubts(path).unlink(missing_ok=True)


def _doubts(path: Path) -> Path:
    return path.with_name(f".{path.name}.doubted")


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


def one_line(error: BaseException) -> str:
    """An exception's type and its text in one line, at most 300 characters: the cause often stands in the last one."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
