"""Runs one job: holds the key to the code and packages that are here, runs the stage, writes its record last."""

import fcntl
import importlib
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from kvgate.jobs import cpu, digest, job_lines, keys, machine, record
from kvgate.jobs.job import Job

_HEARTBEAT = 30.0  # seconds between lines on the terminal while a job works


def run(stage: str, argument: str, results: Path, base: Path, log: Path | None, lacking: str = "") -> int:
    """lacking: one line on what the machine has not for this job, which then does not begin (machine.room).

    Returns the exit code: 0 also for an expected failure, which is a record with status `blocked`.

    Raises ValueError where the key is not what the code, the packages and the texts are now.
    """
    key = keys.parts(argument)
    _hold(stage, key, base, results)
    inputs = {label: results / path for label, (path, _) in key["inputs"].items()}
    job = Job(stage, key["wildcards"], key["config"], inputs, results, base, key)
    job.folder.mkdir(parents=True, exist_ok=True)
    with _alone(job), _captured(log) as terminal, _heartbeat(job, log, terminal):
        try:
            return _made(job, key, terminal, lacking)
        except KeyboardInterrupt:
            return 130
        except BaseException as error:
            with suppress(OSError):  # the log may lie on the disk that is full
                traceback.print_exc()
            last = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
            said = f"failed: {machine.cause(error, job.folder) or last}" + (f"; see {log}" if log else "")
            print(f"{job_lines.title(job)}: {said}", file=terminal, flush=True)
            return 1


def _made(job: Job, key: keys.Key, terminal: TextIO, lacking: str) -> int:
    started = time.monotonic()
    job.record.unlink(missing_ok=True)
    record.settle(job.record)
    body = _body(job, key, lacking)
    seconds = round(time.monotonic() - started, 2)
    cost = {"seconds": seconds, "peak_mb": _peak_mb(), "cpu": cpu.label()}
    record.write(job_lines.cost_path(job.record), cost)
    record.write(job.record, body)
    print(job_lines.finished(job, body, seconds), file=terminal, flush=True)
    if body.get("announce"):
        print(body["announce"], file=terminal, flush=True)
    return 0


def _body(job: Job, key: keys.Key, lacking: str) -> dict[str, Any]:
    module = importlib.import_module(f"{digest.PACKAGE}.stages.{job.stage}")
    state = {"key": key, "inputs": {label: record.sha256(path) for label, path in job.inputs.items()}}
    try:
        if not getattr(module, "TAKES_BLOCKED", False):
            _pass_on(job)
        if lacking:
            raise record.Blocked(f"{job.stage}: {lacking}", [record.finding("machine", lacking)], again=True)
        body = module.run(job)
        job.unmoved()
        return {"status": "ok", **body, **state}
    except Exception as error:
        why = _as_data(error, job.folder)
        if why is None:
            raise
        with suppress(OSError):  # the log may lie on the disk that is full
            if why is not error:
                traceback.print_exc()
            print(f"blocked: {why.reason}", file=sys.stderr)
        return {"status": "blocked", "reason": why.reason, "findings": why.findings, **why.facts, **state}


def _as_data(error: Exception, folder: Path) -> record.Blocked | None:
    """What a stage expects, and what lies in the machine, which the next run takes up again. None for a mistake."""
    cause = machine.cause(error, folder)
    if cause:
        return record.Blocked(cause, [record.finding("machine", cause)], again=True)
    return error if isinstance(error, record.Blocked) else None


def _pass_on(job: Job) -> None:
    """A blocked input blocks this job for the same reason. Raises record.Blocked."""
    for label in job.inputs:
        above = job.read(label)
        if above["status"] == "blocked":
            facts = {"blocked_by": above.get("blocked_by", label.split(".")[0])}
            facts |= {"again": True} if above.get("again") else {}
            raise record.Blocked(above["reason"], above["findings"], **facts)


def _hold(stage: str, key: keys.Key, base: Path, results: Path) -> None:
    """An edit or an upgrade during a run must not be taken in under the old key."""
    if key["stage"] != stage:
        raise ValueError(f"key: got one of stage {key['stage']!r}, allowed: {stage}")
    if digest.code_digest(key["code"]["roots"]) != key["code"]["digest"]:
        raise ValueError("the code changed after this job was planned; run snakemake again")
    for name, version in digest.installed(key["versions"]).items():
        if version != key["versions"][name]:
            planned = f"planned: {key['versions'][name]} (envs/lock.txt)"
            raise ValueError(f"{name}: got version {version}, {planned}; `make preflight` installs what the lock says")
    if keys.text_digests(base, key["texts"], results) != key["texts"]:
        raise ValueError(f"a text of {', '.join(key['texts'])} changed after planning; run snakemake again")


def _peak_mb() -> int:
    """Peak memory of the largest process of this job, in MiB."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) // 1024


@contextmanager
def _alone(job: Job) -> Iterator[None]:
    """One process at a time makes a result: a job that outlived a killed snakemake may still be at it."""
    path = job.folder / f".{job.stage}.lock"
    while True:
        with path.open("w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{job_lines.title(job)}: another process is making this; waiting for it", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is(path, file):  # removed by the one that was waited for: a third one may hold a new file
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def _captured(log: Path | None) -> Iterator[TextIO]:
    """Everything that this process and its children print goes to the log; yields the terminal."""
    with os.fdopen(os.dup(2), "w") as terminal:
        if log is None:
            yield terminal
            return
        log.parent.mkdir(parents=True, exist_ok=True)
        kept = os.dup(1), os.dup(2)
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            yield terminal
        finally:
            for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
                try:
                    stream.flush()
                except OSError:  # a full disk takes no more of the log: the rest goes nowhere
                    with Path(os.devnull).open("wb") as nowhere:
                        os.dup2(nowhere.fileno(), descriptor)
                    stream.flush()
                os.dup2(kept[descriptor - 1], descriptor)
                os.close(kept[descriptor - 1])


@contextmanager
def _heartbeat(job: Job, log: Path | None, terminal: TextIO) -> Iterator[None]:
    """While a long job works, a line now and then with the last thing that it printed."""
    done = threading.Event()
    started = time.monotonic()

    def beat() -> None:
        while log is not None and not done.wait(_HEARTBEAT):
            print(job_lines.working(job, log, time.monotonic() - started), file=terminal, flush=True)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
