"""weights.bin: every tensor of a graph as the graph uses it, 64-byte aligned, the same bytes each time."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.jobs import record

ALIGNMENT = 64  # bytes


def write(path: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> tuple[dict[str, Any], str]:
    """Write named tensors in their order, one at a time; the file is whole or not there. Returns its index and sha256.

    The index: name to {"shape", "offset" (bytes)}; all are little-endian float32.
    """
    index: dict[str, Any] = {}
    digest = hashlib.sha256()
    part = record.partial(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as file:
            for name, array in tensors:
                gap = bytes(-file.tell() % ALIGNMENT)
                index[name] = {"shape": list(array.shape), "offset": file.tell() + len(gap)}
                data = np.ascontiguousarray(array, "<f4").data.cast("B") if array.size else b""
                for piece in (gap, data):
                    file.write(piece)
                    digest.update(piece)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return index, digest.hexdigest()


def read(path: Path, index: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors, memory-mapped (copy on write: a stray write never reaches the file).

    Raises ValueError where the file is shorter than its index says.
    """
    end = max((x["offset"] + 4 * math.prod(x["shape"]) for x in index.values()), default=0)
    if path.stat().st_size < end:
        raise ValueError(f"{path.name}: got {path.stat().st_size} bytes, allowed: at least {end}")
    mapped = np.memmap(path, np.uint8, "c")
    return {
        name: mapped[x["offset"] : x["offset"] + 4 * math.prod(x["shape"])].view("<f4").reshape(x["shape"])
        for name, x in index.items()
    }
