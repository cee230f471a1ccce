"""What the runtime and the lite package print: errors that they report nowhere else.

Read back from the file that the child's stderr is. Standard library only, Python 3.9.
"""

from __future__ import annotations

import os
import re
import stat
import sys

_LIMIT = 1 << 20  # bytes of text from where on it is cut: some versions warn of every input in every step
_KEPT = 1 << 16  # bytes of its begin that stay
SUBMIT = re.compile(r"failed to submit", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"\s*E( RKNN\w*:)? ")  # `E RKNN: [12:00:00.000] text`, `E Catch exception ...`
_REASON = re.compile(r"RKNN_ERR|error code|\b\w*(Error|Exception): |fail|invalid|missing|can ?not|not support", re.I)
_PREFIX = re.compile(r"^(\s*(E( RKNN\w*:)? +|\[[\d:.]+\] ?|Exception: ))+")
_HARMLESS = re.compile(r"\s*[WID]( RKNN\w*:)? ")
_VAGUE = re.compile(r"Traceback|Catch exception|^\s*(File|raise|self\.) ?")
# What a line of the runtime means, as a finding's kind; the first that fits.
_KINDS = (
    ("failed_to_submit", SUBMIT),
    ("version_mismatch", re.compile(r"model version|COMPILE_MODEL|LEVEL_VERSION|version.*(match|too (old|low))", re.I)),
    ("platform", re.compile(r"PLATFORM_UNMATCH|DEVICE_UNMATCH")),
    ("memory", re.compile(r"MALLOC_FAIL|out of memory|failed to (malloc|allocate)", re.I)),
    ("core_mask", re.compile(r"core mask|npu core mode", re.I)),
    (
        "engine_missing",
        re.compile(r"open rknpu|insmod|open rknn device|dynamic library|missing in the container", re.I),
    ),
)


class Text:
    """Follows stderr, a file opened for appending, from where it is now. Sees nothing where it is no file."""

    def __init__(self) -> None:
        status = os.fstat(2)
        self._is_file = stat.S_ISREG(status.st_mode)
        self._at = status.st_size
        self._file = os.open("/proc/self/fd/2", os.O_RDONLY) if self._is_file else -1

    def lines(self) -> list[str]:
        """What came since the last call. One system call where that is nothing."""
        size = os.fstat(2).st_size if self._is_file else self._at
        if size == self._at:
            return []
        self._at = min(self._at, size)  # another follower may have cut it
        data = os.pread(self._file, 1 << 20, self._at)
        self._at += len(data)
        if self._at > _LIMIT:
            os.ftruncate(2, _KEPT)
            self._at = _KEPT
        return plain(data.decode(errors="replace")).splitlines()

    def errors(self) -> list[str]:
        sys.stderr.flush()
        return [x.strip()[:300] for x in self.lines() if _ERROR.match(x) or SUBMIT.search(x)]


def plain(text: str) -> str:
    return _COLOUR.sub("", text)


def reason(lines: list[str]) -> str:
    """The line that says most of why a call failed: the last one that names an error, without its prefix."""
    lines = [x for x in lines if x.strip() and not _HARMLESS.match(x)]
    telling = [x for x in lines if _REASON.search(x) and not _VAGUE.search(x)]
    last = (telling or lines or [""])[-1]
    return _PREFIX.sub("", last).strip()[:300]


def kind(lines: list[str]) -> str:
    """The kind of finding that lines of errors are, empty where none is known."""
    return next((name for name, pattern in _KINDS if any(pattern.search(x) for x in lines)), "")
