"""Where the child is, in a file that it and the agent map: exact to the step also after its death, no call a step.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import NamedTuple

_HEAD = struct.Struct("<QI")
_SIZE = 1024
_STEP = re.compile(r"(.*) (\d+)/\d+")


class Place(NamedTuple):
    """changes: how often the marker was set. `capital forced 5/20` is step 5 of phase `capital forced`."""

    changes: int
    text: str

    @property
    def phase(self) -> str:
        match = _STEP.fullmatch(self.text)
        return match.group(1) if match else self.text

    @property
    def step(self) -> int | None:
        match = _STEP.fullmatch(self.text)
        return int(match.group(2)) if match else None


class Marker:
    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._count = 0

    def set(self, text: str) -> None:
        data = text.encode()[: _SIZE - _HEAD.size]
        self._count += 1
        self._map[: _HEAD.size + len(data)] = _HEAD.pack(self._count, len(data)) + data

    def get(self) -> Place:
        before = b""
        while True:  # until two looks are equal: the other side may be writing
            now = self._map[:]
            if now == before:
                count, size = _HEAD.unpack_from(now)
                return Place(count, now[_HEAD.size :][:size].decode(errors="replace"))
            before = now

    def close(self) -> None:
        self._map.close()
