"""A board's row: what its run says beside the numbers, and how it stands to the same artifact in the simulator."""

import numpy as np
import pytest
import synthetic
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.judging import boards
from kvgate.report import columns, ship, table
from kvgate.stages import judge

OF = synthetic.trace()
LEDGER = {"total_us": 50_000.0, "inference_us": 48_000.0, "npu_us": None, "tokens_per_second": 20.0}
RUN = {
    "status": "ok",
    "findings": [],
    "ledger": LEDGER,
    "environment": {"before": {"clock_state": "npu 950 MHz performance"}},
}
SELFTEST = {"status": "ok", "passed": True, "reason": ""}


def on_board(root, change=lambda seen: None, run=None, selftest=None, simulator="warn", build=None):
    """The verdict of a row on a board, whose observation `change` breaks."""
    results = synthetic.Results(root, synthetic.ROW | {"backend": "orangepi"})
    if build:
        results.built(synthetic.BUILD | build)
    seen = synthetic.observation(OF)
    change(seen)
    results.verify("capital", OF, seen)
    results.write("run", RUN | (run or {}))
    results.write("selftest", SELFTEST | (selftest or {}))
    results.write("judge", {"status": "ok", "verdict": simulator}, backend="simulator")
    stages = ("export", "check", "build", "verify", "run", "selftest")
    inputs = {stage: results.path(stage) for stage in stages}
    inputs["simulator"] = results.path("judge", backend="simulator")
    job = Job("judge", results.row, {"thresholds": synthetic.THRESHOLDS}, inputs, root)
    body = {"status": "ok", **judge.run(job)}
    record.write(job.record, body)
    return body


def zeros(seen):
    for name in ("isolated/layers.0.key", "forced/layers.0.key"):
        seen[name] = np.zeros_like(seen[name])


def test_a_right_board_passes_with_its_times(tmp_path):
    verdict = on_board(tmp_path)
    assert (verdict["verdict"], verdict["row"]["backend"]) == ("pass", "orangepi")
    figures = verdict["figures"]
    assert (figures["total_ms"], figures["tokens_per_second"], figures["npu_ms"]) == (50.0, 20.0, None)
    assert (figures["simulator_verdict"], figures["clock_state"]) == ("warn", "npu 950 MHz performance")
    assert columns.cells(verdict, ["total_ms", "simulator", "npu_ms"], people=True) == ["50.00", "warn", ""]
    assert "ms a token" in table.compact([verdict])


def test_wrong_on_the_board_only_names_the_known_fault_that_fits(tmp_path):
    risks = {"risks": ["F9 Concat: its submit failed", "F10 exSDPAttention: returned zeros at [1,8,64,64]"]}
    reason = on_board(tmp_path, zeros, build=risks)["reason"]
    assert reason.startswith("right in the simulator, wrong on the board: ")
    assert reason.endswith("; fits F9 Concat: its submit failed") or "; fits F10 exSDPAttention" in reason
    assert "fits" not in on_board(tmp_path / "b", zeros, build={"risks": ["F16 TopK or ArgMax"]})["reason"]


def test_wrong_in_both_is_no_news_of_the_board(tmp_path):
    assert on_board(tmp_path, zeros, simulator="fail")["reason"].startswith("as in the simulator (fail): ")


def test_a_board_that_fails_its_self_test_passes_nothing(tmp_path):
    verdict = on_board(tmp_path, selftest={"passed": False, "reason": "roundtrip: cube.out NHWC read as NCHW"})
    assert verdict["verdict"] == "fail"
    assert "the board fails its self test: roundtrip: cube.out NHWC read as NCHW" in verdict["reason"]
    assert verdict["first"]["gate"] == "selftest"


@pytest.mark.parametrize("kind", boards.FATAL)
def test_right_numbers_do_not_make_up_for_a_failed_run(tmp_path, kind):
    verdict = on_board(tmp_path, run={"findings": [record.finding(kind, "failed to submit at step 3")]})
    assert verdict["verdict"] == "fail" and "failed to submit at step 3" in verdict["reason"]


def test_versions_that_do_not_match_stand_on_the_row(tmp_path):
    finding = record.finding("version_mismatch", "runtime 1.5.2, toolkit 2.5.0")
    verdict = on_board(tmp_path, run={"findings": [finding]})
    assert verdict["verdict"] == "pass" and "runtime 1.5.2, toolkit 2.5.0" in verdict["risks"]


def test_a_lost_board_blocks_its_row(tmp_path):
    verdict = on_board(tmp_path, run={"status": "blocked", "reason": "connection lost", "again": True})
    assert (verdict["verdict"], verdict["reason"]) == ("blocked", "connection lost")


def test_times_are_compared_within_one_clock_state(tmp_path):
    def row(ms, cycles, clocks):
        verdict = on_board(tmp_path / f"{ms}{clocks}", run={"environment": {"before": {"clock_state": clocks}}})
        verdict["figures"] |= {"total_ms": ms, "cycles": cycles, "artifact_bytes": 1}
        return verdict

    fast, slow = row(10.0, 200, "pinned"), row(20.0, 100, "pinned")
    assert ship.best_row([slow, fast]) is fast
    fast["figures"]["clock_state"] = "ondemand"
    assert ship.best_row([slow, fast]) is slow  # the fewest predicted cycles


def test_predicted_cycles_beside_measured_time():
    layers = [{"operator": "Conv", "target": "NPU", "us": 50.0}, {"operator": "Gather", "target": "CPU", "us": 900.0}]
    found = boards.predictions(layers, {"Conv@NPU": 100_000})
    assert [x["operator"] for x in found] == ["Gather@CPU", "Conv@NPU"]
    assert found[1]["ns_a_cycle"] == 0.5 and found[0]["cycles"] is None
