"""A checkpoint's weights as the files hold them, read without transformers: names, shapes and what is in them.

The second reading that `held` compares the loaded model with. Errors name the file.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.jobs.record import blocked, one_line

_BLOCK = 1 << 22  # values that are converted at once
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bfloat16: its upper half of float32
_TYPES = _FLOATS | {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1"}


@dataclass(frozen=True)
class Content:
    """A tensor's values in float32. `total` and `squares` are float64 sums, which no reordering changes."""

    shape: tuple[int, ...]
    crc: int  # of the values in order
    total: float
    squares: float

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Weights:
    """dtypes: the files' names of them (`F32`, `BF16`, ...), of the tensors that are floats; integers: the others."""

    contents: dict[str, Content]
    dtypes: frozenset[str]
    integers: tuple[str, ...]


def content(shape: Iterable[int], blocks: Iterable[np.ndarray]) -> Content:
    """Of flat float32 blocks in order."""
    crc, total, squares = 0, 0.0, 0.0
    for block in blocks:
        crc = zlib.crc32(np.ascontiguousarray(block).data, crc)
        wide = block.astype(np.float64)
        total += float(wide.sum())
        squares += float(wide @ wide)
    return Content(tuple(int(x) for x in shape), crc, total, squares)


def of_array(values: np.ndarray) -> Content:
    flat = values.reshape(-1)
    return content(values.shape, (flat[i : i + _BLOCK].astype(np.float32) for i in range(0, flat.size, _BLOCK)))


def of_tensor(values: Any) -> Content:
    """Of a torch tensor."""
    flat = values.detach().reshape(-1)
    return content(values.shape, (flat[i : i + _BLOCK].float().numpy() for i in range(0, flat.numel(), _BLOCK)))


def read(folder: Path) -> Weights:
    """All tensors of the folder's weight files. Raises Blocked on a damaged file and on a name that is there twice."""
    contents: dict[str, Content] = {}
    dtypes: dict[str, str] = {}
    files = sorted(folder.glob("*.safetensors"))
    for path in files or sorted(folder.glob("*.bin")):
        for name, dtype, found in _safetensors(path) if files else _pickle(path):
            if name in contents:
                raise blocked("weights", f"{path.name}: tensor {name}: got it twice, allowed: once in all files")
            contents[name] = found
            dtypes[name] = dtype
    integers = tuple(name for name, dtype in dtypes.items() if dtype not in _FLOATS)
    return Weights(contents, frozenset(dtypes.values()).intersection(_FLOATS), integers)


def _safetensors(path: Path) -> Iterator[tuple[str, str, Content]]:
    start, header = _header(path)
    data = np.memmap(path, np.uint8, "r")
    for name, entry in header.items():
        first, last = (start + x for x in entry["data_offsets"])
        dtype, shape = entry["dtype"], entry["shape"]
        if dtype not in _TYPES:
            text = f"{path.name}: tensor {name}: got {dtype}, allowed: {', '.join(_FLOATS)} (dequantize it first)"
            raise blocked("weights", text)
        yield name, dtype, content(shape, _blocks(data[first:last], dtype))


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the header's tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        start = 8 + (struct.unpack("<Q", head)[0] if len(head) == 8 else 0)
        try:
            header = json.loads(file.read(start - 8)) if 8 < start <= size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise blocked("weights", f"{path.name}: got no safetensors header in its {size} bytes, allowed: a whole file")
    header.pop("__metadata__", None)
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise blocked("weights", f"{path.name}: got {size} bytes, allowed: the {end} that its header says")
    return start, header


def _blocks(data: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
    raw = data.view(np.dtype(_TYPES[dtype]))
    for i in range(0, raw.size, _BLOCK):
        part = raw[i : i + _BLOCK]
        yield (part.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else part.astype(np.float32)


def _pickle(path: Path) -> Iterator[tuple[str, str, Content]]:
    import torch

    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the damaged bytes lead to
        raise blocked("weights", f"{path.name}: cannot be read: {one_line(error)}") from error
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            raise blocked("weights", f"{path.name}: {name}: got {type(tensor).__name__}, allowed: tensors")
        yield name, names.get(tensor.dtype, str(tensor.dtype)), of_tensor(tensor)
