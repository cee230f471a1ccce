"""The toolkit in a process of its own: compile one graph, then simulate its programs (only the builder can).

Run as `python -m kvgate.compiler.child request.json` by kvgate.compiler.toolkit, which sets the environment. It
prints the toolkit's log to stdout and stderr, and one line of progress a step to the descriptor in the request.
The request and the result are JSON; see `Request` and `main`.
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvgate.compiler.request import TUNABLES, Failure, Request

R = TypeVar("R", bound=Request)


class Run:
    """Phases of a run: their seconds (wall), and where it is now."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.phase, self.seconds = descriptor, "import", {}  # type: int, str, dict[str, float]

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        self.phase = phase
        self.say(phase)
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = round(time.monotonic() - started, 3)

    def say(self, text: str) -> None:
        os.write(self.descriptor, f"{text}\n".encode())


def main(path: str, kind: type[R], work: Callable[[R, Run], dict[str, Any]]) -> None:
    """Writes {"phase", "reason", "bug", "seconds", "peak", "facts"}; peak in bytes. Exit code 0 if it wrote it.

    kind: the request's class. work: gives the facts; raises Failure where the toolkit did not do it. What else it
    raises, as on a full disk, is `bug`: no result of the build, which may be right the next time.
    """
    request = kind(**json.loads(Path(path).read_text(encoding="utf-8")))
    _die_with(request.parent)
    _flush_lines()
    if request.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (request.memory, request.memory))
    run, reason, bug, facts = Run(request.progress), "", "", {}  # type: Run, str, str, dict[str, Any]
    try:
        _prove_malloc()
        facts = work(request, run)
    except Failure as error:
        reason = str(error)
    except MemoryError:
        reason = "MemoryError"
    except Exception as error:
        traceback.print_exc()  # into the log
        bug = f"{type(error).__name__}: {error}"
    result = {
        "phase": run.phase,
        "reason": reason,
        "bug": bug,
        "seconds": run.seconds,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "facts": facts,
    }
    part = Path(request.result + ".part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(request.result)
    # No interpreter shutdown: freeing gigabytes with perturbed memory takes seconds.
    os._exit(0)


def build(request: Request, run: Run) -> dict[str, Any]:
    """Compile, hold the artifact to its contract, run the programs."""
    from kvgate.contract import Contract

    contract = Contract.from_json(Path(request.contract).read_text(encoding="utf-8"))
    toolkit = compiled(request, run)
    from kvgate.compiler import artifact, requirements

    built = artifact.read(Path(request.artifact), digests=False)
    facts: dict[str, Any] = {"gates": requirements.artifact(built, contract, request.dtype)}
    if facts["gates"]:
        return facts  # its indexes are not the contract's: nothing may be fed
    if request.programs:
        _simulate(request, run, toolkit, contract)
    return facts


def _import() -> Any:
    from rknn.api import RKNN

    return RKNN


def opened(request: Request) -> Any:
    """A fresh object of the toolkit with the request's configuration."""
    # Verbose would also write three copies of the graph, weights and all; RKNN_LOG_LEVEL alone prints the table.
    toolkit = _import()(verbose=False)
    arguments = {"target_platform": request.platform, "custom_string": request.custom, **request.config}
    call("config", lambda: toolkit.config(**arguments))
    return toolkit


def compiled(request: Request, run: Run) -> Any:
    """The toolkit's object after export, ready for init_runtime."""
    quantize = {"do_quantization": request.dataset is not None, "dataset": request.dataset}
    with run.of("import"):
        _try("import", _import)
    with run.of("config"):
        toolkit = opened(request)
    with run.of("load"):
        call("load_onnx", lambda: toolkit.load_onnx(model=request.graph))
    with run.of("build"):
        if request.hybrid or request.headroom != 1:
            from kvgate.compiler import hybrid

            toolkit = hybrid.build(request, toolkit, lambda: opened(request), call)
        else:
            call("build", lambda: toolkit.build(**quantize, **request.build))
    with run.of("export"):
        call("export_rknn", lambda: toolkit.export_rknn(request.artifact))
    return toolkit


def _simulate(request: Request, run: Run, toolkit: Any, contract: Any) -> None:
    import importlib

    import numpy as np

    from kvgate.compiler.piece import Piece
    from kvgate.engines import contiguous
    from kvgate.engines.simulator import Engine
    from kvgate.observe import Trace, histories, observe

    calm_malloc()
    contiguous.install(t.name for t in contract.inputs)
    with run.of("init"):
        call("init_runtime", toolkit.init_runtime)
    with run.of("simulate"), np.load(request.tables) as tables:
        half = importlib.import_module(f"kvgate.strategies.{contract.strategy}.host")
        host = half.Host(contract, dict(tables), request.mask)
        engine = Engine(toolkit, contract)
        for name, program in request.programs.items():
            trace = Trace.load(program["trace"])

            def step(text: str, name: str = name) -> None:
                run.say(f"simulate {name} {text}")

            piece = Piece(engine, contract, program.get("given"))
            asked = histories(contract, program["histories"])
            work = partial(observe, piece, host, trace, asked, request.isolated, step)
            found = piece.observed(_try(f"simulate {name}", work))
            path = Path(request.observations) / f"{name}.npz"
            with path.with_suffix(".part").open("wb") as file:
                np.savez(file, **found)
            path.with_suffix(".part").replace(path)


def calm_malloc() -> None:
    """No more filling of fresh and freed memory: the artifact is written, and the simulator allocates a lot."""
    ctypes.CDLL(None).mallopt(-6, 0)  # M_PERTURB


def call(what: str, function: Callable[[], Any]) -> None:
    """A toolkit call that must return 0 (or None, which `config` does)."""
    code = _try(what, function)
    if code not in (0, None):
        raise Failure(f"{what}: returned {code}")


def _try(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise Failure(f"{what}: {_true_error(error)}") from None


def _true_error(error: BaseException) -> str:
    """The toolkit raises ValueError with a whole traceback as its text, whose end is the true error."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    last = next((i for i in reversed(range(len(lines))) if re.match(r"[\w.]+(Error|Exception|Fail)?: ", lines[i])), 0)
    text = " ".join(lines[last:]).removeprefix("ValueError: ")
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however it dies. Linux only."""
    if parent:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _flush_lines() -> None:
    """Write the log line by line, Python's and the compiler's: a crash then loses none, and they do not mix."""
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)  # _IOLBF
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _prove_malloc() -> None:
    """Fresh memory must read as zero, else the compiler writes leftovers of this process into the artifact.

    Raises Failure where the tunables did not take (a wrong name is ignored silently by glibc).
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    for size in (24, 100, 900, 5000, 200_000):
        block = libc.malloc(size)
        ctypes.memset(block, 0xAA, size)
        libc.free(block)
        block = libc.malloc(size)
        dirty = any(ctypes.string_at(block, size))
        libc.free(block)
        if dirty:
            raise Failure(f"malloc: got leftovers in a fresh block of {size} bytes, allowed: GLIBC_TUNABLES={TUNABLES}")


if __name__ == "__main__":
    main(sys.argv[1], Request, build)
