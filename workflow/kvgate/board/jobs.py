"""One job on the board: refused before anything is loaded, or run in a child that is watched, and its end explained.

Standard library only, Python 3.9: what watches stays small and alive whatever the runtime does to the child.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

from kvgate.board import environment, files, parts, printed, wire
from kvgate.board.marker import Marker, Place

RESULT, OPENED, STDERR = "result.json", "opened.json", "stderr.txt"
MARKER, JOB = "marker", "job.json"
_OWN = (RESULT, OPENED, STDERR, MARKER, JOB)
PROBE, OUTPUTS = "feeds.npz", "outputs.npz"  # a job with feeds of its own, and what they gave
_OLDEST_DRIVER = (0, 9, 8)  # below it the driver is known for jobs that it fails to submit
_TICK = 0.2  # seconds between looks at the child
_SPEAK = 0.5  # seconds between messages of progress
_DIE = 10.0  # seconds until a killed child must be gone
_TAIL = 4000  # characters of the runtime's text in the status


class Work:
    """Runs one job. Its status is the body of the row's record; see `_status`."""

    def __init__(
        self, folder: Path, store: files.Store, clocks: environment.Clocks, command: list[str], root: Path
    ) -> None:
        self.folder, self.store, self.clocks, self.command, self.root = folder, store, clocks, command, root
        self.child: _Child | None = None
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        self.findings: list[dict[str, Any]] = []
        self.toolkit = ""  # that made the artifact

    @contextlib.contextmanager
    def folder_of(self, job: dict[str, Any]) -> Iterator[Path]:
        """A fresh folder with the job's files under their names, removed at the end."""
        folder = self.folder / secrets.token_hex(8)
        folder.mkdir(mode=0o700, parents=True)
        self.job_folder = folder
        try:
            for name, sha in job["files"].items():
                if name in _OWN:
                    raise files.FileError("io", "file name: got {!r}, which is the agent's own".format(name))
                self.store.link(sha, folder / files.safe_name(name))
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run(
        self, job: dict[str, Any], folder: Path, inlet: Any, progress: Callable[[str, str], None]
    ) -> dict[str, Any]:
        """Returns the status. Raises wire.Closed where the host is gone; the child is dead then."""
        self.before = environment.record(self.root)
        refusal = self._refusal(job, folder)
        if refusal:
            return self._status("check", refusal["text"], [refusal])
        try:
            if job["clocks"] == "pin":
                self.told_clocks(self.clocks.pin())
                changed = environment.state(self.root)
                self.before = {**self.before, **changed, "why": {**self.before["why"], **changed["why"]}}
            outcome = self._attend(job, folder, inlet, progress)
        finally:
            self.told_clocks(self.clocks.restore())
        return self._status(*outcome)

    def interrupted(self, why: str) -> dict[str, Any]:
        """The status of a job that the agent's own end cut short."""
        place = self.child.place if self.child else Place(0, "check")
        end = finding("deadline" if why.startswith("deadline") else "signal", why, place)
        return self._status(place.phase, end["text"], [end])

    def _attend(
        self, job: dict[str, Any], folder: Path, inlet: Any, progress: Callable[[str, str], None]
    ) -> tuple[Any, ...]:
        """What `_status` takes."""
        (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
        kills = environment.oom_kills(self.root)
        self.child = child = _Child(self.command, folder)
        try:
            hang = child.watch(job["seconds"], inlet, progress)
        finally:
            child.kill()
            self.after = environment.state(self.root)
        place, result = child.place, _json(folder / RESULT)
        death = [hang] if hang else []
        if not hang and child.code != 0:
            more = environment.oom_kills(self.root)
            death = [_death(child.code, place, kills is not None and more is not None and more > kills)]
        elif not hang and not result:
            death = [finding("exit", "the child ended without a result", place)]
        if not result:
            death += self._last_lines(folder, place)
            return place.phase, death[0]["text"], death
        # A death after the result loses nothing, but it is told.
        return result["phase"], result["reason"], result["findings"] + death, result

    def _status(
        self, phase: str, reason: str, findings: list[dict[str, Any]], result: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """`exit` and `signal` are the child's; `files` are results by name, with their sha256."""
        folder, code = self.job_folder, self.child.code if self.child else None
        opened = _json(folder / OPENED) or {}
        known = {name: self.before.get(name) for name in ("runtime", "driver", "toolkit_lite", "numpy", "python")}
        versions = {**known, **opened.get("versions", {}), "toolkit": self.toolkit}
        # The runtime's layer table as printed goes along: a first board may show one that our parser does not know.
        names = ("observations/*.npz", "observations/*/*.npz", OUTPUTS, "layers.txt")
        found = [path for name in names for path in sorted(folder.glob(name))]
        # Those of the child's opening are in a result too; they stand here for a child that wrote none.
        told = findings if result else findings + opened.get("findings", [])
        return {
            "ok": not reason,
            "phase": phase,
            "reason": reason,
            "findings": told + self.findings + _versions(versions),
            "exit": code if code is not None and code >= 0 else None,
            "signal": _signal(code) if code is not None and code < 0 else None,
            "core_mask": opened.get("core_mask"),
            "ledger": (result or {}).get("ledger"),
            "environment": {"before": self.before, "after": self.after},
            "versions": versions,
            "files": {str(path.relative_to(folder)): files.sha256(path) for path in found if path.stat().st_size},
            "stderr_tail": _text(folder)[-_TAIL:],
        }

    def told_clocks(self, problems: list[str]) -> None:
        self.findings += [{"kind": "clocks", "text": text} for text in problems]

    def _refusal(self, job: dict[str, Any], folder: Path) -> dict[str, Any] | None:
        """Why this job must not run here, before anything is loaded or taken."""
        if job["engine"] not in environment.ENGINES or util.find_spec(environment.ENGINES[job["engine"]]) is None:
            return _refused("engine_missing", "engine: got {!r}, not in this agent".format(job["engine"]))
        try:
            row = parts.read(folder, job)
        except parts.Unfit as error:
            return _refused("contract", str(error))
        strategy = row.whole.contract.strategy
        if PROBE not in job["files"] and not _has_strategy(strategy):
            return _refused("contract", "strategy: got {!r}, not in this agent".format(strategy))
        if job["engine"] != "onnxruntime":
            refusal = self._board_refusal(job)
            for artifact in row.artifacts():
                refusal = refusal or self._artifact_refusal(job, folder, artifact)
            if refusal:
                return refusal
        free = environment.available(self.root)
        if free is not None and job["memory_bytes"] > free:
            text = "memory: needs {:.0f} MiB, {:.0f} MiB available".format(job["memory_bytes"] / 2**20, free / 2**20)
            return _refused("memory", text)
        return None

    def _board_refusal(self, job: dict[str, Any]) -> dict[str, Any] | None:
        names = self.before["compatible"]
        if names is None or "rockchip,{}".format(job["platform"]) not in names:
            got = self.before["why"]["compatible"] if names is None else ", ".join(names)
            return _refused("platform", "board: got {}, allowed: rockchip,{}".format(got, job["platform"]))
        return None

    def _artifact_refusal(self, job: dict[str, Any], folder: Path, of: parts.Artifact) -> dict[str, Any] | None:
        """The artifact's own contract says what it was made of, and its custom string that it is that artifact."""
        name = of.named(parts.ARTIFACT)
        try:
            artifact = json.loads((folder / name).read_text(encoding="utf-8"))
            identity, custom = artifact["identity"], artifact["custom_string"]
            wanted = {"graph": of.told["contract_digest"], "platform": job["platform"]}
            self.toolkit = str(identity["toolkit"])
            parts.hold_boundary(of, artifact)
        except parts.Unfit as error:
            return _refused("contract", str(error))
        except (OSError, ValueError, KeyError, TypeError) as error:
            return _refused("contract", "{}: {}: {}".format(name, type(error).__name__, error))
        whose = "{}: artifact's".format(of.folder) if of.folder else "artifact's"
        for field, value in wanted.items():
            if identity.get(field) != value:
                kind = "platform" if field == "platform" else "contract"
                text = "{} {}: got {!r}, allowed: {!r}".format(whose, field, identity.get(field), value)
                return _refused(kind, text)
        if custom != of.told["custom_string"]:
            text = "{} custom string: got {!r}, allowed: {!r}".format(whose, custom, of.told["custom_string"])
            return _refused("contract", text)
        if not _holds(folder / of.named("model.rknn"), custom.encode()):
            return _refused("contract", "{}: has no custom string {!r}".format(of.named("model.rknn"), custom))
        return None

    @staticmethod
    def _last_lines(folder: Path, place: Place) -> list[dict[str, Any]]:
        """What the runtime said before the child died and could tell it itself."""
        lines = [x for x in _text(folder).splitlines() if printed.SUBMIT.search(x)]
        return [finding("failed_to_submit", lines[-1].strip()[:300], place)] if lines else []


class _Child:
    """The process that holds the artifact: in a session of its own, its text in a file, its place in a marker."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.marker = Marker(folder / MARKER, create=True)
        self.marker.set("start")
        self.end, end = os.pipe()  # nobody writes: it ends when the child does
        try:
            with (folder / STDERR).open("ab") as text:
                self.process = subprocess.Popen(
                    [*command, str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=text,
                    stderr=text,
                    pass_fds=(end,),
                    start_new_session=True,
                    cwd=str(folder),
                )
        finally:
            os.close(end)

    @property
    def place(self) -> Place:
        return self.marker.get()

    @property
    def code(self) -> int:
        """The exit code, or minus the signal's number."""
        return self.process.returncode if self.process.returncode is not None else -int(signal.SIGKILL)

    def watch(
        self, seconds: dict[str, float], inlet: Any, progress: Callable[[str, str], None]
    ) -> dict[str, Any] | None:
        """Until the child ended by itself (None) or hangs (the finding). seconds: limits of `load` and `step`."""
        last, since, spoken = self.place, time.monotonic(), (0.0, "")
        while True:
            ready = select.select([inlet, self.end], [], [], _TICK)[0]
            if self.end in ready:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_DIE)
                return None
            if inlet in ready:
                _heed(inlet)
            place, now = self.place, time.monotonic()
            if place.changes != last.changes:
                last, since = place, now
            limit = seconds["step" if place.step is not None or place.phase == "first inference" else "load"]
            if now - since > limit:
                return finding("hang", "no sign of life for {:g} s".format(limit), place)
            if place.text != spoken[1] and now - spoken[0] >= _SPEAK:
                progress(place.phase, place.text)
                spoken = (now, place.text)

    def kill(self) -> None:
        """End the child and all that it started. A process stuck inside the driver may outlive this."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_DIE)
        with contextlib.suppress(OSError):
            os.close(self.end)


def _heed(inlet: Any) -> None:
    """While a job runs the host has nothing to say but that it is gone."""
    head, _ = wire.receive(inlet)
    raise wire.Closed("got {!r} during a job".format(head["type"]))


def finding(kind: str, text: str, place: Place) -> dict[str, Any]:
    """What happened, and where: the text says it too."""
    if place.step is None:
        return {"kind": kind, "text": "{} in {}".format(text, place.phase), "phase": place.phase}
    text = "{} in {}, step {}".format(text, place.phase, place.step)
    return {"kind": kind, "text": text, "phase": place.phase, "step": place.step}


def _refused(kind: str, text: str) -> dict[str, Any]:
    return {"kind": kind, "text": text, "phase": "check"}


def _death(code: int, place: Place, oom: bool) -> dict[str, Any]:
    """code: the exit code, or minus the signal's number. oom: the kernel killed a process for memory meanwhile."""
    if code >= 0:
        return finding("exit", "the child ended with code {}".format(code), place)
    if code == -signal.SIGSEGV:
        return finding("segfault", "segmentation fault", place)
    if code == -signal.SIGKILL and oom:
        return finding("oom_killed", "killed by the kernel for lack of memory", place)
    return finding("signal", "the child was ended by {}".format(_signal(code)), place)


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return "signal {}".format(-code)


def _versions(versions: dict[str, Any]) -> list[dict[str, Any]]:
    """Versions that are known not to go together."""
    runtime = versions.get("runtime")
    pairs = ((versions.get("toolkit"), "the artifact's toolkit"), (versions.get("toolkit_lite"), "toolkit-lite"))
    texts = [environment.versions_differ(runtime, other, what) for other, what in pairs]
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", versions.get("driver") or "")
    if numbers and tuple(map(int, numbers.groups())) < _OLDEST_DRIVER:
        allowed = ".".join(map(str, _OLDEST_DRIVER))
        texts.append("driver: got version {}, allowed: {} and newer".format(numbers.group(0), allowed))
    return [{"kind": "version_mismatch", "text": text} for text in texts if text]


def _has_strategy(name: str) -> bool:
    if not re.fullmatch(r"[a-z0-9_]+", name):
        return False
    try:
        return util.find_spec("kvgate.strategies.{}.host".format(name)) is not None
    except ModuleNotFoundError:
        return False


def _holds(path: Path, text: bytes) -> bool:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(text) >= 0
    except (OSError, ValueError):  # an empty file cannot be mapped
        return False


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _text(folder: Path) -> str:
    """The end of what the child and its libraries printed, without colours."""
    try:
        with (folder / STDERR).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            return printed.plain(file.read().decode(errors="replace"))
    except OSError:
        return ""
