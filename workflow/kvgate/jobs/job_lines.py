"""What a person sees of a job: a line as it works and as it ends, and about how long the run still takes."""

import json
import time
from pathlib import Path
from typing import Any

from kvgate.jobs.job import Job

RUN = ".run.json"  # in the results folder: the jobs of the run that is on, and what each is expected to take


def cost_path(path: Path) -> Path:
    """The side file of a record with its seconds, peak memory and CPU class: they differ between equal runs."""
    return path.with_suffix(".cost.json")


def title(job: Job) -> str:
    """A job's name: its stage and what tells it from its siblings."""
    return f"{job.stage} " + " ".join(v for k, v in job.wildcards.items() if v not in ("plain", "decode"))


def finished(job: Job, body: dict[str, Any], seconds: float) -> str:
    status = body["status"] if body["status"] == "ok" else f"blocked: {body['reason']}"
    status += "; the next run tries again" if body.get("again") else ""
    return f"{title(job)}: {status}, {clock(seconds)}{_left(job)}"


def working(job: Job, log: Path, seconds: float) -> str:
    try:
        lines = [x.strip() for x in log.read_bytes()[-2000:].decode(errors="replace").splitlines() if x.strip()]
    except OSError:
        lines = []
    return f"{title(job)}: {clock(seconds)} so far: {lines[-1][:100] if lines else 'working'}"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s" if seconds >= 60 else f"{seconds:.0f} s"


def _left(job: Job) -> str:
    """How many of the run's jobs are done and about how long the others take, judged by those that are done."""
    try:
        run = json.loads((job.results / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    mine = str(job.record.relative_to(job.results))
    done = {p for p in run["jobs"] if p == mine or _newer(job.results / p, run["started"])}
    spent = sum(run["jobs"][p] for p in done)
    left = sum(run["jobs"].values()) - spent
    if mine not in run["jobs"] or not spent:
        return ""
    estimate = left * (time.time() - run["started"]) / spent
    return f" [{len(done)}/{len(run['jobs'])}" + (f", about {clock(estimate)} left]" if left else "]")


def _newer(path: Path, started: float) -> bool:
    try:
        return path.stat().st_mtime >= started
    except OSError:
        return False
