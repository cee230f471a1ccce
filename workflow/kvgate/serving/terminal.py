"""Our own lines on the terminal, and what the runtime prints kept apart: it tells some failures nowhere else.

Python 3.9.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import sys

from kvgate.board import printed
from kvgate.board.engine import EngineError


class Terminal:
    """out, err: the user's. What else prints, of this process, goes to a file in memory that is looked at."""

    def __init__(self, show: bool = False) -> None:
        """show: libraries print on the user's stderr; then failures that they only print are not seen."""
        _fill_closed()
        sys.stdout.flush()
        self.out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
        self.err = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        if not show and hasattr(os, "memfd_create"):
            file = os.memfd_create("said")
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
            os.dup2(file, 2)
            os.close(file)
        os.dup2(2, 1)
        faulthandler.enable(self.err)
        self._text = printed.Text()
        self._libc = ctypes.CDLL(None)

    def errors(self) -> list[str]:
        """Lines of errors since the last call."""
        sys.stdout.flush()
        self._libc.fflush(None)
        return self._text.errors()

    def heed(self) -> None:
        """After a step: raises EngineError where the runtime printed an error and went on."""
        lines = self.errors()
        if lines:
            raise EngineError(printed.kind(lines) or "ignored_run_error", "the runtime said: {}".format(lines[-1]))

    def say(self, text: str) -> None:
        """A line on the user's stderr. Where nobody reads that any more, the work goes on."""
        with contextlib.suppress(OSError):
            self.err.write("".join(c if c.isprintable() else "?" for c in text) + "\n")


def _fill_closed() -> None:
    """Standard streams that the user has closed become /dev/null: their numbers would be given to other files."""
    number = os.open(os.devnull, os.O_RDWR)
    while number <= 2:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
