"""The one thread that owns the runtime's context: it opens it, steps it and closes it, and does jobs in their order.

A runtime that is opened in one thread and stepped in others loses submits on some boards (rknn-toolkit2 #533), so other
threads only hand jobs in and take their pieces out. Standard library only, Python 3.9.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Full(Exception):
    """As many jobs wait as may."""


class Job:
    """Work that waits or runs: its pieces are made in the worker's thread and taken in another one's."""

    def __init__(self, work: Callable[[Any, Callable[[], bool]], Iterable[Any]], stopping: threading.Event) -> None:
        """work(context, stopped): makes the pieces; asks `stopped` before each step."""
        self._work, self._stopping = work, stopping
        self._cancelled = threading.Event()
        self._made: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.ended: float | None = None  # when nothing of it ran or waited any more (time.monotonic)

    def stopped(self) -> bool:
        """Whether nobody wants more of it."""
        return self._cancelled.is_set() or self._stopping.is_set()

    def cancel(self) -> None:
        """From any thread; what runs ends before its next step."""
        self._cancelled.set()

    def pieces(self, seconds: float) -> Iterator[Any]:
        """Pieces as they come, and None after each `seconds` without one. Raises what the work raised."""
        while True:
            try:
                kind, value = self._made.get(timeout=seconds)
            except queue.Empty:
                yield None
                continue
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value

    def run(self, context: Any) -> None:
        """In the worker's thread. A runtime raises what it likes, even SystemExit; the thread goes on."""
        try:
            for piece in () if self.stopped() else self._work(context, self.stopped):
                self._made.put(("piece", piece))
            last: tuple[str, Any] = ("end", None)
        except BaseException as error:
            last = ("error", error)
        self.ended = time.monotonic()
        self._made.put(last)


class Worker:
    def __init__(self, open_context: Callable[[], Any], limit: int) -> None:
        """open_context: called once, in the thread. limit: how many jobs may wait besides the one that runs."""
        self.limit = limit
        self.context: Any = None  # others than the thread only look at it
        self.stopping = threading.Event()
        self._open, self._error = open_context, None  # type: tuple[Callable[[], Any], BaseException | None]
        self._opened = threading.Event()
        self._line: list[Job] = []  # the first one runs
        self._changed = threading.Condition()
        self._usual = 1.0  # seconds, of the last jobs
        self._thread = threading.Thread(target=self._main, name="worker", daemon=True)

    def start(self) -> None:
        """Returns when the context is open. Raises what opening it raised."""
        self._thread.start()
        self._opened.wait()
        if self._error is not None:
            raise self._error

    def submit(self, work: Callable[[Any, Callable[[], bool]], Iterable[Any]]) -> Job:
        """Raises Full. At the end of all, the job ends without a piece."""
        job = Job(work, self.stopping)
        with self._changed:
            if self.stopping.is_set():
                job.run(self.context)
                return job
            if len(self._line) > self.limit:
                raise Full
            self._line.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """Nobody wants it any more. A job that waits leaves the line at once."""
        job.cancel()
        with self._changed:
            if job in self._line[1:]:
                self._line.remove(job)
                job.ended = time.monotonic()

    def stop(self, seconds: float) -> bool:
        """End what runs, close the context and end the thread; whether that was done within `seconds`."""
        self.stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def retry_after(self) -> int:
        """Seconds after which there may be room."""
        return max(1, min(60, round(self._usual)))

    @property
    def length(self) -> int:
        """How many jobs run or wait."""
        return len(self._line)

    def _main(self) -> None:
        try:
            self.context = self._open()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._opened.set()
        try:
            while self._next():
                begin = time.monotonic()
                self._line[0].run(self.context)
                self._usual = (self._usual + time.monotonic() - begin) / 2
                with self._changed:
                    self._line.pop(0)
        finally:
            self.context.close()

    def _next(self) -> bool:
        """Wait for a job. False: the end. Jobs that still wait then are run, and end at once."""
        with self._changed:
            while not self._line and not self.stopping.is_set():
                self._changed.wait()
            return bool(self._line)
