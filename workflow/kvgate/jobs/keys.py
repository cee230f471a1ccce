"""A job's key: what its result depends on, as one string. Packing it, comparing it, and the states of files in it.

A key holds the code, the package versions, the part of the config, the text files, and the keys of the jobs that it
reads from, so keys chain: whatever changes, exactly the jobs below it get another key. Standard library only.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypedDict, cast

from kvgate.jobs import hashed, record

_LONG = 32 * 1024  # a command-line argument must stay below 128 KiB


class Code(TypedDict):
    roots: list[str]  # modules, by dotted name
    digest: str  # of them and all that they import from kvgate


class Key(TypedDict):
    """The parts of a key."""

    stage: str
    wildcards: dict[str, str]
    code: Code
    versions: dict[str, str]  # of packages
    config: dict[str, Any]  # the stage's part of it
    texts: dict[str, str]  # path, relative to the repository, to file_state
    inputs: dict[str, list[str]]  # label to the record that is read and its job's short key


def short(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:12]


def pack(key: str) -> str:
    """A key as a command-line argument: as it is, or compressed where it is long."""
    return key if len(key) < _LONG else "z:" + base64.b85encode(zlib.compress(key.encode())).decode()


def unpack(argument: str) -> dict[str, Any]:
    """What was packed: a key, or another dict. Raises ValueError on what is neither."""
    text = zlib.decompress(base64.b85decode(argument[2:])).decode() if argument.startswith("z:") else argument
    return json.loads(text)


def parts(argument: str) -> Key:
    """Of a key as an argument. Raises ValueError on what is none."""
    return cast(Key, unpack(argument))


def changes(key: str, recorded: Mapping[str, object] | None) -> list[str]:
    """Which parts of a record's key differ from the planned one: `new`, or `code`, `versions rknn-toolkit2`, ..."""
    if recorded is None:
        return ["new"]
    planned: dict[str, object] = json.loads(key)
    return [_change(part, planned[part], recorded.get(part)) for part in planned if planned[part] != recorded.get(part)]


def text_digests(base: Path, texts: Iterable[str], results: Path) -> dict[str, str]:
    """The state now of the files that a key names."""
    return {path: file_state(base / path, results) for path in texts}


def recorded(path: Path) -> dict[str, Any]:
    """A record with its key; empty where there is none, it was edited, or asks to be made again."""
    try:
        body = record.held(path)
        return {} if body.get("again") else body
    except (OSError, ValueError, AttributeError):
        return {}


def _change(part: str, planned: Any, recorded: Any) -> str:
    if part in ("versions", "config", "texts", "inputs") and isinstance(recorded, dict):
        names = sorted(k for k in planned.keys() | recorded.keys() if planned.get(k) != recorded.get(k))
        return f"{part} {', '.join(names)}"
    return part


def file_state(path: Path, results: Path) -> str:
    """A file's sha256; of a large one as the results folder remembers it where it has not moved since."""
    try:
        return hashed.sha256(path, results)
    except OSError as error:
        return f"unreadable: {error.strerror}"
