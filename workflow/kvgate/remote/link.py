"""The process and the pipes behind a session: starting the agent, frames with time limits, why it all ended.

Every wait has a limit, at whose end the local process (ssh, adb, or the agent itself) is killed: that ends a blocked
read or write. Exit codes prove nothing, so the end of the stream is explained from code, text and place together.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, BinaryIO, cast
from zlib import compress

from kvgate.board import wire
from kvgate.jobs import record
from kvgate.remote import drivers

BANNER = 1 << 16  # bytes that a login may print before the marker
_KEPT = 1 << 14  # bytes of the end of stderr

# Runs on the board with the words WORK SHA256 SIZE, on whatever Python that is: takes the agent in where it is not
# there yet, and becomes it. Written to its whole name only after its checksum is right. What it says begins with that
# checksum, as a greeting could begin with KVGATE.
BOOT = r"""
import errno, hashlib, os, sys
def say(text):
    os.write(1, ("\nKVGATE " + sys.argv[2] + " " + text + "\n").encode())
def boot(work, sha, size):
    if sys.version_info < (3, 9):
        return "python Python %d.%d, allowed: 3.9 or newer" % sys.version_info[:2]
    import importlib.util
    if importlib.util.find_spec("numpy") is None:
        return "python " + sys.executable + " has no numpy"
    work = os.path.expanduser(work)
    path = os.path.join(work, "agent", sha + ".pyz")
    os.umask(0o077)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path, "rb") as file:
            there = hashlib.sha256(file.read()).hexdigest() == sha
    except FileNotFoundError:
        there = False
    if not there:
        say("need")
        data = b""
        while len(data) < size:
            part = os.read(0, size - len(data))
            if not part:
                return "closed"
            data += part
        if hashlib.sha256(data).hexdigest() != sha:
            return "checksum of the agent is not " + sha
        part = path + "." + str(os.getpid()) + ".part"
        try:
            with open(part, "wb") as file:
                file.write(data)
            os.rename(part, path)
        finally:
            if os.path.exists(part):
                os.remove(part)
    say("have")
    os.execv(sys.executable, [sys.executable, "-u", path, work])
try:
    say("cannot " + boot(sys.argv[1], sys.argv[2], int(sys.argv[3])))
except OSError as error:
    kind = {errno.ENOSPC: "no_space", errno.EDQUOT: "no_space", errno.EACCES: "permission", errno.EROFS: "permission"}
    say("cannot " + kind.get(error.errno, "io") + " " + str(error))
sys.exit(3)
"""


# The same as one plain word: csh and tcsh, which may be the login shell, take no line break in quotes, and no "!".
_PACKED = b64encode(compress(BOOT.encode())).decode()
WORD = f'exec(__import__("zlib").decompress(__import__("base64").b64decode("{_PACKED}")))'


class Trouble(Exception):
    """A board could not do what it was asked. again: that says nothing of the row, the next run asks it again."""

    again = False

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(reason)
        self.reason, self.kind = reason, kind

    def blocked(self, **facts: Any) -> record.Blocked:
        """As the record of a stage."""
        facts |= {"again": True} if self.again or self.kind == "no_space" else {}
        return record.Blocked(self.reason, [record.finding(self.kind, self.reason)], **facts)


class Lost(Trouble):
    """The transport failed: nothing is known of the board but that. kind: connect, lost, timeout or garbled."""

    again = True


class Refused(Trouble):
    """The board answered and cannot, or its answer is not to be taken (kind `answer`)."""


@dataclass(frozen=True)
class Limits:
    """Seconds without an answer after which the board counts as lost."""

    connect: float = 40  # login, and the start of Python on a slow board
    answer: float = 60
    chunk: float = 60  # a MiB sent: the slowest link that is waited for has 17 kB/s
    end: float = 5
    check: float = 1e-7  # a byte of a file, for the board to check it: 10 MB/s


class Link:
    """Frames to and from an agent. Raises Lost and Refused."""

    def __init__(self, board: Mapping[str, Any], agent: bytes, seconds: float, limits: Limits) -> None:
        """board: a checked entry of boards.yaml. agent: the zip app. seconds: for everything."""
        self.board, self.agent, self.limits = dict(board), agent, limits
        self._sha = hashlib.sha256(agent).hexdigest()
        self.driver = drivers.of(self.board)
        self.where = ""  # what the agent last said that it does
        self._end = time.monotonic() + seconds
        self._expired = ""  # what a limit ended
        self._frames = False  # the agent runs
        self._stderr = bytearray()

    def open(self) -> None:
        self._start()
        try:
            self._boot()
        except BaseException:
            self.kill()
            self.close()
            raise

    def send(self, head: dict[str, Any], blob: bytes = b"") -> None:
        with self._within(self.limits.chunk, "room for a frame"):
            try:
                wire.send(self._in, head, blob)
            except (wire.Closed, OSError):
                raise self._lost() from None

    def _write(self, data: bytes, seconds: float) -> None:
        with self._within(seconds, "room for the agent"):
            try:
                self._in.write(data)
                self._in.flush()
            except OSError:
                raise self._lost() from None

    def receive(self, what: str, seconds: float) -> tuple[dict[str, Any], bytes]:
        with self._within(seconds, what):
            try:
                return wire.receive(self._out)
            except wire.Closed:
                raise self._lost() from None
            except (wire.Garbled, RecursionError) as why:
                raise Lost(f"what came from the board is no frame: {drivers.clean(why, 160)}", "garbled") from None

    def speaks(self) -> bool:
        """Whether the agent has something to say though it was not asked: it cannot take more."""
        return bool(select.select([self._out], [], [], 0)[0])

    def _start(self) -> None:
        remote = [self.board["python"], "-c", WORD, self.board["work"], self._sha, str(len(self.agent))]
        try:
            command = self.driver.command(self.board, remote)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # no terminal to ask on, and helpers of ssh end with it
                env=os.environ | {"SSH_ASKPASS_REQUIRE": "never"},
            )
        except ValueError as why:
            raise Refused(drivers.clean(why), "driver") from None
        except OSError as why:
            raise Refused(f"{drivers.clean(why.filename, 80)}: {why.strerror}", "driver") from None
        self._in = cast(BinaryIO, self._process.stdin)
        self._out = cast(BinaryIO, self._process.stdout)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        with cast(BufferedReader, self._process.stderr) as stream:
            for part in iter(lambda: stream.read1(4096), b""):
                self._stderr += part
                del self._stderr[:-_KEPT]

    def _boot(self) -> None:
        if self._marker() == "need":
            self._write(self.agent, self.limits.connect)
            if self._marker() == "need":
                raise Lost("the board asks for the agent twice", "garbled")
        self._frames = True

    def _marker(self) -> str:
        """`have` or `need`: of the next line that begins with KVGATE and the agent's checksum; logins print too."""
        left = BANNER
        with self._within(self.limits.connect, "the start of Python on the board"):
            while left > 0:
                line = self._out.readline(left)
                if not line:
                    raise self._lost()
                left -= len(line)
                word, _, text = line.decode(errors="replace").partition(f" {self._sha} ")
                if word == "KVGATE":
                    kind, _, text = text.strip().partition(" ")
                    if kind in ("have", "need"):
                        return kind
                    kind, _, text = text.partition(" ")
                    raise Refused(f"the board cannot take the agent: {drivers.clean(text)}", drivers.clean(kind, 20))
        raise Lost(f"the board printed {BANNER >> 10} KiB that are no answer; is its login quiet?", "garbled")

    def kill(self) -> None:
        if self._process.poll() is None:  # else its id may be another's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes and wait for the process, which then ends by itself, or is ended."""
        self._in.raw.close()  # type: ignore[attr-defined]  # without the flush that a dead link would block
        self._out.close()
        try:
            self._process.wait(self.limits.end)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._listener.join(1)

    @contextmanager
    def _within(self, seconds: float, what: str) -> Iterator[None]:
        """Whatever is read or written inside ends after `seconds`, or at the session's end."""
        left = self._end - time.monotonic()
        if left <= 0:  # a timer could be outrun by a board that never stops talking
            self._expire("the end of it all in time")
            raise self._lost()
        seconds = min(seconds, left)
        timer = threading.Timer(seconds, self._expire, (f"{what} within {seconds:.0f} s",))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self, what: str) -> None:
        self._expired = what
        self.kill()

    def _lost(self) -> Lost | Refused:
        """The stream has ended: why, from the process's end and its text."""
        try:
            code = self._process.wait(self.limits.end)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._listener.join(1)
        where = f" at {self.where}" if self.where else ""
        if self._expired:
            return Lost(f"lost{where}: waited in vain for {self._expired}", "timeout")
        text = self._stderr.decode(errors="replace")
        why = self.driver.explain(code, text)
        if self._frames:
            return Lost(f"lost{where} before the agent's last message: {why}", "lost")
        if code in (126, 127):
            return Refused(f"no Python {self.board['python']!r} on the board: {drivers.last(text)}", "python")
        return Lost(f"no connection: {why}", "connect")
