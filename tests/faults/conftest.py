"""The tiny sweeps, run once a session; a test gets a copy that it may spoil."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from kvgate.checkpoint import reference
from kvgate.compiler import toolkit
from kvgate.jobs import record
from planting import CHIP, HOST, INT8, Sweep
from tiny import fetched, random_source


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


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes what would be compiled, and compiles nothing."""
    asked: list[Any] = []

    def compile_(request: Any, *args: Any, **more: Any) -> Any:
        asked.append(request)
        raise record.Blocked("compiled")

    monkeypatch.setattr(toolkit, "compile", compile_)
    return asked


@pytest.fixture
def mine(host_rows: Sweep, tmp_path: Path) -> Path:
    """A user's own folder, the sweep's model in it."""
    path = tmp_path / "mine"
    shutil.copytree(host_rows.path("fetch").parent, path, ignore=shutil.ignore_patterns("manifest*", ".*"))
    return path


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = fetched(tmp_path_factory.mktemp("llama"), random_source(hidden_size=64, intermediate_size=64))
    return reference.load(made)
