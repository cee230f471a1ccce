"""One conversation with the agent on a board: bring it the files that it lacks, let it run a job, take its answer.

What arrives goes through remote/untrusted.py; the process, the pipes and the time limits are those of remote/link.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvgate.board import wire
from kvgate.jobs import record
from kvgate.remote import drivers, untrusted
from kvgate.remote.link import Limits, Link, Lost, Refused, Trouble

__all__ = ["Limits", "Lost", "Refused", "Session", "Trouble"]

VERSION = 2  # of the frames' meaning
_ENDED = "the agent was ended by"  # its last words when somebody on the board ends it: no fault of the row
_QUIET = 0.2  # seconds between two lines of progress that are passed on


def say_nothing(text: str) -> None:
    pass


def observed(job: Mapping[str, Any]) -> list[str]:
    """The programs that a job returns observations of, those of a part beside `decode` as `prefill/sky`."""
    return [f"{of}{name}" for of in ("", *(f"{part}/" for part in job["parts"])) for name in job["programs"]]


class Session:
    """`with Session(board, agent, deadline) as s: s.push(files); status = s.run(job, folder)`.

    Raises Lost and Refused, each with one line. hello: what the agent said of its board.
    """

    def __init__(self, board: Mapping[str, Any], agent: bytes, deadline: float, limits: Limits | None = None) -> None:
        """board: a checked entry of boards.yaml. agent: the zip app. deadline: seconds for everything."""
        self.limits, self.deadline = limits or Limits(), deadline
        self.link = Link(board, agent, deadline + self.limits.answer, self.limits)
        self.hello: dict[str, Any] = {}
        self.sent = 0  # bytes of files that travelled

    def __enter__(self) -> Session:
        self.link.open()
        try:
            self.link.send({"type": "hello", "version": VERSION, "deadline": self.deadline})
            self.hello = self._greeted(self._answer("hello", self.limits.connect))
        except BaseException:
            self.link.kill()
            self.link.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """On our own failure the agent gets no farewell: its pipe closes, and it cleans up and ends."""
        if kind is None:
            try:
                self.link.send({"type": "bye"})
            except Lost:
                self.link.kill()
        self.link.close()

    def have(self, files: Mapping[str, int]) -> tuple[set[str], dict[str, int]]:
        """files: sha256 to bytes. Returns which the board holds whole, and of which it holds how many bytes."""
        self.link.send({"type": "have", "files": dict(files)})
        head = self._answer("have", self.limits.answer + sum(files.values()) * self.limits.check)
        present, partial = head.get("present"), head.get("partial")
        if not isinstance(present, list) or not isinstance(partial, dict):
            raise self._untrue("answer: got no lists of files")
        if not all(isinstance(x, str) and x in files for x in (*present, *partial)):
            raise self._untrue("answer: got files that nobody asked for")
        if not all(untrusted.whole(n) for n in partial.values()):
            raise self._untrue("answer: got no numbers of bytes")
        return set(present), {sha: n for sha, n in partial.items() if n <= files[sha]}

    def put(self, path: Path, sha: str, offset: int = 0) -> None:
        """Send a file's bytes from `offset` on. One that was taken up in the middle and is wrong, is sent whole."""
        try:
            self._put(path, sha, offset)
        except Refused as why:
            if why.kind != "checksum":
                raise
            if offset:
                self._put(path, sha, 0)
            elif record.sha256(path) != sha:
                raise Refused(f"{path.name}: got other content than its record says", "changed") from None
            else:
                raise

    def push(self, files: Mapping[str, Path], progress: Callable[[str], None] = say_nothing) -> None:
        """Bring the board what it lacks. files: sha256 to path."""
        sizes = {sha: path.stat().st_size for sha, path in files.items()}
        present, partial = self.have(sizes)
        for sha in files.keys() - present:
            at = partial.get(sha, 0)
            rest = f" from {at / 1e6:.2f} MB on" if at else ""
            progress(f"bringing {files[sha].name}, {sizes[sha] / 1e6:.2f} MB{rest}")
            self.put(files[sha], sha, at)

    def run(
        self,
        job: Mapping[str, Any],
        folder: Path,
        progress: Callable[[str], None] = say_nothing,
        room: int = 1 << 32,
        expected: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Run a job whose files the board has; its result files are in `folder` when this returns its status.

        room: bytes that they may have in all. expected: programs that return observations (default: the job's).
        """
        inbox = untrusted.Inbox(folder, observed(job) if expected is None else expected, room)
        silence = self.limits.answer + max(float(x) for x in job.get("seconds", {"": 0}).values())
        said = 0.0
        self.link.where = "the start of the job"
        self.link.send({"type": "run", "job": dict(job)})
        try:
            while True:
                head, blob = self.link.receive("a sign of the running job", silence)
                if head["type"] == "progress":
                    self.link.where = drivers.clean(head.get("text") or head.get("phase"), 100)
                    if time.monotonic() - said > _QUIET:
                        said = time.monotonic()
                        progress(self.link.where)
                elif head["type"] == "file":
                    inbox.take(head, blob)
                elif head["type"] == "done":
                    status = untrusted.status(head.get("status"))
                    if status["ok"]:
                        inbox.hold(status["files"])
                    elif status["reason"].startswith(_ENDED):
                        raise Lost(status["reason"], "lost")
                    status["files"] = inbox.digests
                    return status
                else:
                    self._unasked(head, "progress, file or done")
        except untrusted.Bad as why:
            raise self._untrue(str(why)) from None
        finally:
            inbox.close()

    def _answer(self, kind: str, seconds: float) -> dict[str, Any]:
        head, _ = self.link.receive(f"an answer to {kind}", seconds)
        if head["type"] != kind:
            self._unasked(head, kind)
        return head

    def _unasked(self, head: Mapping[str, Any], allowed: str) -> None:
        """Raises Refused on the agent's `error`, Lost on a frame that is not due."""
        if head["type"] == "error":
            kind, text = drivers.clean(head.get("kind"), 20), drivers.clean(head.get("text"))
            if text.startswith(_ENDED):
                raise Lost(text, "lost")
            raise Refused(f"the board refuses: {text}", kind)
        raise Lost(f"frame: got {drivers.clean(repr(head['type']), 40)}, allowed: {allowed}", "garbled")

    def _greeted(self, head: dict[str, Any]) -> dict[str, Any]:
        try:
            hello: dict[str, Any] = untrusted.plain(head)
        except untrusted.Bad as why:
            raise self._untrue(str(why)) from None
        if hello.get("version") != VERSION:
            raise self._untrue(f"agent: got version {hello.get('version')!r}, allowed: {VERSION}")
        kinds = {"free_bytes": int, "environment": dict, "engines": dict}
        wrong = [name for name, kind in kinds.items() if not isinstance(hello.get(name), kind)]
        if wrong:
            raise self._untrue(f"agent: got no {', '.join(wrong)} in its hello")
        return hello

    def _put(self, path: Path, sha: str, offset: int) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(offset)
            while True:
                chunk = file.read(wire.CHUNK)
                self.link.send({"type": "put", "sha256": sha, "size": size, "offset": offset}, chunk)
                offset += len(chunk)
                self.sent += len(chunk)
                if offset >= size or not chunk or self.link.speaks():
                    break
        head = self._answer("put", self.limits.answer + size * self.limits.check)
        if head.get("sha256") != sha or head.get("ok") is not True:
            raise self._untrue("answer: got no confirmation of the file that was sent")

    def _untrue(self, text: str) -> Refused:
        """An answer that is not to be taken: nothing more is said to that agent."""
        self.link.kill()
        return Refused(text, "answer")
