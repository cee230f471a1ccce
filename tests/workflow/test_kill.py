"""Killed, interrupted, out of disk: files are whole or absent, other rows go on, the next run resumes."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kvgate import record

pytestmark = pytest.mark.slow

ROW = "results/models/tiny/rows/plain/{}/rk3576/fp16/simulator/verdict.json"
BUILD = "results/models/tiny/artifacts/plain/{}/rk3576/fp16/decode/build.json"


def forget(repository, strategy: str) -> None:
    """As if this build was never made, in the store either."""
    (repository.path / BUILD.format(strategy)).unlink()
    for path in (repository.path / "results/store").rglob("*"):
        if path.is_file():
            path.unlink()


def child_of(repository, deadline: float = 120) -> int:
    """The id of the toolkit's process that builds in this repository, once there is one."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().decode().split("\0")
                if "kvgate.compiler.child" not in words:
                    continue
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if Path(f"/proc/{parent}/cwd").resolve() == repository.path.resolve():
                    return int(process.name)
            except OSError:  # it ended meanwhile
                continue
        time.sleep(0.02)
    raise AssertionError("no build started")


def gone(pid: int, deadline: float = 30) -> bool:
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return True
        time.sleep(0.05)
    return False


def leftovers(repository) -> list[Path]:
    return [p for p in (repository.path / "results").rglob("*") if p.name.endswith(".part") or p.name == ".work"]


def start(repository, *targets: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        repository.command(*targets),
        cwd=repository.path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts background commands with interrupts ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_killed_compiler_blocks_its_row_and_no_other(repository):
    forget(repository, "tiny_blend")
    run = start(repository)
    os.kill(child_of(repository), signal.SIGKILL)
    _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    verdict = record.read(repository.path / ROW.format("tiny_blend"))
    assert verdict["verdict"] == "blocked"
    assert "signal 9" in verdict["reason"]
    assert record.read(repository.path / ROW.format("tiny_cpu_managed"))["verdict"] == "pass"
    assert not leftovers(repository)
    (repository.path / BUILD.format("tiny_blend")).unlink()  # as the README says
    assert repository.snakemake().returncode == 0
    assert record.read(repository.path / ROW.format("tiny_blend"))["verdict"] == "pass"


def test_after_a_killed_snakemake_one_unlock_and_the_run_resumes(repository):
    forget(repository, "tiny_blend")
    run = start(repository)
    child = child_of(repository)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert gone(child), "the toolkit outlived the job that started it"
    assert not (repository.path / BUILD.format("tiny_blend")).exists()
    locked = repository.snakemake()
    assert locked.returncode != 0 and "--unlock" in locked.stderr
    assert repository.snakemake("--unlock").returncode == 0
    done = repository.snakemake()
    assert done.returncode == 0, done.stderr
    assert record.read(repository.path / ROW.format("tiny_blend"))["verdict"] == "pass"
    assert not leftovers(repository)
    assert repository.planned() == {}


def test_ctrl_c_in_the_middle_of_a_build_loses_nothing(repository):
    forget(repository, "tiny_blend")
    run = start(repository)
    child = child_of(repository)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    _, said = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "Traceback" not in said
    assert gone(child)
    assert not (repository.path / BUILD.format("tiny_blend")).exists()
    table = repository.kvgate("table", "--configfile", "tests/workflow/tiny.yaml")
    assert "tiny_cpu_managed" in table.stdout
    assert repository.snakemake().returncode == 0
    assert repository.planned() == {}
    assert not leftovers(repository)


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a small or read-only tmpfs; mode bits do nothing for root."""
    points = []

    def mount(path: Path, options: str) -> None:
        path.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mount: {done.stderr.strip()}")
        points.append(path)

    yield mount
    for path in points:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize(
    ("options", "said"), [("ro", "Read-only file system"), ("size=64k", "No space left on device")]
)
def test_results_that_cannot_be_written_are_one_line(checkout, mounted, tmp_path, options, said):
    repository = checkout(tmp_path / "clone")
    (repository.path / ".snakemake").mkdir()
    mounted(repository.path / "results", options)
    done = repository.snakemake("results/models/tiny/checkpoint/manifest.json")
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((repository.path / "results").rglob("manifest.json"))
