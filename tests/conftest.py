"""Tests marked `system` need packages of the machine: they run with --system (make test-system), else are named."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--system", action="store_true", help="run the tests that need system packages")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--system"):
        return
    for item in items:
        if item.get_closest_marker("system"):
            item.add_marker(pytest.mark.skip(reason="needs system packages: make test-system"))
