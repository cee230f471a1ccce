"""The vendor's real lite package under emulation, over our double of the C runtime, driven by our agent.

It proves the vendor's Python layer and our code around it. It says nothing of the vendor's runtime or of an NPU.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvgate.observe import observe
from system import rows
from system.rows import finding

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def board(emulated, runtime64):
    return emulated(runtime=runtime64)


@pytest.fixture(scope="module")
def row(board, tmp_path_factory) -> Iterator[rows.Row]:
    with rows.Row(board, "lite", tmp_path_factory.mktemp("lite")) as row:
        yield row


def test_a_row_gives_what_its_artifact_computes(row):
    """Rank-4 inputs that the package turns to NHWC: a wrong order or layout would give other numbers."""
    assert row.session.hello["machine"] == "aarch64"
    assert row.session.hello["engines"] == {"lite": {"version": "2.5.0"}}
    status = row.run("run_us 321")
    assert status["ok"], status["reason"]
    assert status["findings"] == []
    assert status["versions"]["runtime"] == "2.5.0" and status["versions"]["driver"] == "0.9.8"
    assert status["environment"]["before"]["compatible"][-1] == "rockchip,rk3576"
    ledger = status["ledger"]
    assert ledger["run_us"] == 321 and ledger["inference_us"] > 0 and ledger["steps"] == 4
    assert ledger["npu_us"] is None and ledger["why"]  # the package has no layer table
    assert_observed(row.folder / "results/observations/chat.npz")


def assert_observed(path: Path) -> None:
    """What the board observed is what the rule gives on this machine."""
    histories = ["isolated", "forced", "free"]
    wanted = observe(rows.Rule(rows.CONTRACT), rows.host(), rows.trace(), histories, 2)  # type: ignore[arg-type]
    with np.load(path) as found:
        assert sorted(found.files) == sorted(wanted)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], atol=2e-3, err_msg=name)
        assert np.abs(wanted["forced/layers.0.key"]).max() > 0.1  # there is something to compare


@pytest.mark.parametrize(
    ("line", "phase", "step"), [("crash init 0 x", "init", None), ("crash run 5 x", "chat forced", 2)]
)
def test_a_crash_is_found_with_its_place(row, line, phase, step):
    """Of chat, the first inference is run 1 and the isolated steps are runs 2 and 3."""
    status = row.run(line)
    assert (status["ok"], status["signal"], status["phase"]) == (False, "SIGSEGV", phase)
    found = finding(status, "segfault")
    assert (found["phase"], found.get("step")) == (phase, step)
    assert "segmentation fault" in status["reason"] and "\n" not in status["reason"]


def test_a_hang_is_ended(row):
    began = time.monotonic()
    status = row.run("hang run 5 x", seconds={"load": 180, "step": 8})
    assert finding(status, "hang") | {"text": ""} == {"kind": "hang", "text": "", "phase": "chat forced", "step": 2}
    assert not status["ok"] and status["signal"] == "SIGKILL"
    assert time.monotonic() - began < 120


def test_failed_to_submit_with_code_0(row):
    """Where it is text only, the arrays that come back are the runtime's of the step before or worse."""
    status = row.run("say run 4 E RKNN: [12:00:00.000] failed to submit!, op id: 3, flags: 0x5")
    found = finding(status, "failed_to_submit")
    assert not status["ok"] and (found["phase"], found["step"]) == ("chat forced", 1)
    assert "op id: 3" in found["text"] and "op id: 3" in status["stderr_tail"]


@pytest.mark.parametrize(("code", "phase"), [(-1, "chat forced"), (-2, "first inference")])
def test_a_code_of_run_that_the_package_ignores(row, code, phase):
    """It prints nothing and gives the arrays of the step before, or none were ever made."""
    status = row.run(f"code run {4 if code == -1 else 1} {code}")
    found = finding(status, "ignored_run_error")
    assert not status["ok"] and found["phase"] == phase and f"returned {code}" in found["text"]
    assert found.get("step") == (1 if code == -1 else None)


def test_codes_that_the_package_reports(row):
    status = row.run("code init 0 -13")
    assert not status["ok"] and status["phase"] == "init"
    assert "RKNN_ERR_TARGET_PLATFORM_UNMATCH" in finding(status, "platform")["text"]
    status = row.run("code outputs_get 5 -9")
    assert (status["ok"], status["phase"]) == (False, "chat forced")
    assert "RKNN_ERR_OUTPUT_INVALID" in status["reason"]


def test_a_core_mask_that_the_chip_lacks_is_told(row):
    """The package replaces 0_1_2 by 0_1 with a warning."""
    status = row.run(core_mask=7)
    assert status["ok"] and status["core_mask"] == 3
    assert "got 7" in finding(status, "core_mask")["text"] and "3" in finding(status, "core_mask")["text"]


def test_a_core_mask_that_was_not_taken_is_final(row):
    """The package swallows the reason, and would infer on."""
    status = row.run("code set_core_mask 0 -5", core_mask=1)
    assert not status["ok"] and status["phase"] == "init"
    finding(status, "core_mask")


def test_versions_that_do_not_fit_are_told(row):
    """The package accepts them without a word. The row's numbers stand; judge sees the finding."""
    status = row.run("api 1.5.2 (kvgate double)", "driver 0.8.2")
    texts = [x["text"] for x in status["findings"] if x["kind"] == "version_mismatch"]
    assert status["ok"] and any("1.5.2" in x and "2.5.0" in x for x in texts)
    assert any("0.8.2" in x and "0.9.8" in x for x in texts)


def test_what_is_refused_before_it_is_loaded(row):
    other = row.run(identity={"platform": "rk3588"})
    assert not other["ok"] and "rk3588" in finding(other, "platform")["text"]
    row_of_other = row.run(platform="rk3588", identity={"platform": "rk3588"})
    assert "rockchip,rk3576" in finding(row_of_other, "platform")["text"]
    contract = row.run(contract_digest="0" * 64)
    assert "0" * 64 in finding(contract, "contract")["text"]
    custom = row.run(artifact="kvgate-double\nend\n")
    assert "model.rknn" in finding(custom, "contract")["text"]
    memory = row.run(memory_bytes=1 << 50)
    assert "needs 1073741824 MiB" in finding(memory, "memory")["text"]
    for status in (other, row_of_other, contract, custom, memory):
        assert status["phase"] == "check" and status["exit"] is None and status["ledger"] is None


def test_a_board_without_the_runtime_and_a_container_without_the_device(emulated, runtime64, tmp_path):
    board = emulated()
    with rows.Row(board, "lite", tmp_path) as row:
        status = row.run()
        assert not status["ok"] and status["phase"] == "init"
        assert "dynamic library" in finding(status, "engine_missing")["text"]
        board.write(".dockerenv", "")
        (board.path / "dev/dri/renderD129").unlink()
        status = row.run()
        assert not status["ok"] and "container" in finding(status, "engine_missing")["text"]
