"""One job: the key is held to what is here, a blocked input is passed on, a bug fails the job with one line."""

import json
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from kvgate.contract import canonical
from kvgate.jobs import cpu, digest, keys, machine, record, runner
from kvgate.jobs.job import Job

WILDCARDS = {"model": "m"}
WORKFLOW = str(Path(__file__).parents[2] / "workflow")


@pytest.fixture
def stage(monkeypatch):
    """A stand-in for a stage's module: what `run` does is set by the test."""
    module = types.SimpleNamespace(run=lambda job: {"answer": 42})
    monkeypatch.setattr(runner.importlib, "import_module", lambda name: module)
    return module


def key(stage: str = "fetch", wildcards: dict | None = None, **change) -> str:
    roots = ["kvgate.jobs.record"]
    parts = {
        "stage": stage,
        "wildcards": wildcards or WILDCARDS,
        "code": {"roots": roots, "digest": digest.code_digest(roots)},
        "versions": digest.installed(["numpy"]),
        "config": {},
        "texts": {},
        "inputs": {},
    }
    return canonical(parts | change)


def run(results: Path, stage: str = "fetch", text: str | None = None, log: Path | None = None) -> int:
    return runner.run(stage, text or key(stage), results, results, log)


def test_the_record_holds_body_key_and_status(stage, tmp_path):
    assert run(tmp_path) == 0
    body = record.read(tmp_path / "models/m/checkpoint/manifest.json")
    assert body["answer"] == 42 and body["status"] == "ok"
    assert canonical(body["key"]) == key()
    cost = record.read(tmp_path / "models/m/checkpoint/manifest.cost.json")
    assert cost["peak_mb"] > 0 and cost["cpu"] == cpu.label()


def test_an_expected_failure_is_data(stage, tmp_path, capfd):
    def fails(job):
        raise record.Blocked("the toolkit says no", [record.finding("refused", "no")], phase="build")

    stage.run = fails
    assert run(tmp_path) == 0
    body = record.read(tmp_path / "models/m/checkpoint/manifest.json")
    assert (body["status"], body["reason"], body["phase"]) == ("blocked", "the toolkit says no", "build")
    assert "fetch m: blocked: the toolkit says no" in capfd.readouterr().err


def test_a_job_that_the_machine_has_no_memory_for_does_not_begin(stage, tmp_path, capfd):
    stage.run = lambda job: pytest.fail("it ran")
    lacking = machine.room(23_000, 16_000)
    assert runner.run("fetch", key("fetch"), tmp_path, tmp_path, None, lacking) == 0
    body = record.read(tmp_path / "models/m/checkpoint/manifest.json")
    assert body["status"] == "blocked" and body["again"] is True
    assert body["reason"] == "fetch: memory: needs about 23000 MB, this machine has 16000"
    assert [x["kind"] for x in body["findings"]] == ["machine"]
    assert f"fetch m: blocked: {body['reason']}" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["fetch", "trace"])
def test_a_full_disk_is_data_and_the_next_run_tries_again(stage, tmp_path, capfd, name):
    def fails(job):
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")

    stage.run = fails
    wildcards = {"model": "m", "program": "p"}
    assert run(tmp_path, name, key(name, wildcards)) == 0
    (path,) = (p for p in tmp_path.rglob("*.json") if ".cost." not in p.name)
    body = record.read(path)
    assert (body["status"], body["reason"], body["again"]) == ("blocked", f"disk full: {path.parent}", True)
    assert keys.recorded(path) == {}  # as if it was not there: planned anew
    assert f"blocked: disk full: {path.parent}; the next run tries again, " in capfd.readouterr().err


FILLS = """
import sys, types
from pathlib import Path
from kvgate.jobs import runner
def fills(job):
    try:
        (job.folder / "big").write_bytes(bytes(1 << 20))
    except OSError:
        return {}
runner.importlib.import_module = lambda name: types.SimpleNamespace(run=fills)
sys.exit(runner.run("fetch", sys.argv[1], Path("disk"), Path("disk"), Path("disk/fetch.log")))
"""


def test_a_record_that_does_not_fit_fails_the_job_with_one_line(tmp_path, mounted):
    """Its log is on the same disk, and takes nothing more either."""
    mounted(tmp_path / "disk", "size=64k")
    environment = os.environ | {"PYTHONPATH": WORKFLOW}
    done = subprocess.run(
        [sys.executable, "-c", FILLS, key()], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    folder = Path("disk/models/m/checkpoint")
    assert (done.returncode, done.stderr) == (1, f"fetch m: failed: disk full: {folder}; see disk/fetch.log\n")
    assert not list((tmp_path / folder).glob("*.json"))


def test_of_three_that_make_a_result_one_is_at_work(tmp_path):
    """A waiting one gets the lock of a file that was removed meanwhile; the third one has made a new one."""
    job = Job("fetch", WILDCARDS, {}, {}, tmp_path)
    job.folder.mkdir(parents=True)
    inside, most = [], []

    def work():
        for _ in range(5):
            with runner._alone(job):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.002)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 20
    assert not list(job.folder.iterdir())


def test_a_blocked_input_blocks_with_the_same_reason_and_the_first_stage(stage, tmp_path):
    above = tmp_path / "models/m/checkpoint/manifest.json"
    record.write(above, {"status": "blocked", "reason": "corrupt", "findings": [], "blocked_by": "fetch"})
    stage.run = lambda job: pytest.fail("a blocked stage must not run")
    wildcards = {"model": "m", "program": "p"}
    text = key("trace", wildcards, inputs={"fetch": ["models/m/checkpoint/manifest.json", "0"]})
    assert run(tmp_path, "trace", text) == 0
    body = record.read(tmp_path / "models/m/traces/p/trace.json")
    assert (body["status"], body["reason"], body["blocked_by"]) == ("blocked", "corrupt", "fetch")


def test_a_bug_fails_the_job_with_one_line_and_a_log(tmp_path):
    """In a process of its own, as its output is redirected: fetch without a source in its config."""
    log = tmp_path / "logs/fetch.log"
    roots = ["kvgate.stages.fetch"]
    text = key(code={"roots": roots, "digest": digest.code_digest(roots)})
    command = [sys.executable, "-m", "kvgate", "fetch", text, "--results", str(tmp_path), "--log", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": WORKFLOW})
    assert done.returncode == 1
    assert done.stderr == f"fetch m: failed: KeyError: 'source'; see {log}\n"
    assert not (tmp_path / "models/m/checkpoint/manifest.json").exists()
    assert "Traceback" in log.read_text()


def test_an_old_record_is_gone_before_the_stage_runs(stage, tmp_path):
    path = tmp_path / "models/m/checkpoint/manifest.json"
    record.write(path, {"status": "ok"})
    stage.run = lambda job: {"was_there": path.exists()}
    assert run(tmp_path) == 0
    assert record.read(path)["was_there"] is False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"code": {"roots": ["kvgate.jobs.record"], "digest": "0"}}, "the code changed after this job was planned"),
        (
            {"versions": {"numpy": "0.1"}},
            r"numpy: got version [\d.]+, planned: 0\.1 \(envs/lock\.txt\); `make preflight` installs what the lock",
        ),
        ({"texts": {"a.txt": "0"}}, "a text of a.txt changed after planning"),
        ({"stage": "trace"}, "key: got one of stage 'trace', allowed: fetch"),
    ],
)
def test_a_key_of_another_state_is_refused(stage, tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        run(tmp_path, text=json.dumps(json.loads(key()) | change))
    assert not list(tmp_path.rglob("*.json"))
