"""The tiny sweeps, run once a session; a test gets a copy that it may spoil."""

import pytest
from planting import CHIP, HOST, INT8, Sweep


@pytest.fixture(scope="session")
def host_rows(tmp_path_factory):
    """Rows of ONNX Runtime: cpu_managed and fixed_max_blend."""
    made = Sweep(tmp_path_factory.mktemp("host"), HOST).run()
    assert made.failed == {} and made.body("judge")["verdict"] == "pass"
    return made


@pytest.fixture(scope="session")
def chip_rows(tmp_path_factory):
    """A row of rk3576 in fp16, compiled by the real toolkit; beside it what a row in w8a8 would calibrate with."""
    made = Sweep(tmp_path_factory.mktemp("chip"), CHIP).run()
    assert made.failed == {} and made.body("judge")["verdict"] == "pass"
    assert made.planned(INT8).run("trace", until="trace").failed == {}
    return made


@pytest.fixture
def host(host_rows, tmp_path):
    return host_rows.copy(tmp_path)


@pytest.fixture
def chip(chip_rows, tmp_path):
    return chip_rows.copy(tmp_path)
