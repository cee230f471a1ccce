"""Server-sent events: an answer in pieces, and comments that keep the connection alive. Python 3.9."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

# A proxy that buffers (nginx, unless told otherwise) or a cache would keep the pieces.
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


class Events:
    def __init__(self, write: Callable[[bytes], Any], chunked: bool) -> None:
        """chunked: as HTTP/1.1 has it; else the connection's end is the answer's."""
        self._write, self._chunked = write, chunked

    def data(self, value: Any) -> None:
        self._send("data: {}\n\n".format(value if isinstance(value, str) else json.dumps(value)))

    def comment(self, text: str) -> None:
        """Clients drop it."""
        self._send(": {}\n\n".format(text))

    def end(self) -> None:
        if self._chunked:
            self._write(b"0\r\n\r\n")

    def _send(self, text: str) -> None:
        data = text.encode()
        self._write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)
