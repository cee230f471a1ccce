"""The agent's files, named by their sha256: what is there, what arrives, what a job gets.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

_SHA = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9_.-]*(/[a-zA-Z0-9_-][a-zA-Z0-9_.-]*)*")
_SPARE = 16 << 20  # bytes left free on the disk


class FileError(Exception):
    """kind: no_space, permission, checksum or io."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.wanted: set[str] = set()  # what this connection named: never evicted by it
        self.refused: set[str] = set()  # what failed while it arrived: the rest of it is dropped

    def present(self, files: dict[str, int]) -> tuple[list[str], dict[str, int]]:
        """Which of {sha256: size} are whole, and the bytes so far of those that are not."""
        present, partial = [], {}
        for sha, size in files.items():
            _checked(sha)
            self.wanted.add(sha)
            if self._whole(sha, size):
                present.append(sha)
            elif self._part(sha).is_file():
                partial[sha] = self._part(sha).stat().st_size
        return present, partial

    def put(self, sha: str, size: int, offset: int, data: bytes) -> bool:
        """Take one chunk in. True: the file is whole. Raises FileError; the chunks after it are then dropped."""
        _checked(sha)
        if offset == 0:
            self.refused.discard(sha)
        elif sha in self.refused:
            return False
        try:
            return self._put(sha, size, offset, data)
        except FileError:
            self.refused.add(sha)
            raise
        except OSError as error:
            self.refused.add(sha)
            if error_kind(error) == "no_space":
                self._part(sha).unlink(missing_ok=True)
                raise FileError("no_space", self._space(size)) from None
            raise FileError(error_kind(error), "{}: {}".format(self.folder, error.strerror)) from None

    def link(self, sha: str, target: Path) -> None:
        """Give a job one of the files. Raises FileError where it is not here."""
        source = self.folder / _checked(sha)
        if not source.is_file():
            raise FileError("io", "{}: got no file {}".format(target.name, sha))
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    def _put(self, sha: str, size: int, offset: int, data: bytes) -> bool:
        part = self._part(sha)
        if offset == 0:
            part.unlink(missing_ok=True)
            self._make_room(size)
        has = part.stat().st_size if part.is_file() else 0
        if offset != has or offset + len(data) > size:
            allowed = "0 or {}, up to {}".format(has, size)
            raise FileError("io", "offset: got {} + {} bytes, allowed: {}".format(offset, len(data), allowed))
        with part.open("ab") as file:
            file.write(data)
            if offset + len(data) < size:
                return False
            file.flush()
            os.fsync(file.fileno())
        found = sha256(part)
        if found != sha:
            part.unlink()
            raise FileError("checksum", "sha256: got {}, allowed: {}".format(found, sha))
        part.chmod(0o400)
        part.replace(self.folder / sha)
        self._remember(sha)
        return True

    def _whole(self, sha: str, size: int) -> bool:
        """Hashes only what was not hashed since it changed last."""
        path = self.folder / sha
        if not path.is_file() or path.stat().st_size != size:
            return False
        note = self._note(sha)
        if note.is_file() and note.read_text(encoding="utf-8") == _stamp(path):
            os.utime(note)
            return True
        if sha256(path) != sha:
            path.unlink()
            return False
        self._remember(sha)
        return True

    def _remember(self, sha: str) -> None:
        self._note(sha).write_text(_stamp(self.folder / sha), encoding="utf-8")

    def _make_room(self, size: int) -> None:
        """Remove the files that were used longest ago, if that makes a new one fit. Raises FileError if not."""
        notes = sorted(self.folder.glob("*.ok"), key=lambda x: x.stat().st_mtime)
        old = [x for x in notes if x.stem not in self.wanted and (self.folder / x.stem).is_file()]
        lacking = size + _SPARE - shutil.disk_usage(self.folder).free
        if lacking > sum((self.folder / x.stem).stat().st_size for x in old):
            raise FileError("no_space", self._space(size, " and {:.1f} to spare".format(_SPARE / 2**20)))
        for note in old:
            if lacking <= 0:
                return
            lacking -= (self.folder / note.stem).stat().st_size
            (self.folder / note.stem).unlink()
            note.unlink()

    def _space(self, size: int, spare: str = "") -> str:
        free = shutil.disk_usage(self.folder).free
        return "{}: needs {:.1f} MiB{}, {:.1f} MiB free".format(self.folder, size / 2**20, spare, free / 2**20)

    def _part(self, sha: str) -> Path:
        return self.folder / (sha + ".part")

    def _note(self, sha: str) -> Path:
        return self.folder / (sha + ".ok")


def safe_name(name: Any) -> str:
    """A relative path without `..`, hidden parts and odd characters. Raises FileError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FileError("io", "file name: got {!r}, allowed: [a-zA-Z0-9_.-] and / between".format(name))
    return name


def error_kind(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no_space"
    return "permission" if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else "io"


def _checked(sha: Any) -> str:
    if not isinstance(sha, str) or not _SHA.fullmatch(sha):
        raise FileError("io", "sha256: got {!r}, allowed: 64 hex digits".format(sha))
    return sha


def _stamp(path: Path) -> str:
    stat = path.stat()
    return "{} {}".format(stat.st_size, stat.st_mtime_ns)


def sha256(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            total.update(block)
    return total.hexdigest()
