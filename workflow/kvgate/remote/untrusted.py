"""What arrives from a board is a stranger's: names, JSON and arrays are taken only if they are what was asked for."""

import hashlib
import math
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from kvgate.contract import Contract
from kvgate.remote import drivers

_NAME = re.compile(r"(observations/([a-z]+/)?)?[A-Za-z0-9_-]+(\.[a-z0-9]+)?\.(npz|json|txt)")
_MORE = 8  # files beside the observations
_DEPTH, _ITEMS, _TEXT = 12, 50_000, 2000  # of JSON: levels, values in all, characters of a text
_SLACK = 1 << 20  # bytes for everything that is no array
_WORDS = {"phase": str, "reason": str, "stderr_tail": str, "ok": bool}


class Bad(ValueError):
    """An answer that is not what was asked for. Its text is one line."""


class Inbox:
    """Result files as they arrive, in chunks, in a folder of their own. Every name and size is held before a write."""

    def __init__(self, folder: Path, programs: Collection[str], room: int) -> None:
        """programs: whose observations may come, `prefill/sky` of a part; room: bytes of all files at most."""
        self.folder, self.room = folder, room
        self.programs = {f"observations/{name}.npz" for name in programs}
        self.digests: dict[str, str] = {}  # of the files that are whole
        self._open: dict[str, tuple[BinaryIO, Any, int]] = {}  # name to file, running sha256, size

    def take(self, head: Mapping[str, Any], blob: bytes) -> None:
        """One chunk. Raises Bad on a name, size or place that is not the expected one."""
        name, size, offset = head.get("name"), head.get("size"), head.get("offset")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Bad(f"file name: got {drivers.clean(repr(name), 80)}, allowed: {_NAME.pattern}")
        if name.startswith("observations/") and name not in self.programs:
            raise Bad(f"file {name}: got observations of no program of this job")
        if not whole(size) or not whole(offset):
            raise Bad(f"file {name}: got size {size!r} and offset {offset!r}, allowed: whole numbers")
        if offset == 0:
            self._begin(name, size)
        if name not in self._open:
            raise Bad(f"file {name}: got offset {offset} of a file that has not begun")
        file, digest, expected = self._open[name]
        if size != expected or offset != file.tell() or offset + len(blob) > size or (size and not blob):
            at = f"at {file.tell()} of {expected}"
            raise Bad(f"file {name}: got {len(blob)} bytes at {offset} of {size}, allowed: {at}")
        file.write(blob)
        digest.update(blob)
        if file.tell() == size:
            file.close()
            del self._open[name]
            self._part(name).replace(self.folder / name)
            self.digests[name] = digest.hexdigest()

    def hold(self, promised: Mapping[str, str]) -> None:
        """Raises Bad where a file that was promised or asked for is missing, cut, or has other content."""
        for name in sorted(self.programs | set(promised)):
            got = self.digests.get(name)
            if got is None or got != promised.get(name):
                state = "cut off" if name in self._open else "nothing" if got is None else "other content"
                raise Bad(f"file {name}: got {state}, allowed: the file that the answer's checksum names")

    def close(self) -> None:
        for name, (file, _, _) in self._open.items():
            file.close()
            self._part(name).unlink(missing_ok=True)
        self._open.clear()

    def _begin(self, name: str, size: int) -> None:
        if name in self.digests or name in self._open:
            raise Bad(f"file {name}: got it twice")
        others = [x for x in (*self.digests, *self._open) if x not in self.programs]
        if name not in self.programs and len(others) >= _MORE:
            raise Bad(f"file {name}: got more than {_MORE} files that nobody asked for")
        if size > self.room:
            raise Bad(f"file {name}: got {size} bytes, allowed: {self.room}")
        self.room -= size
        path = self._part(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open[name] = path.open("wb"), hashlib.sha256(), size

    def _part(self, name: str) -> Path:
        return self.folder / f"{name}.part"


def whole(value: object) -> TypeGuard[int]:
    """A number of bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 50


def plain(value: Any) -> Any:
    """A copy of a JSON value that can be written, printed and compared. Raises Bad on NaN, depth or size."""
    return _plain(value, _DEPTH, [_ITEMS])


def _plain(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth == 0 or left[0] < 0:
        raise Bad(f"answer: got JSON of more than {_DEPTH} levels or {_ITEMS} values")
    if isinstance(value, dict):
        return {drivers.clean(k, 200): _plain(x, depth - 1, left) for k, x in value.items()}
    if isinstance(value, list):
        return [_plain(x, depth - 1, left) for x in value]
    if isinstance(value, (int, float)) and not abs(value) < 1e18:  # NaN is not either
        raise Bad(f"answer: got {drivers.clean(value, 40)} in JSON, allowed: numbers below 1e18")
    if isinstance(value, str):
        lines = value[:_TEXT].splitlines()
        return "\n".join("".join(x if x.isprintable() else "?" for x in line) for line in lines)
    return value


def status(raw: Any) -> dict[str, Any]:
    """The agent's last message: all its fields, of their kinds. Raises Bad."""
    if not isinstance(raw, dict):
        raise Bad("answer: got no status")
    found = plain(raw)
    body: dict[str, Any] = {}
    for name, kind in _WORDS.items():
        body[name] = _field(found, name, kind)
    body["reason"], body["phase"] = drivers.clean(body["reason"]), drivers.clean(body["phase"], 100)
    for name in ("environment", "versions", "files"):
        body[name] = _field(found, name, dict)
    body["ledger"] = found.get("ledger") and _field(found, "ledger", dict)
    for name in ("exit", "core_mask"):
        body[name] = found.get(name) if isinstance(found.get(name), int) else None
    body["signal"] = drivers.clean(found["signal"], 20) if found.get("signal") else None
    body["findings"] = [_finding(x) for x in _field(found, "findings", list)]
    for name, digest in body["files"].items():
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise Bad(f"answer: got checksum {drivers.clean(repr(digest), 80)} of {name}")
    if not body["ok"] and not body["reason"]:
        raise Bad("answer: got ok = false without a reason")
    return body


def _field(found: Mapping[str, Any], name: str, kind: type) -> Any:
    value = found.get(name)
    if not isinstance(value, kind):
        raise Bad(f"answer: got {name} = {drivers.clean(repr(value), 60)}, allowed: {kind.__name__}")
    return value


def _finding(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not re.fullmatch("[a-z0-9_]{1,40}", str(raw.get("kind"))):
        raise Bad(f"answer: got finding {drivers.clean(repr(raw), 80)}, allowed: kind and text")
    return raw | {"text": drivers.clean(raw.get("text", ""))}


def room(contract: Contract, programs: int) -> int:
    """Bytes that the result files of `programs` programs can have at most: every history over the whole cache."""
    values = contract.vocabulary + sum(math.prod(x.entry) for x in contract.states) + 8
    return programs * (3 * contract.cache.capacity * values * 4 + _SLACK) + _MORE * _SLACK


def headers(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and kind of dtype of every array in an .npz, before anything reads it. Raises Bad.

    What passes holds plain arrays as `numpy.savez` stores them, none larger than its bytes in the file.
    """
    try:
        with zipfile.ZipFile(path) as file:
            return dict(_header(file, info, path.stat().st_size) for info in file.infolist())
    except Exception as why:  # what zipfile and numpy raise on hostile bytes is no list that can be known
        raise Bad(f"{path.name}: {drivers.clean(why)}") from None


def observations(
    path: Path, contract: Contract, steps: Mapping[str, Sequence[int]], at: Collection[int] | None = None
) -> None:
    """Hold a file of observations to `kvgate.observe`'s form. Raises Bad.

    steps: the positions of every history that was asked for; of the free one, the most that it can have. at: positions
    after which replaced states are returned, None: there are no such states.
    """
    shapes = headers(path)
    replaced = {x.name for x in contract.states if not x.appended}
    for history, positions in steps.items():
        count = len(positions)
        got = shapes.get(f"{history}/tokens", ((), ""))[0][:1]
        if got != (count,) and (history != "free" or not got or got[0] > count):
            said = f"{got[0]} steps" if got else "nothing"
            raise Bad(f"{path.name}: got {said} of the history {history}, allowed: {count}")
    for name, (shape, kind) in shapes.items():
        history, _, what = name.partition("/")
        # The free run needs the forced one; its arrays begin where it leaves that.
        known = history in steps or (history == "forced" and "free" in steps)
        expected = _expected(what, contract) if known else None
        single = shape if what == "diverged" else shape[1:]  # of one step
        if what in replaced and shape and history in ("isolated", "forced"):
            # Of a forced run that only the free one asked for nobody said where it goes.
            most = sum(p in set(at or ()) for p in steps.get(history, at or ()))
            if shape[0] != most and (history in steps or shape[0] > most):
                raise Bad(f"{path.name}: got {shape[0]} of {drivers.clean(name, 60)}, allowed: {most}")
        if expected is None or expected != (single, kind) or (what != "diverged" and not shape):
            raise Bad(f"{path.name}: got {drivers.clean(name, 60)} {list(shape)}, which the program does not return")
    for history in {*steps, "forced"}:
        own = (n for n in shapes if n.startswith(f"{history}/") and n.partition("/")[2] not in replaced)
        counts = {shapes[n][0][0] for n in own if shapes[n][0] and n != "free/tokens"}
        if len(counts) > 1 or max(counts, default=0) > contract.cache.capacity:
            raise Bad(f"{path.name}: got {sorted(counts)} steps in the arrays of {history}, allowed: one number")


def _header(file: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> tuple[str, tuple[tuple[int, ...], str]]:
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit or not info.filename.endswith(".npy"):
        raise ValueError(f"got {info.filename!r}, {info.file_size} bytes, allowed: arrays as numpy.savez stores them")
    with file.open(info) as stream:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError(f"got {info.filename!r} in another format than numpy's 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        bytes_ = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or dtype.names or min(shape, default=0) < 0 or bytes_ != info.file_size - stream.tell():
            raise ValueError(f"got {info.filename!r} with {dtype} {list(shape)} in {info.file_size} bytes")
    return info.filename.removesuffix(".npy"), (tuple(shape), dtype.kind)


def _expected(what: str, contract: Contract) -> tuple[tuple[int, ...], str] | None:
    """Shape of one step's value and kind of its dtype; None for an array that no program returns."""
    if what in ("positions", "tokens", "diverged"):
        return (), "i"
    if what == "disturbed":
        return (), "f"
    if what == "logits":
        return (contract.vocabulary,), "f"
    return next(((x.entry, "f") for x in contract.kept() if x.name == what), None)
