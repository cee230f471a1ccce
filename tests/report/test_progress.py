"""What a person sees of a run."""

import json
import time
from pathlib import Path

import pytest
import yaml
from kvgate.jobs import job_lines, record
from kvgate.jobs.job import Job
from kvgate.planning import audit, progress
from kvgate.planning.plan import Node, Plan

BASE = Path(__file__).parents[2]
TINY = yaml.safe_load((BASE / "tests/workflow/tiny.yaml").read_text())


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3725, "62 min 5 s")])
def test_clock(seconds, text):
    assert job_lines.clock(seconds) == text


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
    said = job_lines.finished(job, {"status": "ok"}, 100)
    assert said.startswith("fetch m: ok, 1 min 40 s [1/2, about 5 min ")  # 30 expected seconds at 100 / 10
    record.write(tmp_path / "models/m/checkpoint/manifest.json", {})
    last = job_lines.finished(Job("trace", {"model": "m", "program": "p"}, {}, {}, tmp_path), {"status": "ok"}, 3)
    assert last == "trace m p: ok, 3 s [2/2]"


def test_a_blocked_job_says_why(tmp_path):
    job = Job("fetch", {"model": "m"}, {}, {}, tmp_path)
    assert job_lines.finished(job, {"status": "blocked", "reason": "corrupt"}, 1) == "fetch m: blocked: corrupt, 1 s"


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


def made(plan: Plan, results: Path, *more: Node) -> None:
    """Every result of a sweep as if a run had made it: with a file of its own, and what it was made from."""
    for node in [*plan.nodes(), *more]:
        path = results / node.record
        record.write_bytes(path.with_name(f"{node.stage}.bin"), node.short.encode())
        files = {f"{node.stage}.bin": record.sha256(path.with_name(f"{node.stage}.bin"))}
        inputs = {label: record.sha256(results / below.record) for label, below in node.inputs.items()}
        record.write(path, {"key": json.loads(node.key), "files": files, "inputs": inputs})


def counted(plan: Plan, results: Path) -> dict[str, str]:
    """The jobs to do: the reasons by stage."""
    return {node.stage: why[0] for node, why in progress.stale(plan, results).values()}


def test_a_file_in_doubt_is_read_with_all_that_it_was_made_from(tmp_path):
    """The hard link that a job found changed is the weights' too: both are made again, in one run."""
    plan = Plan(BASE, TINY)
    made(plan, tmp_path)
    assert counted(plan, tmp_path) == {}
    build, prepare = plan.of_stage("build")[0], plan.of_stage("prepare")[0]
    (tmp_path / prepare.record).with_name("prepare.bin").write_bytes(b"changed")
    assert counted(plan, tmp_path) == {}  # nobody has used it
    record.doubt(tmp_path / build.record)
    found = counted(plan, tmp_path)
    assert found["prepare"] == "files changed" and {found[x] for x in ("export", "build", "judge")} == {"inputs"}
    assert "trace" not in found and "fetch" not in found


def test_a_doubt_that_does_not_hold_is_settled(tmp_path):
    plan = Plan(BASE, TINY)
    made(plan, tmp_path)
    path = tmp_path / plan.of_stage("export")[0].record
    record.doubt(path)
    assert counted(plan, tmp_path) == {} and not record.doubted(path)


def test_edited_contradicted_and_exchanged_records_are_made_again(tmp_path):
    plan = Plan(BASE, TINY)
    made(plan, tmp_path)
    path = tmp_path / plan.of_stage("judge")[0].record
    kept = path.read_bytes()
    path.write_bytes(kept.replace(b"simulator", b"simulated"))
    assert counted(plan, tmp_path) == {"judge": "new", "tabulate": "inputs"}
    body = json.loads(kept) | {"verdict": "pass", "gates": [{"name": "top1", "verdict": "fail"}]}
    record.write(path, {k: v for k, v in body.items() if k != "sealed"})
    assert counted(plan, tmp_path) == {"judge": "verdict", "tabulate": "inputs"}
    path.write_bytes(kept)
    assert counted(plan, tmp_path) == {}
    checked = tmp_path / plan.of_stage("check")[0].record
    record.write(checked, record.read(checked) | {"findings": []})  # from another run, say
    found = counted(plan, tmp_path)
    assert "check" not in found and found["build"] == "made from another check"


@pytest.mark.parametrize("lost", ["accuracy", "diagnose"])
def test_a_diagnosis_that_there_is_is_planned_like_other_results(tmp_path, lost):
    plan = Plan(BASE, TINY)
    row = plan.rows[0].wildcards()
    assert plan.beside(tmp_path) == []
    diagnosis = plan.node("diagnose", row)
    made(plan, tmp_path, diagnosis.inputs["accuracy"], diagnosis)
    assert [node.stage for node in plan.beside(tmp_path)] == ["accuracy", "diagnose"]
    assert counted(plan, tmp_path) == {}
    node = plan.node(lost, row)
    body = record.read(tmp_path / node.record)
    record.write(tmp_path / node.record, body | {"again": True})  # as of a child that crashed
    assert counted(plan, tmp_path) == {lost: "new"} | ({"diagnose": "inputs"} if lost == "accuracy" else {})
    code = body["key"] | {"code": {"roots": [], "digest": "0"}}  # as of code that changed since
    record.write(tmp_path / node.record, body | {"key": code})
    assert counted(plan, tmp_path)[lost] == "code"
    assert {x.kind for x in audit.audit(plan, tmp_path)} == {"stale"}
