"""The process that holds a row's artifacts: opens them, runs the programs and the timing, writes what it saw.

Run by the agent as `agent.pyz --child FOLDER`. FOLDER holds the job's files and job.json; it leaves opened.json,
observations/{program}.npz, those of a part beside `decode` in a folder of its name, and, last, result.json. Where it
is stands in the marker. Python 3.9, numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgate.board import parts, printed
from kvgate.board.files import error_kind
from kvgate.board.jobs import JOB, MARKER, OPENED, OUTPUTS, PROBE, RESULT, finding
from kvgate.board.marker import Marker
from kvgate.contract import PREFILL

_PROGRESS = re.compile(r"(\w+) (\d+)/(\d+)")


class _Failure(Exception):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


def main(folder: Path) -> int:
    """Returns 0 wherever it could write a result."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no orphan holds the NPU
    if os.getppid() != parent:
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no gigabyte behind
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # this one, not the agent
    _flush_lines()
    child = Child(folder)
    try:
        child.run()
        child.write(RESULT, {"ok": True, "phase": "done", "reason": ""})
    except Exception as error:
        child.write(RESULT, child.failure(error))
    child.marker.set("close")
    child.close()
    return 0


class Child:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        self.marker = Marker(folder / MARKER)
        self.text = printed.Text()
        self.engines: Any = None  # opened.Engines
        self.engine: Any = None  # of `decode`
        self.findings: list[dict[str, Any]] = []
        self.ledger: dict[str, Any] | None = None

    def run(self) -> None:
        self.marker.set("import")
        from kvgate.board.opened import Engines

        row = parts.read(self.folder, self.job)
        self.engines = Engines(self.job, self.folder, row)
        self._open()
        self.engine = self.engines.decode
        if PROBE in self.job["files"]:
            self._probe()
        else:
            self._programs(row.whole.contract)

    def failure(self, error: Exception) -> dict[str, Any]:
        """The result of an error: its finding comes first."""
        traceback.print_exc()
        place = self.marker.get()
        kind = getattr(error, "kind", "") or _kind(error)
        text = getattr(error, "text", "") or ": ".join(filter(None, (type(error).__name__, str(error))))
        told = finding(kind, " ".join(text.split())[:500], place)
        self.findings.insert(0, told)
        return {"ok": False, "phase": place.phase, "reason": told["text"]}

    def write(self, name: str, body: dict[str, Any]) -> None:
        """Whole or not at all."""
        part = self.folder / (name + ".part")
        part.write_text(json.dumps({**body, "findings": self.findings, "ledger": self.ledger}), encoding="utf-8")
        part.replace(self.folder / name)

    def close(self) -> None:
        if self.engines is not None:
            self.engines.close()

    def _probe(self) -> None:
        """The feeds of the file, [n, *shape] each: n steps without a host half."""
        import numpy as np

        with np.load(self.folder / PROBE) as file:
            feeds = dict(file)
        count = len(next(iter(feeds.values())))
        found: dict[str, list[Any]] = {}
        for n in range(count):
            self.marker.set("probe {}/{}".format(n + 1, count))
            for name, array in self.engine.step({name: array[n] for name, array in feeds.items()}).items():
                found.setdefault(name, []).append(array.copy())
            self._heed()
        self._save(self.folder / OUTPUTS, {name: np.stack(arrays) for name, arrays in found.items()})

    def _programs(self, contract: Any) -> None:
        from kvgate import observe
        from kvgate.board import ledger

        host = self._host(contract)
        names = self.job["programs"]
        traces = {name: observe.Trace.load(str(self.folder / "trace" / (name + ".npz"))) for name in names}
        self.marker.set("first inference")
        host.reset()
        self.engine.step(host.feeds([int(next(iter(traces.values())).tokens[0])]))
        self._heed()
        first_token = None
        for name, trace in traces.items():
            timed, isolated = self._program(name, trace, host, self.engine)
            if first_token is None and trace.prompt < len(trace.tokens):
                first_token = ledger.first_token(timed, isolated, trace.prompt)
        longest = max(traces.values(), key=lambda x: len(x.tokens))
        timing = self._timing(longest.tokens.tolist(), host, contract)
        halves = self._parts(traces, host)
        spoken = next((x for x in traces.values() if x.prompt < len(x.tokens)), None)
        if PREFILL in halves and spoken:
            first_token = self._first_token(spoken.tokens[: spoken.prompt].tolist(), host, *halves[PREFILL])
        timing.update(self._layers(), first_token_us=first_token, peak_rss_bytes=ledger.peak_rss())
        self.ledger = timing

    def _parts(self, traces: dict[str, Any], host: Any) -> dict[str, tuple[Any, Any]]:
        """Observe the programs in the parts beside `decode`; each one's engine and host half."""
        from kvgate.board.opened import beside

        found = {}
        for part, (engine, contract) in self.engines.parts.items():
            found[part] = engine, beside(engine, contract, host)
            for name, trace in traces.items():
                self._program(name, trace, found[part][1], engine, part + "/")
        return found

    def _first_token(self, prompt: Sequence[int], host: Any, engine: Any, chunks: Any) -> float:
        """Microseconds of a prompt as a bundle reads it: in chunks, the last token by `decode`."""
        from kvgate.board.ledger import Timed

        one, many = Timed(self.engine, host, after=self._heed), Timed(engine, chunks, after=self._heed)
        for half in (host, chunks):
            if hasattr(half, "observes"):
                half.observes = False
        host.reset()
        at = 0
        while at < len(prompt):
            size = parts.chunk(len(prompt) - at, chunks.contract.tokens)
            self.marker.set("first token {}/{}".format(at + size, len(prompt)))
            timed = many if size > 1 else one
            timed.take(timed.step(timed.feeds(prompt[at : at + size])), size)
            at += size
        return round(float(one.totals().sum() + many.totals().sum()), 1)

    def _host(self, contract: Any) -> Any:
        import numpy as np

        half = importlib.import_module("kvgate.strategies.{}.host".format(contract.strategy)).Host
        with np.load(self.folder / "host.npz") as file:
            tables = dict(file)
        mask = float(self.job["mask"])
        make = getattr(self.engine, "host", None)
        return half(contract, tables, mask) if make is None else make(half, tables, mask)

    def _open(self) -> None:
        """Versions and findings are on disk before the first inference, which may be the last."""
        opened = self.engines.open(self.marker.set)
        self.findings += opened.get("findings", [])
        place = self.marker.get()
        for line in self.text.errors():
            if printed.SUBMIT.search(line):
                raise _Failure("failed_to_submit", line)
            self.findings.append(finding("error_line", line, place))
        self.write(OPENED, {"versions": opened.get("versions", {}), "core_mask": opened.get("core_mask")})

    def _heed(self) -> None:
        """The runtime may print an error and go on. Raises where it did so in this step."""
        lines = self.text.errors()
        if not lines:
            return
        submit = next((x for x in lines if printed.SUBMIT.search(x)), None)
        if submit:
            raise _Failure("failed_to_submit", submit)
        raise _Failure("ignored_run_error", "arrays came back, but the runtime said: {}".format(lines[-1]))

    def _program(self, name: str, trace: Any, host: Any, engine: Any, of: str = "") -> tuple[Any, int]:
        """Observe one program. Returns what was timed, and how many isolated steps come first in it.

        of: `prefill/` of that part.
        """
        from kvgate import observe
        from kvgate.board.ledger import Timed

        histories = observe.histories(host.contract, self.job["programs"][name]["histories"])
        coming = Coming(of + name, histories)
        timed: Any = Timed(engine, host, lambda: self.marker.set(coming.text), self._heed)
        found = observe.observe(timed, timed, trace, histories, int(self.job["isolated"]), coming.passed)
        self.marker.set("saving {}".format(of + name))
        self._save(self.folder / "observations" / (of + name + ".npz"), found)
        return timed, len(found.get("isolated/positions", ()))

    @staticmethod
    def _save(path: Path, arrays: dict[str, Any]) -> None:
        import numpy as np

        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, **arrays)
        path.with_suffix(".part").replace(path)

    def _timing(self, tokens: Sequence[int], host: Any, contract: Any) -> dict[str, Any]:
        """The ledger of a program fed its own tokens, from its begin again where it is too short or the cache full."""
        from kvgate.board import ledger

        warmup, steps = int(self.job["timing"]["warmup"]), int(self.job["timing"]["steps"])
        timed = ledger.Timed(self.engine, host, after=self._heed)
        room = min(len(tokens), contract.cache.capacity)
        if hasattr(host, "observes"):  # a swapped cache need not be read to decode
            host.observes = False
        for n in range(warmup + steps):
            self.marker.set("timing {}/{}".format(n + 1, warmup + steps))
            if n % room == 0:
                host.reset()
            timed.take(timed.step(timed.feeds([tokens[n % room]])))
        return ledger.summary(timed, contract, warmup)

    def _layers(self) -> dict[str, Any]:
        from kvgate.board import ledger

        ask = getattr(self.engine, "layers", None)
        if not self.job.get("perf") or ask is None:
            why = "not asked for" if ask is not None else "engine {} has no layer table".format(self.job["engine"])
            return ledger.layers(None, why)
        self.marker.set("perf")
        try:
            return ledger.layers(ask(), "the runtime gave no table")
        except Exception as error:
            traceback.print_exc()
            return ledger.layers(None, "{}: {}".format(type(error).__name__, error))


class Coming:
    """The next step of a program, from the progress of its steps so far: `capital forced 5/20`."""

    def __init__(self, program: str, histories: Sequence[str]) -> None:
        self._program = program
        self.text = "{} {} 1/1".format(program, "isolated" if "isolated" in histories else "forced")

    def passed(self, text: str) -> None:
        """text: what `observe` says after a step, e.g. `forced 4/20`."""
        match = _PROGRESS.fullmatch(text)
        if match is None:
            return
        history, number, count = match.group(1), int(match.group(2)), int(match.group(3))
        if number == count:
            history, number, count = {"isolated": "forced", "forced": "free"}.get(history, history), 0, 1
        self.text = "{} {} {}/{}".format(self._program, history, number + 1, max(count, number + 1))


def _kind(error: Exception) -> str:
    if isinstance(error, OSError):
        return error_kind(error)
    known = ((MemoryError, "memory"), (ImportError, "engine_missing"), (ValueError, "contract"))
    return next((kind for type_, kind in known if isinstance(error, type_)), "exit")


def _flush_lines() -> None:
    """Write what is printed line by line, Python's and the libraries': a crash then loses none."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(ValueError):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)  # _IOLBF
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
