"""One job: the key is held to what is here, a blocked input is passed on, a bug fails the job with one line."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from kvgate import digest, record, runner
from kvgate.contract import canonical

WILDCARDS = {"model": "m"}
WORKFLOW = str(Path(__file__).parents[1] / "workflow")


@pytest.fixture
def stage(monkeypatch):
    """A stand-in for a stage's module: what `run` does is set by the test."""
    module = types.SimpleNamespace(run=lambda job: {"answer": 42})
    monkeypatch.setattr(runner.importlib, "import_module", lambda name: module)
    return module


def key(stage: str = "fetch", wildcards: dict | None = None, **change) -> str:
    roots = ["kvgate.record"]
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
    assert record.read(tmp_path / "models/m/checkpoint/manifest.cost.json")["peak_mb"] > 0


def test_an_expected_failure_is_data(stage, tmp_path, capfd):
    def fails(job):
        raise record.Blocked("the toolkit says no", [record.finding("refused", "no")], phase="build")

    stage.run = fails
    assert run(tmp_path) == 0
    body = record.read(tmp_path / "models/m/checkpoint/manifest.json")
    assert (body["status"], body["reason"], body["phase"]) == ("blocked", "the toolkit says no", "build")
    assert "fetch m: blocked: the toolkit says no" in capfd.readouterr().err


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
        ({"code": {"roots": ["kvgate.record"], "digest": "0"}}, "the code changed after this job was planned"),
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
