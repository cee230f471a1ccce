"""The body of a request, of known length or in chunks. Standard library only, Python 3.9."""

from __future__ import annotations

import socket
from typing import Any

from kvgate.serving.fields import Bad

LIMIT = 1 << 20  # bytes of a body, at most
_LINE = 256  # bytes of a chunk's first line, at most
_TRAILERS = 8


class Gone(Exception):
    """The client hung up."""


def size(headers: Any) -> int | None:
    """Bytes of the body, None where it comes in chunks. Raises Bad."""
    encodings, lengths = headers.get_all("Transfer-Encoding", []), headers.get_all("Content-Length", [])
    if encodings and (lengths or [x.strip().lower() for x in encodings] != ["chunked"]):
        text = "Transfer-Encoding: got {!r}, allowed: chunked, once and without Content-Length"
        raise Bad(text.format(", ".join(encodings)[:60]))
    if encodings:
        return None
    text = lengths[0] if len(lengths) == 1 else ""
    if not (text.isascii() and text.isdigit()):
        raise Bad("body: got no length, allowed: one Content-Length, or Transfer-Encoding: chunked", status=411)
    if len(text) > 12 or int(text) > LIMIT:
        raise _too_large(text[:20])
    return int(text)


def read(file: Any, length: int | None) -> bytes:
    """Raises Bad on chunks that are none, on too many of them and on a client that is too slow; Gone."""
    try:
        return _chunks(file) if length is None else _exactly(file, length)
    except socket.timeout:
        raise Bad("body: it came too slowly", status=408) from None


def _chunks(file: Any) -> bytes:
    found = b""
    while True:
        digits = _line(file).partition(b";")[0].strip()  # extensions say nothing here
        if not digits or digits.strip(b"0123456789abcdefABCDEF"):
            raise Bad("chunk: got {!r}, allowed: its size, a hexadecimal number".format(digits[:20].decode("latin-1")))
        if len(digits) > 12 or len(found) + int(digits, 16) > LIMIT:
            raise _too_large("more")
        length = int(digits, 16)
        if length == 0:
            break
        found += _exactly(file, length)
        if _exactly(file, 2) != b"\r\n":
            raise Bad("chunk: it goes on after its {} bytes".format(length))
    for _ in range(_TRAILERS):
        if not _line(file):
            return found
    raise Bad("chunks: got more trailers, allowed: {}".format(_TRAILERS))


def _line(file: Any) -> bytes:
    line = bytes(file.readline(_LINE))
    if not line.endswith(b"\n"):
        if len(line) < _LINE:
            raise Gone
        raise Bad("chunk: got a longer line, allowed: {} bytes".format(_LINE))
    return line.rstrip(b"\r\n")


def _exactly(file: Any, length: int) -> bytes:
    data = bytes(file.read(length))
    if len(data) < length:
        raise Gone
    return data


def _too_large(got: str) -> Bad:
    return Bad("body: got {} bytes, allowed: {}".format(got, LIMIT), status=413)
