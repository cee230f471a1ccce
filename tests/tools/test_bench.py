"""The figures of `make bench` are sums of what the records hold."""

import time
from pathlib import Path

import pytest
import yaml
from kvgate.jobs import job_lines, record
from kvgate.planning.plan import Plan
from kvgate.tools import bench

BASE = Path(__file__).parents[2]
TINY = yaml.safe_load((BASE / "tests/workflow/tiny.yaml").read_text())


@pytest.fixture
def run(tmp_path):
    """The tiny sweep as if every job took 2 s and every build 10 s, 8 of them in the toolkit; one from the store."""
    plan = Plan(BASE, TINY)
    for node in plan.nodes():
        path = tmp_path / node.record
        record.write(path, {"status": "ok"})
        record.write(job_lines.cost_path(path), {"seconds": 10 if node.stage == "build" else 2, "peak_mb": 100})
    for node in plan.of_stage("build")[1:]:
        phases = {"seconds": {"import": 1, "load": 1, "build": 4, "simulate": 3}, "peak_bytes": 1}
        record.write((tmp_path / node.record).with_name("phases.json"), phases)
    return plan, tmp_path


def test_spent(run):
    plan, results = run
    record.write(
        results / job_lines.RUN,
        {"started": time.time() - 60, "jobs": dict.fromkeys((n.record for n in plan.nodes()), 1)},
    )
    lines = bench.spent(plan, results)
    assert lines[0] == "sweep tiny: 4 rows, 78 s of jobs"  # 4 builds of 10 s, 19 other jobs of 2 s
    assert "| build | 4 | 40 | 51% | 100 |" in lines
    assert "toolkit calls (load, build, export, init, simulate): 24 s; outside of them: 69% of all" in lines
    assert [x for x in lines if x.startswith("builds taken from the store: 1; wall time: ")]


def test_a_wall_time_of_several_runs_is_not_known(run):
    plan, results = run
    record.write(results / job_lines.RUN, {"started": 0, "jobs": {plan.table().record: 1}})
    assert any("wall time: not known" in line for line in bench.spent(plan, results))
