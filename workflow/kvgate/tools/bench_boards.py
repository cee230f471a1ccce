"""What a board costs beside its own work: the start of a job, every step, and an artifact that is there already."""

import hashlib
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from kvgate.jobs.job import Job
from kvgate.remote import agent_zip
from kvgate.remote.session import Session
from kvgate.stages import run

_STEP = 50_000.0  # microseconds of a step that the overhead is compared to


def measure(job: Job, steps: int = 20_000, artifact: int = 300_000_000) -> dict[str, float]:
    """Run a row's job on its board four times. Seconds, bytes and microseconds by what they are of.

    steps: how many more steps a long run has than a short one. artifact: bytes of a file that is brought and then not.
    `step_overhead_us` is the time of a step on this side's clock without what the agent's ledger accounts for.
    """
    short, long = 200, 200 + steps
    _run(job, short)  # brings the files
    found = {"start_s": _run(job, short)[0]}
    (_, some, little), (_, more, much) = _run(job, short), _run(job, long)
    found["step_us"] = (more - some) / steps * 1e6
    found["step_overhead_us"] = found["step_us"] - float(much["total_us"])
    found["step_overhead_of_50_ms"] = found["step_overhead_us"] / _STEP
    found["grown_bytes"] = float(much["peak_rss_bytes"]) - float(little["peak_rss_bytes"])
    return found | _artifact(job, artifact)


def lines(found: dict[str, float]) -> list[str]:
    """`measure` as a person reads it."""
    return [
        f"start of a job with nothing to bring: {found['start_s']:.2f} s until its child is up",
        f"transport and agent: {found['step_overhead_us']:.0f} us a step, "
        f"{found['step_overhead_of_50_ms']:.2%} of one of 50 ms; memory grew by {found['grown_bytes'] / 1e6:.1f} MB",
        f"artifact of {found['artifact_bytes'] / 1e6:.0f} MB: {found['bring_s']:.2f} s to bring, "
        f"{found['there_s']:.2f} s with {found['again_bytes']:.0f} bytes sent where it is there",
    ]


def _run(job: Job, steps: int) -> tuple[float, float, dict[str, float]]:
    """Seconds until the job's child was up, seconds of the whole, the ledger."""
    asked = run.request(replace(job, config={**job.config, "timing": {"warmup": 0, "steps": steps}}))
    began, up = time.monotonic(), 0.0

    def progress(text: str) -> None:
        nonlocal up
        up = up or time.monotonic() - began

    with tempfile.TemporaryDirectory() as folder, _session(job, asked) as session:
        session.push(asked.files)
        status = session.run(asked.job, Path(folder), progress)
    if not status["ok"]:
        raise ValueError(f"board: {status['reason']}")
    return up, time.monotonic() - began, status["ledger"]


def _artifact(job: Job, size: int) -> dict[str, float]:
    asked = run.request(job)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "artifact"
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for at in range(0, size, 1 << 20):
                data = os.urandom(min(1 << 20, size - at))
                digest.update(data)
                file.write(data)
        times, sent = [], []
        for _ in range(2):
            with _session(job, asked) as session:
                began = time.monotonic()
                session.push({digest.hexdigest(): path})
                times.append(time.monotonic() - began)
                sent.append(session.sent)
    return {"artifact_bytes": size, "bring_s": times[0], "there_s": times[1], "again_bytes": sent[1]}


def _session(job: Job, asked: run.Request) -> Session:
    board = job.config["board"]
    return Session(
        board, agent_zip.build(board["engine"], asked.contract.strategy), job.config["limits"]["run_seconds"]
    )
