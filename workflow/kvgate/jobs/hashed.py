"""sha256 of files, remembered: a large one that has not moved since it was read is not read again. Stdlib only.

A file is the same while its inode, size and dates are. Every write moves the ctime, also one that sets the mtime back;
so does a new hard link, after which it is read once more. The memory lies in the results folder, a small file an inode.
"""

import time
from contextlib import suppress
from pathlib import Path

from kvgate.jobs import record

FOLDER = ".sha256"  # below the results folder
LARGE = 1 << 20  # bytes; to read a smaller one is as fast
_TICK = 100_000_000  # nanoseconds: a write so soon after another may leave the dates as they are

State = tuple[int, ...]  # device, inode, bytes, mtime and ctime in nanoseconds


def state(path: Path) -> State:
    """Raises OSError where there is no such file."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def sha256(path: Path, results: Path) -> str:
    """As remembered where the file has not moved since, else by content. Raises OSError."""
    now = state(path)
    if now[2] >= LARGE:
        with suppress(OSError, ValueError):
            *known, digest = (results / FOLDER / _name(now)).read_text(encoding="utf-8").split()
            if tuple(map(int, known)) == now:
                return digest
    return fresh(path, results)


def fresh(path: Path, results: Path) -> str:
    """By content; what a large file gave is remembered. Raises OSError."""
    before = state(path)
    digest = record.sha256(path)
    settled = time.time_ns() - before[-1] > _TICK
    if before[2] >= LARGE and settled and state(path) == before:
        with suppress(OSError):  # it only saves time
            record.write_bytes(results / FOLDER / _name(before), " ".join([*map(str, before), digest]).encode())
    return digest


def _name(found: State) -> str:
    return f"{found[0]:x}-{found[1]:x}"
