"""What there is to do: the jobs whose record is not what would be planned now, why, and about how long they take."""

import time
from contextlib import suppress
from pathlib import Path

from kvgate.jobs import keys, record
from kvgate.jobs.job_lines import RUN, cost_path
from kvgate.judging import judged
from kvgate.planning import programs
from kvgate.planning.plan import Node, Plan
from kvgate.report import bundle

# Seconds of a job on a common PC, where no earlier run tells: only their ratios matter.
_USUAL = {"fetch": 30, "trace": 20, "prepare": 30, "export": 30, "check": 40, "build": 150, "verify": 3}


def stale(plan: Plan, results: Path) -> dict[str, tuple[Node, list[str]]]:
    """The jobs whose record is not what would be planned now, by record path, each with what changed.

    Also those whose files are gone or in doubt, and all that read from one of them; and the diagnoses of the sweep.
    """
    found: dict[str, tuple[Node, list[str]]] = {}
    doubted, sums = _doubted(plan, results), {}
    for node in [*plan.nodes(), *plan.beside(results)]:
        path = results / node.record
        body = keys.recorded(path)
        why = keys.changes(node.key, body.get("key"))
        if not why:
            sums[node.record] = record.sha256(path)
            why = _lost(path, body.get("files", {}), node.record in doubted)
        if not why and node.stage == "judge" and "verdict" in body and judged.contradiction(body):
            why = ["verdict"]
        if not why and bundle.broken(results, body.get("bundles", {})):
            why = ["bundles gone or edited"]
        if not why and any(below.record in found for below in node.inputs.values()):
            why = ["inputs"]
        if not why:
            read = body.get("inputs", {})
            other = [x for x, below in node.inputs.items() if read.get(x, sums[below.record]) != sums[below.record]]
            why = [f"made from another {', '.join(other)}"] if other else []
        if why:
            found[node.record] = (node, why)
    return found


def _doubted(plan: Plan, results: Path) -> set[str]:
    """The records of which a job found a file changed, and all that they were made from: the change may be there."""
    found: set[str] = set()
    todo = [node for node in plan.nodes() if record.doubted(results / node.record)]
    while todo:
        node = todo.pop()
        found.add(node.record)
        todo += [x for x in node.inputs.values() if x.record not in found]
    return found


def _lost(path: Path, files: dict[str, str], doubted: bool) -> list[str]:
    """Why a record's files are not what it lists: by content where there is doubt, else only that they are there."""
    if not all((path.parent / name).is_file() for name in files):
        return ["files gone"]
    if not doubted:
        return []
    if any(record.sha256(path.parent / name) != sha for name, sha in files.items()):
        return ["files changed"]
    record.settle(path)
    return []


def begin(plan: Plan, todo: dict[str, tuple[Node, list[str]]], results: Path, write: bool) -> list[str]:
    """Lines that say what there is to do and why; with `write`, the finish lines of the jobs can count down."""
    lines = [f"kvgate: sweep {plan.name}: {len(plan.rows)} rows, {len(plan.nodes())} jobs, {len(todo)} to do"]
    lines += programs.unreached(plan.config, (row.strategy for row in plan.rows))
    reasons: dict[str, dict[str, int]] = {}
    for node, why in todo.values():
        # What a job reads changed with the job above it: only the first cause is news.
        own = [x for x in why if not x.startswith("inputs")] or ["what it reads"]
        label = ", ".join(own)
        counts = reasons.setdefault(node.stage, {})
        counts[label] = counts.get(label, 0) + 1
    for stage, counts in reasons.items():
        lines.append(f"  {stage}: " + "; ".join(f"{n} ({why})" for why, n in counts.items()))
    if write and todo:
        jobs = {path: _expected(results / path, node.stage) for path, (node, _) in todo.items()}
        with suppress(OSError):  # a disk that takes nothing: the jobs say so
            record.write(results / RUN, {"started": time.time(), "jobs": jobs})
    return lines


def _expected(path: Path, stage: str) -> float:
    try:
        return float(record.read(cost_path(path))["seconds"])
    except (OSError, ValueError, KeyError):
        return float(_USUAL.get(stage, 1))
