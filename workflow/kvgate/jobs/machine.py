"""Causes of a failure that lie in the machine, not in the row: a full or read-only disk, no memory.

A record that says one carries `again`: the next run takes its job up. Libraries wrap the system's errors in their own,
so these are known by the system's words for them. Standard library only.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvgate.jobs.record import Blocked

_DISK = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EROFS: "read-only file system",
    errno.EFBIG: "limit of a file's size",
    errno.EIO: "disk error",
}
_MEMORY = ("MemoryError", "bad_alloc", os.strerror(errno.ENOMEM), "failed to map segment")
_ROOM = 1 << 20  # bytes: a disk with less is full, whatever the error says


def cause(error: BaseException, folder: Path) -> str:
    """One line on the cause of an error that was met while working in `folder`; empty where it is another one.

    A stage's own verdict counts by what it was raised from: its text may be about a board's disk.
    """
    found = [x for x in _chain(error) if not isinstance(x, Blocked)]
    for one in found:
        text = f"{type(one).__name__}: {one}"
        if disk(text, folder):
            return disk(text, folder)
        if isinstance(one, MemoryError) or memory(text):
            return f"out of memory: {' '.join(text.split())[:200]}"
    return full(folder) if found else ""


def disk(text: str, folder: Path) -> str:
    """`disk full: path`, or the like, where a text has the system's words for it; the folder where it names no path."""
    for code, what in _DISK.items():
        said = re.search(re.escape(os.strerror(code)) + r"(?:: '([^'\n]+)')?", text)
        if said:
            return f"{what}: {said[1] or folder}"
    return ""


def memory(text: str) -> bool:
    return any(word in text for word in _MEMORY)


def room(needs: int, memory: int) -> str:
    """One line where a job takes more than the machine has, both in MB; empty where not. 0: nobody knows."""
    return f"memory: needs about {needs} MB, this machine has {memory}" if 0 < memory < needs else ""


def full(folder: Path) -> str:
    """`disk full: folder` where its disk has no room; else empty."""
    try:
        return f"disk full: {folder}" if shutil.disk_usage(folder).free < _ROOM else ""
    except OSError:
        return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
