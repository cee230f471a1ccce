"""What a person sees of a run."""

import json
import time
from pathlib import Path

import pytest
import yaml
from kvgate import progress, record
from kvgate.job import Job
from kvgate.plan import Plan

BASE = Path(__file__).parents[1]
TINY = yaml.safe_load((BASE / "tests/workflow/tiny.yaml").read_text())


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3725, "62 min 5 s")])
def test_clock(seconds, text):
    assert progress.clock(seconds) == text


def test_what_there_is_to_do_in_a_few_lines(tmp_path):
    plan = Plan(BASE, TINY)
    lines = progress.begin(plan, progress.stale(plan, tmp_path), tmp_path, write=False)
    assert lines[0] == "kvgate: sweep tiny: 4 rows, 23 jobs, 23 to do"
    assert "  build: 4 (new)" in lines
    assert not list(tmp_path.iterdir())


def test_a_job_that_ends_counts_and_says_about_how_long_is_left(tmp_path):
    jobs = {"models/m/checkpoint/manifest.json": 10.0, "models/m/traces/p/trace.json": 30.0}
    record.write(tmp_path / ".run.json", {"started": time.time() - 100, "jobs": jobs})
    job = Job("fetch", {"model": "m"}, {}, {}, tmp_path)
    said = progress.finished(job, {"status": "ok"}, 100)
    assert said.startswith("fetch m: ok, 1 min 40 s [1/2, about 5 min ")  # 30 expected seconds at 100 / 10
    record.write(tmp_path / "models/m/checkpoint/manifest.json", {})
    last = progress.finished(Job("trace", {"model": "m", "program": "p"}, {}, {}, tmp_path), {"status": "ok"}, 3)
    assert last == "trace m p: ok, 3 s [2/2]"


def test_a_blocked_job_says_why(tmp_path):
    job = Job("fetch", {"model": "m"}, {}, {}, tmp_path)
    assert progress.finished(job, {"status": "blocked", "reason": "corrupt"}, 1) == "fetch m: blocked: corrupt, 1 s"


def test_a_record_whose_files_are_gone_is_to_do_with_all_that_reads_it(tmp_path):
    plan = Plan(BASE, TINY)
    for node in plan.nodes():
        record.write(tmp_path / node.record, {"key": json.loads(node.key), "files": {}})
    assert progress.stale(plan, tmp_path) == {}
    build = plan.of_stage("build")[0]
    record.write(tmp_path / build.record, {"key": json.loads(build.key), "files": {"model.rknn": "0"}})
    found = progress.stale(plan, tmp_path)
    assert [(node.stage, why) for node, why in found.values()] == [
        ("build", ["files gone"]),
        *((stage, ["inputs"]) for stage in ("verify", "judge", "tabulate")),
    ]
    assert "  judge: 1 (what it reads)" in progress.begin(plan, found, tmp_path, write=False)
    (tmp_path / build.record).with_name("model.rknn").touch()
    assert progress.stale(plan, tmp_path) == {}
    table = plan.table()
    record.write(tmp_path / table.record, {"key": json.loads(table.key), "bundles": {"bundles/tiny/x": "0"}})
    assert [why for _, why in progress.stale(plan, tmp_path).values()] == [["bundles gone or edited"]]
