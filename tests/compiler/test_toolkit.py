"""The parent of the toolkit's process, with children that are scripts: every way to end becomes a reason."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kvgate.compiler import child, toolkit
from kvgate.compiler.request import TUNABLES, Request

PRELUDE = """
import json, os, sys, time, signal, resource
request = json.load(open(sys.argv[1]))
def say(text): os.write(request["progress"], (text + "\\n").encode())
def result(**body):
    body = {"phase": "simulate", "reason": "", "seconds": {"build": 1.0}, "peak": 5, "facts": {}, **body}
    json.dump(body, open(request["result"], "w"))
"""


def request(folder: Path) -> Request:
    return Request(
        "g.onnx", "c.json", "h.npz", str(folder / "m.rknn"), str(folder / "result.json"), str(folder), "rk3576",
        "fp16", {}, {}, None, "{}", -1e4,
    )  # fmt: skip


def run(folder: Path, script: str, timeout: float = 30, said: list[str] | None = None) -> toolkit.Outcome:
    code = folder / "child.py"
    code.write_text(PRELUDE + script)
    said = [] if said is None else said
    return toolkit.compile(
        request(folder), folder, folder / "log", timeout, said.append, (sys.executable, str(code))
    )  # fmt: skip


def test_a_good_end(tmp_path: Path) -> None:
    said: list[str] = []
    found = run(tmp_path, "say('build'); say('simulate a 1/9'); say('simulate a 2/9'); result()", said=said)
    assert (found.reason, found.kind, found.seconds, found.peak) == ("", "", {"build": 1.0}, 5)
    assert [x.split("  ")[-1] for x in said] == ["build", "simulate a 1/9"]  # not a line a step


def test_temporary_files_are_in_the_childs_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that is a relative one, as in a run of the workflow: the toolkit leaves gigabytes there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    code = tmp_path / "child.py"
    code.write_text(f"{PRELUDE}import tempfile; print(tempfile.gettempdir(), os.path.expanduser('~')); result()")
    asked = replace(request(tmp_path), result=str(tmp_path / "result.json"))
    toolkit.compile(asked, Path("work"), Path("log"), 30, print, (sys.executable, str(code)))
    assert Path("log").read_text().split() == [str(tmp_path / "work")] * 2


def test_a_bug_of_ours_is_no_result_of_the_toolkits(tmp_path: Path) -> None:
    """On a full disk, say: the job fails, so it is tried again, where a refusal would stay."""
    work = "lambda request, run: (_ for _ in ()).throw(OSError(28, 'No space left on device'))"
    script = f"from kvgate.compiler import child; child.main(sys.argv[1], child.Request, {work})"
    with pytest.raises(RuntimeError, match=r"^in phase import: OSError: \[Errno 28\] No space left on device$"):
        run(tmp_path, script)
    assert "Traceback" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("script", "kind", "reason"),
    [
        ("result(reason='build: IndexError: list index out of range')", "refused", "build: IndexError: list index"),
        ("print('E build: no such dataset'); result(reason='build: returned -1')", "refused",
         "build: returned -1: build: no such dataset"),
        ("result(reason='MemoryError')", "memory", "out of memory: MemoryError"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "memory", "killed by signal 9, as the kernel does when memory"),
        ("print('std::bad_alloc', flush=True); os.abort()", "memory", "ran out of memory"),
        ("print('E orig_size equals 0, illegal', flush=True); os.abort()", "crash",
         "crashed with signal 6 (SIGABRT); its last error: orig_size equals 0, illegal"),
        ("import ctypes; ctypes.string_at(0)", "crash", "crashed with signal 11 (SIGSEGV)"),
        ("sys.exit(3)", "crash", "ended with code 3 and no result"),
        ("pass", "crash", "ended with code 0 and no result"),
        ("result(facts={'gates': [{'kind': 'missing', 'text': 'input u: not in the artifact'}]})", "gate",
         "input u: not in the artifact"),
    ],
)  # fmt: skip
def test_every_end_has_its_reason(tmp_path: Path, script: str, kind: str, reason: str) -> None:
    found = run(tmp_path, script)
    assert found.kind == kind and reason in found.reason and "\n" not in found.reason
    assert found.findings[0]["kind"] in (kind, "missing")


FILL = "open('big', 'wb').write(bytes(4 << 20))"


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (FILL, "disk"),  # its last words, in the log, do not fit either
        (f"try: {FILL}\nexcept OSError: os.remove('big'); result(reason='export_rknn: returned -1')", "refused"),
        ("result(reason='build: OSError: [Errno 28] No space left on device')", "disk"),
        ("print('E build: write: No space left on device'); result(reason='build: returned -1')", "disk"),
        (f"resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, 1 << 13))\n{FILL}", "disk"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "signal"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "memory"),
        ("os.abort()", "crash"),
    ],
)
def test_what_lies_in_the_machine_is_tried_again(tmp_path: Path, mounted, script: str, kind: str) -> None:  # type: ignore[no-untyped-def]
    mounted(tmp_path / "disk", "size=2m")
    found = run(tmp_path / "disk", script)
    assert found.kind == kind and found.findings[0]["kind"] == kind
    why = found.blocked("self test x: ")
    assert why.facts == ({"again": True} if kind in ("disk", "signal", "memory") else {})
    assert why.reason == f"self test x: {found.reason}" and "\n" not in why.reason
    if kind == "disk":
        assert "disk full: " in why.reason or "limit of a file's size" in why.reason


def test_a_hang_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = """
import subprocess
p = subprocess.Popen(["sleep", "600"]); open("pid", "w").write(str(p.pid))
say("build"); time.sleep(600)
"""
    started = time.monotonic()
    found = run(tmp_path, script, timeout=2)
    assert time.monotonic() - started < 10
    assert found.kind == "hang" and found.reason == "no end after 2 s, in phase 'build'"
    assert wait_for(lambda: not alive(int((tmp_path / "pid").read_text())), 5)


def test_a_hang_that_closed_its_pipe_is_ended(tmp_path: Path) -> None:
    found = run(tmp_path, "os.close(request['progress']); time.sleep(600)", timeout=2)
    assert found.kind == "hang"


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(what, seconds: float = 20.0) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.05)
    return False


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    """Also when the parent is killed with 9 and can do nothing about it."""
    script = tmp_path / "parent.py"
    code = (
        "import os, time; from kvgate.compiler import child\n"
        f"pid, parent = os.fork(), {'os.getppid()'}\n"
        "if pid == 0:\n    child._die_with(os.getppid())\n    time.sleep(600)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(pid)); time.sleep(600)\n"
    )
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": _package()})
    file = tmp_path / "pid"
    assert wait_for(lambda: file.is_file() and file.read_text().isdigit())
    pid = int(file.read_text())
    time.sleep(0.5)
    assert alive(pid)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not alive(pid), 5)


def _package() -> str:
    return str(Path(child.__file__).parents[2])


PROOF = "import sys; from kvgate.compiler import child\ntry: child._prove_malloc()\nexcept child.Failure as e: print(e)"


def test_fresh_memory_is_zero_in_the_childs_environment_only(tmp_path: Path) -> None:
    fixed = toolkit.environment(tmp_path)
    good = subprocess.run([sys.executable, "-c", PROOF], env=fixed, capture_output=True, text=True, check=True)
    assert good.stdout == ""
    for tunables in ("", TUNABLES.replace("perturb", "perturbed"), "glibc.malloc.perturb=255"):
        env = {**fixed, "GLIBC_TUNABLES": tunables}
        bad = subprocess.run([sys.executable, "-c", PROOF], env=env, capture_output=True, text=True, check=True)
        assert "malloc: got leftovers" in bad.stdout, tunables


def test_the_environment_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolkit.environment(tmp_path)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "SkylakeX")
    monkeypatch.setenv("RKNN_SOMETHING", "1")
    assert toolkit.environment(tmp_path) == before
    assert before["OPENBLAS_CORETYPE"] == "Haswell" or not toolkit.portable()


KERNELS = """
from numpy.core import _multiarray_umath as numpy
print(*(name for name in numpy.__cpu_dispatch__ if numpy.__cpu_features__[name]))
"""


def test_numpy_s_kernels_are_those_of_avx2_on_every_pc(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "default::ImportWarning", "-c", KERNELS],
        env=toolkit.environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "AVX512" not in done.stdout and ("AVX2" in done.stdout or not toolkit.portable())


def test_requests_travel_as_json(tmp_path: Path) -> None:
    script = "open('seen', 'w').write(json.dumps(request)); result()"
    run(tmp_path, script)
    seen = Request(**json.loads((tmp_path / "seen").read_text()))
    assert seen.parent == os.getpid() and seen.platform == "rk3576" and seen.mask == -1e4


def test_scratch_is_fresh(tmp_path: Path) -> None:
    first = toolkit.scratch(tmp_path)
    (first / "left").write_text("of a killed run")
    assert list(toolkit.scratch(tmp_path).iterdir()) == []
