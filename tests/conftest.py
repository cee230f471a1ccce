"""Tests marked `system` need packages of the machine: they run with --system (make test-system), else are named."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--system", action="store_true", help="run the tests that need system packages")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--system"):
        return
    for item in items:
        if item.get_closest_marker("system"):
            item.add_marker(pytest.mark.skip(reason="needs system packages: make test-system"))


@pytest.fixture
def mounted() -> Iterator[Callable[[Path, str], None]]:
    """A function that mounts a small or read-only tmpfs; mode bits do nothing for root."""
    points: list[Path] = []

    def mount(path: Path, options: str) -> None:
        path.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mount: {done.stderr.strip()}")
        points.append(path)

    yield mount
    for path in points:
        subprocess.run(["umount", "-l", str(path)], check=True)
