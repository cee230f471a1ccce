"""The .rknn file, read and never edited: its boundary, its custom string, its content digest. Standard library only.

The end is plain JSON with inputs and outputs in true order; the header holds the boundary's dtypes and layouts, the
quantized ranges, the custom string and the compiler's version as length-prefixed texts. Offsets in bytes.
"""

import ast
import hashlib
import json
import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgate.compiler import platforms

_TAIL = b'{"connection"'
_BODY = b"RKNPU "  # opens the header's last text (`RKNPU f2`, `RKNPU lite`): tables, and then the weights, follow

# 4-byte words of the file's tables that the compiler leaves as they lay on its stack, per platform and number of a
# table's slots: (slot, word). Everything else is equal in two builds of equal inputs. Measured with MEASURED.
_ALL = (0, 1)
STACK_WORDS: Mapping[str, Mapping[int, tuple[tuple[int, int], ...]]] = {
    "rk3576": {13: ((11, 0), (12, 0))},
    "rv1126b": {13: ((11, 0), (12, 0))},
    "rk3588": {
        13: (*((slot, word) for slot in (6, 7, 8) for word in _ALL), (11, 0), (12, 0)),
        7: ((2, 0), (2, 1)),
        9: ((2, 0), (2, 1)),
    },
    "rk3566": {13: tuple((slot, word) for slot in range(5, 10) for word in _ALL)},
    "rk3562": {},
}
_FILLER = b"\x55\x55\x00\x00"
_ADDRESS = range(0x5500, 0x5700)  # the high half of a heap address


@dataclass(frozen=True)
class Tensor:
    """An input or output of the artifact.

    low, high: its calibrated range where it is quantized. int8 also has real = scale * (q - zero).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    low: float | None = None
    high: float | None = None
    scale: float | None = None
    zero: int | None = None


@dataclass(frozen=True)
class Artifact:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    custom: str  # empty where there is none
    platform: str
    version: str  # the toolkit's
    compiler: str
    sha256: str
    content_digest: str  # 64 hex digits, or `not comparable: ...`
    size: int  # bytes


def read(path: Path, digests: bool = True) -> Artifact:
    """Read a .rknn through a memory map. Raises ValueError on a file that is not understood.

    digests: False leaves both digests empty and most of the file untouched.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.rfind(_TAIL)
        body = data.find(_BODY)
        if data[:4] != b"RKNN" or start < 0 or body < 0:
            raise ValueError(f"artifact {path.name}: got {bytes(data[:4])!r}..., allowed: an .rknn with its JSON tail")
        tail = json.loads(data[start:])
        outputs, inputs, custom = _boundaries(data, body)
        ranges = _ranges(data, body)
        version, compiler = _version(data, body)
        platform = ",".join(tail["target_platform"])
        plain, content = _digests(data, body, platform, str(tail["version"])) if digests else ("", "")
        return Artifact(
            _side(tail, "input", inputs, ranges),
            _side(tail, "output", outputs, ranges),
            custom,
            platform,
            version,
            compiler,
            plain,
            content,
            len(data),
        )


def _side(
    tail: Mapping[str, Any], side: str, kinds: Mapping[str, Any], ranges: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    entries = sorted((e for e in tail["graph"] if e["left"] == side), key=lambda e: e["left_tensor_id"])
    tensors = {t["tensor_id"]: t for t in tail["norm_tensor"]}
    found = []
    for entry in entries:
        tensor = tensors[entry["right_tensor_id"]]
        name = tensor.get("url", "")
        kind = kinds.get(name, {})
        numbers = _numbers(kind.get("dtype", ""), ranges.get(name, {}))
        found.append(Tensor(name, tuple(tensor["size"]), kind.get("dtype", ""), kind.get("layout", ""), *numbers))
    return tuple(found)


def _numbers(dtype: str, entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Range of a quantized tensor; int8 is affine over 255 steps of a range that holds 0."""
    if dtype not in ("int8", "int16") or len(entry.get("min", ())) != 1:
        return ()
    low, high = entry["min"][0], entry["max"][0]
    bottom, top = min(low, 0.0), max(high, 0.0)
    if dtype == "int16" or entry.get("qtype") != "asym" or top == bottom:
        return low, high
    scale = (top - bottom) / 255
    return low, high, scale, round(-128 - bottom / scale)


def _texts(data: mmap.mmap, end: int, opening: bytes) -> Iterator[str]:
    """Length-prefixed texts of the header that begin with `opening`."""
    at = data.find(opening, 0, end)
    while at >= 0:
        length = int.from_bytes(data[at - 4 : at], "little") if at >= 4 else 0
        if len(opening) <= length <= end - at:
            yield data[at : at + length].decode(errors="replace")
        at = data.find(opening, at + 1, end)


def _boundaries(data: mmap.mmap, end: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Outputs and inputs by name, in the header's order, and the custom string (where it is a JSON object)."""
    sides, custom = [], ""
    for text in _texts(data, end, b'{"'):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if value and all(isinstance(v, dict) and {"dtype", "layout"} <= set(v) for v in value.values()):
            sides.append(value)
        else:
            custom = text
    if len(sides) != 2:
        raise ValueError(f"artifact: got {len(sides)} boundary tables in the header, allowed: 2")
    return sides[0], sides[1], custom


def _ranges(data: mmap.mmap, end: int) -> dict[str, Any]:
    for text in _texts(data, end, b"{'attrs'"):
        return dict(ast.literal_eval(text).get("quant_tab", {}))
    return {}


def _version(data: mmap.mmap, end: int) -> tuple[str, str]:
    match = re.search(rb"(\d+\.\d+\.\d+)\(compiler version: (\d+\.\d+\.\d+ \([^)]*\))\)", data[:end])
    return (match.group(1).decode(), match.group(2).decode()) if match else ("", "")


def _digests(data: mmap.mmap, body: int, platform: str, version: str) -> tuple[str, str]:
    """sha256 of the file, and of a copy whose leftover stack words are filled."""
    plain, content = hashlib.sha256(), hashlib.sha256()
    try:
        words = stack_words(data, body, platform, version)
        why = ""
    except ValueError as error:
        words, why = [], str(error)
    with memoryview(data) as view:
        at = 0
        for word in words:
            plain.update(view[at : word + 4])
            content.update(view[at:word])
            content.update(_FILLER)
            at = word + 4
        plain.update(view[at:])
        content.update(view[at:])
    return plain.hexdigest(), f"not comparable: {why}" if why else content.hexdigest()


def stack_words(data: mmap.mmap | bytes, body: int, platform: str, version: str) -> list[int]:
    """Offsets, ascending, of the words that hold leftovers of the compiler's stack.

    Raises ValueError where it is not known which they are, or where they are not as every known build had them.
    """
    if version != platforms.MEASURED or platform not in STACK_WORDS:
        raise ValueError(f"platform {platform}, toolkit {version}: which words are leftovers was not measured")
    found, halves = [], ([], [])  # type: tuple[list[int], tuple[list[int], list[int]]]
    for table, slots in _tables(data, body):
        for slot, word in STACK_WORDS[platform].get(slots, ()):
            at = table + 4 + 8 * slot + 4 * word
            found.append(at)
            if platform == "rk3576":
                halves[slot == 12].append(int.from_bytes(data[at : at + 4], "little"))
    if halves[0] and not (len(set(halves[0])) == len(set(halves[1])) == 1 and halves[0][0] in _ADDRESS):
        raise ValueError("leftover words: got other values than one heap address in all tables")
    return sorted(found)


def _tables(data: mmap.mmap | bytes, body: int) -> Iterator[tuple[int, int]]:
    """FlatBuffer tables of 8-byte slots after the header: their offset and number of slots."""
    slots_begin = bytes.fromhex("04000c0014001c0024002c00")
    at = data.find(slots_begin, body)
    while at >= 0:
        start = at - 4
        size, table_size = (int.from_bytes(data[start + k : start + k + 2], "little") for k in (0, 2))
        slots = (size - 4) // 2
        fits = 16 <= size <= 64 and 40 <= table_size <= 512
        if fits and slots == 13:
            fits = all(int.from_bytes(data[at + 2 * k : at + 2 * k + 2], "little") == 4 + 8 * k for k in range(slots))
        if fits and int.from_bytes(data[start + size : start + size + 4], "little", signed=True) == size:
            yield start + size, slots
        at = data.find(slots_begin, at + 1)
