"""Who may use the one context: in order of arrival, and how many may wait. Standard library only, Python 3.9."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOK = 0.25  # seconds between looks whether a waiting client is still there


class Full(Exception):
    """As many wait as may."""


class GaveUp(Exception):
    """The client went away while it waited."""


class Queue:
    def __init__(self, limit: int) -> None:
        """limit: how many may wait besides the one that is served."""
        self.limit = limit
        self._line: list[object] = []  # the first one is served
        self._changed = threading.Condition()
        self._usual = 1.0  # seconds, of the last ones served

    @contextmanager
    def turn(self, gave_up: Callable[[], bool]) -> Iterator[None]:
        """Wait for the context and hold it. Raises Full, GaveUp."""
        me = object()
        with self._changed:
            if len(self._line) > self.limit:
                raise Full
            self._line.append(me)
        try:
            with self._changed:
                while self._line[0] is not me:
                    self._changed.wait(_LOOK)
                    if gave_up():
                        raise GaveUp
            begin = time.monotonic()
            yield
            self._usual = (self._usual + time.monotonic() - begin) / 2
        finally:
            with self._changed:
                self._line.remove(me)
                self._changed.notify_all()

    def retry_after(self) -> int:
        """Seconds after which there may be room."""
        return max(1, min(60, round(self._usual)))

    @property
    def length(self) -> int:
        """How many are served or wait."""
        return len(self._line)
