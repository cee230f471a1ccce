"""Killed, interrupted, out of disk: files are whole or absent, other rows go on, the next run resumes."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kvgate.jobs import record

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
    assert repository.planned()["build"] == 1  # by itself: a signal lies in the machine
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


def test_results_that_cannot_be_written_are_one_line(checkout, mounted, tmp_path):
    repository = checkout(tmp_path / "clone")
    (repository.path / ".snakemake").mkdir()
    mounted(repository.path / "results", "ro")
    done = repository.snakemake("results/models/tiny/checkpoint/manifest.json")
    assert done.returncode != 0
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_named_and_the_next_run_goes_on(checkout, mounted, tmp_path):
    """The checkpoint does not fit; its record does. With more space a plain run makes it, without another word."""
    repository = checkout(tmp_path / "clone")
    results, target = repository.path / "results", "results/models/tiny/checkpoint/manifest.json"
    mounted(results, "size=96k")
    done = repository.snakemake(target)
    assert "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("fetch tiny: blocked")]
    assert line.startswith("fetch tiny: blocked: disk full: results/models/tiny/checkpoint")
    assert done.returncode == 0 and record.read(repository.path / target)["again"]
    subprocess.run(["mount", "-o", "remount,size=64m", str(results)], check=True)
    done = repository.snakemake(target)
    assert done.returncode == 0, done.stderr
    assert record.read(repository.path / target)["status"] == "ok"
