"""Frames between kvgate and the agent on a board, over one pair of pipes: a JSON head and a blob.

A frame is the magic, the sizes of head and blob (big-endian, 4 bytes each), the head, the blob. Both sides take the
other for a stranger: sizes are limited, heads are JSON objects, nothing that arrives is ever executed.
Standard library only, Python 3.9: boards run it.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

MAGIC = b"KVG1"
CHUNK = 1 << 20  # bytes of a file in one frame
_SIZES = struct.Struct(">4sII")
_HEAD = 1 << 22  # bytes, the longest head
_BLOB = 1 << 24  # bytes, the longest blob


class Closed(Exception):
    """The other side is gone, at a frame's border or inside one."""


class Garbled(Exception):
    """What arrived is no frame. Its text shows the first bytes."""


def send(stream: BinaryIO, head: dict[str, Any], blob: bytes = b"") -> None:
    """Write one frame. Raises Closed where nobody reads, ValueError on a frame that no one would take."""
    text = json.dumps(head, separators=(",", ":")).encode()
    if len(text) > _HEAD or len(blob) > _BLOB:
        raise ValueError("frame: got {} + {} bytes, allowed: {} + {}".format(len(text), len(blob), _HEAD, _BLOB))
    try:
        stream.write(_SIZES.pack(MAGIC, len(text), len(blob)) + text)
        if blob:
            stream.write(blob)
        stream.flush()
    except (BrokenPipeError, ConnectionError, ValueError) as error:
        raise Closed(str(error)) from None


def receive(stream: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Read one frame. Raises Closed at the end of the stream, Garbled on anything that is no frame."""
    begin = stream.read(_SIZES.size)
    if len(begin) < _SIZES.size:
        raise Closed("ended inside a frame" if begin else "ended")
    magic, head_size, blob_size = _SIZES.unpack(begin)
    if magic != MAGIC or head_size > _HEAD or blob_size > _BLOB:
        raise Garbled("got {!r}, allowed: a frame".format(begin))
    text, blob = stream.read(head_size), stream.read(blob_size)
    if len(text) < head_size or len(blob) < blob_size:
        raise Closed("ended inside a frame")
    try:
        head = json.loads(text)
    except (ValueError, RecursionError):  # deep nesting is the latter
        head = None
    if not isinstance(head, dict) or not isinstance(head.get("type"), str):
        raise Garbled("got {!r}, allowed: a JSON object with a type".format(text[:64]))
    return head, blob
