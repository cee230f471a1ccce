"""Start the toolkit's child process, watch it, and say how it ended. Standard library only."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from kvgate.compiler import log, platforms
from kvgate.compiler.request import TUNABLES, Request
from kvgate.jobs import cpu, machine
from kvgate.jobs.record import Blocked, finding

# What a process does to itself; other signals come from somebody, or from the machine.
_OWN = (signal.SIGABRT, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
CHILD = (sys.executable, "-m", "kvgate.compiler.child")
_AVX512 = "AVX512F AVX512CD AVX512_KNL AVX512_KNM AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL"  # numpy's beyond AVX2


@dataclass(frozen=True)
class Outcome:
    """How a child ended. reason is empty where all went well; seconds by phase (wall); peak in bytes."""

    reason: str
    kind: str = ""  # `refused`, `gate`, `crash`, `hang`; of the machine's: `memory`, `disk`, `signal`
    findings: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    peak: int = 0

    def blocked(self, what: str = "") -> Blocked:
        """As the record of a stage; what lies in the machine is taken up again by the next run. what: goes before."""
        again = {"again": True} if self.kind in ("memory", "disk", "signal") else {}
        return Blocked(f"{what}{self.reason}", self.findings, **again)


def version() -> str:
    """The installed toolkit's. Raises importlib.metadata.PackageNotFoundError where there is none."""
    return metadata.version(platforms.TOOLKIT)


def compile(
    request: Request,
    folder: Path,
    log_file: Path,
    timeout: float,
    progress: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    command: tuple[str, ...] = CHILD,
) -> Outcome:
    """Run a request in a child process with `folder` as its current one, everything that it prints in `log_file`.

    timeout: seconds for the whole child. progress gets one line a phase, and one every few seconds while simulating.
    Raises RuntimeError where it is kvgate's own code in the child that failed.
    """
    folder = folder.resolve()  # it is the child's HOME and TMPDIR, and the child works in it
    reader, writer = os.pipe()
    asked = replace(request, parent=os.getpid(), progress=writer)
    path = folder / "request.json"
    path.write_text(json.dumps(asdict(asked)), encoding="utf-8")
    started = time.monotonic()
    with log_file.open("wb") as out:
        process = subprocess.Popen(
            [*command, str(path)],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            start_new_session=True,  # so that all that it starts can be killed with it
        )
        os.close(writer)
        try:
            last = _relay(reader, process, started, timeout, progress)
        finally:
            os.close(reader)
            hung = process.poll() is None
            _kill(process)
    text = log_file.read_text(errors="replace", encoding="utf-8")
    outcome = _outcome(Path(request.result), process.returncode, last if hung else "", timeout, text, folder)
    return replace(outcome, findings=outcome.findings + log.findings(text))


def environment(folder: Path) -> dict[str, str]:
    """The child's whole environment: what is not in it cannot change the artifact's bytes."""
    package = Path(__file__).parents[2]
    fixed = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(package),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "GLIBC_TUNABLES": TUNABLES,
        "RKNN_LOG_LEVEL": "4",  # the compiler's layer table
    }
    # OpenBLAS and numpy pick their kernels by the CPU, and they round differently: w8a8 and w16a16i_dfp bytes would be
    # the CPU's. ONNX Runtime cannot be told.
    return fixed | {"NPY_DISABLE_CPU_FEATURES": _AVX512} | ({"OPENBLAS_CORETYPE": "Haswell"} if portable() else {})


def portable() -> bool:
    """Whether this CPU can run the kernels that the bytes of quantized artifacts are made with (AVX2)."""
    return "avx2" in cpu.flags()


def _relay(
    reader: int, process: subprocess.Popen, started: float, timeout: float, progress: Callable[[str], None]
) -> str:
    """Pass the child's progress on until it ends or its time is over. Returns its last line."""
    waiting, last, said, phase = b"", "start", 0.0, ""
    while True:
        left = started + timeout - time.monotonic()
        if left <= 0:
            return last
        if not select.select([reader], [], [], min(left, 1.0))[0]:
            if process.poll() is not None:
                return last
            continue
        data = os.read(reader, 65536)
        if not data:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(left, 0.0))
            return last
        *lines, waiting = (waiting + data).split(b"\n")
        for line in lines:
            last = line.decode(errors="replace")
            now = time.monotonic()
            if last.split()[0] != phase or now - said > 5:
                phase, said = last.split()[0], now
                progress(f"{now - started:6.1f} s  {last}")


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(path: Path, code: int, hung: str, timeout: float, text: str, folder: Path) -> Outcome:
    result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if result.get("bug"):
        raise RuntimeError(f"in phase {result['phase']}: {result['bug']}")
    error = log.last_error(text)
    if hung:
        reason, kind = f"no end after {timeout:.0f} s, in phase {hung!r}", "hang"
    elif not result:
        reason, kind = _ended(code, text, error)
    elif result["reason"]:
        reason, kind = result["reason"], "refused"
        if machine.memory(reason):
            reason, kind = f"out of memory: {reason}", "memory"
        # A return code says nothing, and the simulator returns None: the log's last error line has the cause.
        if error and ("returned -" in reason or "no outputs" in reason):
            reason += f": {error}"
        blamed = log.rule(text)
        if blamed:  # `disable_rules` in the quant's config may leave it out
            reason += f", in {blamed}"
    else:
        gates = result["facts"].get("gates", [])
        reason, kind = (gates[0]["text"], "gate") if gates else ("", "")
        return Outcome(reason, kind, gates, result["seconds"], result["peak"])
    # What it wrote still fills the disk: the caller has not removed it yet.
    disk = machine.disk(f"{reason}\n{error}" if result else text, folder) or machine.full(folder)
    if disk and not hung:
        reason, kind = disk, "disk"
    else:
        reason = log.bare(reason)
    found = [finding(kind, reason)]
    return Outcome(reason, kind, found, result.get("seconds", {}), result.get("peak", 0))


def _ended(code: int, text: str, error: str) -> tuple[str, str]:
    """Reason and kind of a child that left no result."""
    last = f"; its last error: {error}" if error else ""
    if code == -signal.SIGKILL:
        return f"the toolkit's process was killed by signal 9, as the kernel does when memory runs out{last}", "memory"
    if machine.memory(text):
        return f"the toolkit's process ran out of memory{last}", "memory"
    if code < 0:
        name = signal.Signals(-code).name
        if -code not in _OWN:
            return f"the toolkit's process was ended by signal {-code} ({name})", "signal"
        return f"the toolkit's process crashed with signal {-code} ({name}){last}", "crash"
    return f"the toolkit's process ended with code {code} and no result{last}", "crash"


def scratch(folder: Path, name: str = ".work") -> Path:
    """A fresh folder for a child below `folder`; what a killed run left there is removed first."""
    path = folder / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
