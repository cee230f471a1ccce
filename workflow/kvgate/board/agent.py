"""The process at the far end of the pipe: receives files and jobs, runs each job in a process of its own.

`python3 -u agent.pyz WORK` with frames (board/wire.py) on its stdin and stdout. It ends by itself: on `bye`, where
the channel closes, and at the deadline; then it kills its child and gives the clocks back. Of two agents in one WORK
the newer one ends the older: its client is gone, or is about to wait for a board that does two things at once.
Standard library only, Python 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvgate.board import environment, files, jobs, wire

VERSION = 2
_GREETING = 60.0  # seconds in which `hello` must come
_LAST_WORD = 3.0  # seconds for the message after the deadline
_CODES = {"bye": 0, "closed": 3, "ended": 4, "garbled": 5}


class Ended(BaseException):
    """The deadline, or a signal that asks this process to end. Not an Exception: nothing may take it for a failure."""


class Inlet:
    """A file descriptor as a stream without a buffer: `select` on it is exact."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def fileno(self) -> int:
        return self.descriptor

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, fewer only at the end."""
        data = bytearray()
        while len(data) < size:
            block = os.read(self.descriptor, min(size - len(data), 1 << 20))
            if not block:
                break
            data += block
        return bytes(data)


def main(arguments: list[str]) -> int:
    if arguments[1:2] == ["--child"]:
        from kvgate.board import child

        return child.main(Path(arguments[2]))
    if len(arguments) != 2:
        print("usage: agent.pyz WORK", file=sys.stderr)
        return 2
    inlet, outlet = _channel()
    command = [sys.executable, "-u", str(Path(arguments[0]).resolve()), "--child"]
    return Agent(Path(arguments[1]).expanduser().absolute(), inlet, outlet, command).serve()


def _channel() -> tuple[Any, Any]:
    """Frames go over copies of stdin and stdout; what else prints goes to stderr, what else reads finds nothing."""
    inlet, outlet = Inlet(os.dup(0)), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return inlet, outlet


class Agent:
    def __init__(self, work: Path, inlet: Any, outlet: Any, command: list[str], root: Path = Path("/")) -> None:
        """command: starts a child; the job's folder is appended. root: where /sys, /proc and /usr are."""
        self.work, self.inlet, self.outlet, self.command, self.root = work, inlet, outlet, command, root
        self.clocks = environment.Clocks(work / "clocks.json", root)

    def serve(self) -> int:
        """Answer frames until the end. Returns the exit code."""
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._end)
        self.deadline = _GREETING
        signal.setitimer(signal.ITIMER_REAL, self.deadline)
        try:
            self.work.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.store = files.Store(self.work / "files")
            with _alone(self.work):
                shutil.rmtree(self.work / "jobs", ignore_errors=True)
                self.problems = self.clocks.restore()
                self._answer_all()
            return _CODES["bye"]
        except wire.Closed:
            return _CODES["closed"]
        except wire.Garbled as error:
            self._last({"type": "error", "kind": "protocol", "text": str(error)})
            return _CODES["garbled"]
        except OSError as error:
            self._last(
                {"type": "error", "kind": files.error_kind(error), "text": "{}: {}".format(self.work, error.strerror)}
            )
            return _CODES["ended"]
        except Ended as why:
            self._last({"type": "error", "kind": "ended", "text": str(why)})
            return _CODES["ended"]

    def _end(self, number: int, frame: Any) -> None:
        # One end is enough: what cleans up must not be interrupted by the next.
        for other in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGALRM:
            raise Ended("deadline: the agent's {:g} s are over".format(self.deadline))
        raise Ended("the agent was ended by {}".format(signal.Signals(number).name))

    def _last(self, head: dict[str, Any]) -> None:
        """Send a last message, if anybody still reads."""
        signal.signal(signal.SIGALRM, lambda number, frame: os._exit(_CODES["ended"]))
        signal.setitimer(signal.ITIMER_REAL, _LAST_WORD)
        with contextlib.suppress(wire.Closed, OSError):
            wire.send(self.outlet, head)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _answer_all(self) -> None:
        while True:
            head, blob = wire.receive(self.inlet)
            if head["type"] == "bye":
                return
            try:
                self._answer(head, blob)
            except files.FileError as error:
                self._refuse(error.kind, error.text, sha256=head.get("sha256"))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                text = "{}: {}: {}".format(head["type"], type(error).__name__, error)
                self._refuse("protocol", text)
            except OSError as error:
                self._refuse(files.error_kind(error), "{}: {}".format(head["type"], error))

    def _answer(self, head: dict[str, Any], blob: bytes) -> None:
        if head["type"] == "hello":
            self._hello(head)
        elif head["type"] == "have":
            present, partial = self.store.present(head["files"])
            self._send("have", present=present, partial=partial)
        elif head["type"] == "put":
            if self.store.put(head["sha256"], int(head["size"]), int(head["offset"]), blob):
                self._send("put", sha256=head["sha256"], ok=True)
        elif head["type"] == "run":
            self._run(head["job"])
        else:
            self._refuse("protocol", "type: got {!r}".format(head["type"]))

    def _hello(self, head: dict[str, Any]) -> None:
        if head["version"] != VERSION:
            raise ValueError("version: got {!r}, allowed: {}".format(head["version"], VERSION))
        self.deadline = float(head["deadline"])
        signal.setitimer(signal.ITIMER_REAL, max(self.deadline, 0.001))
        self._send(
            "hello",
            version=VERSION,
            python=platform.python_version(),
            machine=platform.machine(),
            pid=os.getpid(),
            free_bytes=shutil.disk_usage(self.work).free,
            memory_bytes=environment.available(self.root) or 0,
            environment=environment.record(self.root),
            engines=environment.engines(self.root),
        )

    def _run(self, job: dict[str, Any]) -> None:
        work = jobs.Work(self.work / "jobs", self.store, self.clocks, self.command, self.root)
        work.told_clocks(self.problems)
        with work.folder_of(job) as folder:
            try:
                status = work.run(job, folder, self.inlet, self._progress)
                for name in status["files"]:
                    self._send_file(folder / name, name)
            except Ended as why:
                # The last message still says how far the child came.
                self._last({"type": "done", "status": work.interrupted(str(why))})
                raise
            self._send("done", status=status)

    def _progress(self, phase: str, text: str) -> None:
        self._send("progress", phase=phase, text=text)

    def _send_file(self, path: Path, name: str) -> None:
        size, offset = path.stat().st_size, 0
        with path.open("rb") as file:
            while True:
                block = file.read(wire.CHUNK)
                wire.send(self.outlet, {"type": "file", "name": name, "size": size, "offset": offset}, block)
                offset += len(block)
                if offset >= size:
                    return

    def _refuse(self, kind: str, text: str, **fields: Any) -> None:
        self._send("error", **{"kind": kind, "text": text, **fields})

    def _send(self, type_: str, **fields: Any) -> None:
        wire.send(self.outlet, {"type": type_, **fields})


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Hold WORK. An older agent that holds it is asked to end. Raises OSError where it does not."""
    with (work / "lock").open("a+") as file:
        asked, begin = False, time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - begin > 15:
                    raise OSError(None, "an older agent does not end") from None
                asked = asked or _ask_to_end(file, work)
                time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _ask_to_end(file: Any, work: Path) -> bool:
    """SIGTERM to the process that the lock names, if it is an agent of the same WORK."""
    file.seek(0)
    text = file.read().strip()
    if not text.isdigit():
        return False
    try:
        words = Path("/proc", text, "cmdline").read_bytes().split(b"\0")
        if os.fsencode(work) in [os.fsencode(Path(os.fsdecode(x)).expanduser().absolute()) for x in words if x]:
            os.kill(int(text), signal.SIGTERM)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv))
