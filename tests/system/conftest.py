"""Boards for the system tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from system import arm64, double


@pytest.fixture(scope="session")
def runtime64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The double of the C runtime for arm64."""
    return double.build(tmp_path_factory.mktemp("arm64") / "librknnrt.so", "aarch64")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., arm64.Board]:
    """Makes emulated boards: (platform="rk3576", runtime=None)."""
    try:
        arm64.base()
    except arm64.Missing as why:
        pytest.skip(f"emulated board: {why}")
    return lambda **what: arm64.Board(tmp_path_factory.mktemp("board"), **what)
