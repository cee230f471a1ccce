"""`make bench`: what a sweep cost, how fast planning is, and our graphs beside what people have today.

Every figure is measured now or read from the records of the run that this command starts. Seconds depend on the
machine and its load, so compare ratios of one run.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvgate.jobs import job_lines, record
from kvgate.planning.config import override
from kvgate.planning.plan import Plan

TODAY = ("hf_export_1024", "legacy_export_1024")  # config/bench.yaml
_TOOLKIT = ("load", "build", "export", "init", "simulate")  # phases of the child that are the toolkit's own calls


def main(base: Path, results: Path) -> int:
    """Run the default sweep and config/bench.yaml where they are not made yet, then print. Returns an exit code."""
    if _snakemake(base).returncode:
        return 1
    lines = [*spent(Plan(base, {}), results), *planning(base, results)]
    config = base / "config/bench.yaml"
    if _snakemake(base, "--configfile", str(config)).returncode:
        return 1
    print("\n".join([*lines, *side_by_side(Plan(base, override([config], "")), results)]))
    return 0


def board(plan: Plan, results: Path, name: str) -> int:
    """What a board costs beside its own work, on the first row of the sweep that ran there. Returns an exit code."""
    from kvgate.jobs.job import Job
    from kvgate.tools import bench_boards

    nodes = [node for node in plan.of_stage("run") if node.wildcards["backend"] == name]
    if not nodes:
        raise ValueError(f"--board: got {name!r}, known: {', '.join(plan.config['sweep']['backends'])}")
    inputs = {label: results / below.record for label, below in nodes[0].inputs.items()}
    # As the workflow does: the interpreter that a local board's `python3` is.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    job = Job("run", nodes[0].wildcards, nodes[0].config, inputs, results, plan.base)
    print("\n".join(bench_boards.lines(bench_boards.measure(job))))
    return 0


def spent(plan: Plan, results: Path) -> list[str]:
    """Where the time of the sweep went, its peak memory and its disk."""
    seconds: dict[str, float] = defaultdict(float)
    peak: dict[str, int] = defaultdict(int)
    toolkit, stored = 0.0, 0
    for node in plan.nodes():
        cost = record.read(job_lines.cost_path(results / node.record))
        seconds[node.stage] += cost["seconds"]
        peak[node.stage] = max(peak[node.stage], cost["peak_mb"])
        if node.stage == "build":
            path = (results / node.record).with_name("phases.json")
            phases = record.read(path)["seconds"] if path.exists() else {}
            stored += not phases
            toolkit += sum(phases.get(name, 0) for name in _TOOLKIT)
    total = sum(seconds.values())
    lines = [f"sweep {plan.name}: {len(plan.rows)} rows, {total:.0f} s of jobs", ""]
    lines += ["| stage | jobs | seconds | share | peak MiB of a job |", "|---|---|---|---|---|"]
    for stage, spent_here in seconds.items():
        share = f"{spent_here / total:.0%}"
        lines.append(f"| {stage} | {len(plan.of_stage(stage))} | {spent_here:.0f} | {share} | {peak[stage]} |")
    lines += [
        "",
        f"toolkit calls ({', '.join(_TOOLKIT)}): {toolkit:.0f} s; outside of them: {1 - toolkit / total:.0%} of all",
        f"builds taken from the store: {stored}; wall time: {_wall(plan, results)}",
        f"disk of results, every file once: {_disk(results) / 2**30:.1f} GiB",
        "",
    ]
    return lines


def _wall(plan: Plan, results: Path) -> str:
    """From the start of the last run to its last record, where that run made the whole sweep."""
    run = record.read(results / job_lines.RUN)
    records = [node.record for node in plan.nodes()]
    if not set(records) <= set(run["jobs"]):
        return "not known, as the sweep was made in several runs"
    return job_lines.clock(max((results / x).stat().st_mtime for x in records) - run["started"])


def planning(base: Path, results: Path) -> list[str]:
    """Seconds of planning: the sweep and 1,000 tuples with nothing to do, and a moved threshold end to end."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        for name in ("Snakefile", "workflow", "config", "envs", "profiles", "tests/texts"):
            source, target = base / name, copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        shutil.copytree(results, copy / "results", copy_function=_link, ignore=shutil.ignore_patterns("store", "logs"))
        _seconds(copy)  # hashes once more what the hard links have moved
        idle = _seconds(copy)
        thresholds = copy / "config/thresholds.yaml"
        thresholds.write_text(
            thresholds.read_text(encoding="utf-8").replace("warn: 0.01", "warn: 0.011"), encoding="utf-8"
        )
        moved = _seconds(copy)
        many = copy / "many.yaml"
        record.write(many, _thousand())
        plan = Plan(copy, override([many], ""))
        for node in plan.nodes():  # as if all were made
            record.write(copy / "results" / node.record, {"status": "ok", "key": json.loads(node.key)})
        thousand = _seconds(copy, "-n", "--configfile", str(many))
        return [
            "| planning | seconds |",
            "|---|---|",
            f"| the default sweep, nothing to do | {idle:.1f} |",
            f"| a moved threshold, end to end | {moved:.1f} |",
            f"| {len(plan.rows)} tuples ({len(plan.nodes())} jobs), nothing to do | {thousand:.1f} |",
            "",
        ]


def side_by_side(plan: Plan, results: Path) -> list[str]:
    """One fp16 row a strategy: today's ways first, then ours."""
    columns = "strategy | CPU operators | rows | traffic MiB | Mcycles | weights MiB | artifact MiB | " + " | ".join(
        f"K/V error near {p}" for p in (0, 128, 1000)
    )
    lines = [f"| {columns} | seconds |", "|---" * (columns.count("|") + 2) + "|"]
    for row in sorted(plan.rows, key=lambda r: (r.strategy not in TODAY, r.strategy)):
        node = plan.node("judge", row.wildcards()).inputs["build"]
        built = record.read(results / node.record)
        if built["status"] != "ok":
            lines.append(f"| {row.strategy} | blocked: {built['reason']} |" + " |" * (columns.count("|")))
            continue
        seconds = sum(
            record.read(job_lines.cost_path(results / x.record))["seconds"] for x in (node, node.inputs["export"])
        )
        figures = [
            str(sum(built["cpu_operators"].values())),
            str(built["rows"]),
            f"{built['traffic_bytes'] / 2**20:.0f}",
            f"{built['cycles'] / 1e6:.1f}",
            f"{built['weight_bytes'] / 2**20:.0f}",
            f"{built['artifact_bytes'] / 2**20:.0f}",
            *(_near(results, plan, row, position) for position in (0, 128, 1000)),
            f"{seconds:.0f}",
        ]
        lines.append(f"| {row.strategy} | " + " | ".join(figures) + " |")
    return lines


def _near(results: Path, plan: Plan, row: Any, position: int) -> str:
    """The worst K/V L2 at the observed position that is nearest."""
    import numpy as np

    record = results / plan.node("verify", row.wildcards()).record
    with np.load(record.parent / plan.config["sweep"]["programs"][0] / "metrics.npz") as file:
        n = int(np.abs(file["isolated/positions"] - position).argmin())
        return f"{file['isolated/kv'][n].max():.4f} at {file['isolated/positions'][n]}"


def _thousand() -> dict[str, Any]:
    """1,000 tuples: strategies that differ in name only."""
    names = [f"many_{n}" for n in range(334)]
    block = {
        "models": ["smollm2-135m"],
        "strategies": names,
        "platforms": ["rk3576"],
        "quants": ["fp16", "w8a8", "w4a16"],
    }
    strategies = {name: {"module": "cpu_managed", "capacity": 128} for name in names}
    return {"sweep": {"name": "many", "blocks": [block]}, "strategies": strategies}


def _snakemake(base: Path, *args: str, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(base / "Snakefile"), *args]
    return subprocess.run(command, check=False, **options)


def _seconds(repository: Path, *args: str) -> float:
    started = time.monotonic()
    done = _snakemake(repository, *args, cwd=repository, capture_output=True)
    if done.returncode:
        raise ValueError(f"snakemake {' '.join(args)}: {done.stderr.decode().strip().splitlines()[-1]}")
    return time.monotonic() - started


def _link(source: str, target: str) -> None:
    """Records are written over, so copied; large files are linked."""
    if Path(source).suffix == ".json":
        shutil.copy2(source, target)
    else:
        os.link(source, target)


def _disk(results: Path) -> int:
    return sum({s.st_ino: s.st_blocks * 512 for s in (p.stat() for p in results.rglob("*") if p.is_file())}.values())
