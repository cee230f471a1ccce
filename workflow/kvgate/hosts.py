"""The host half of a graph, opened from the graph's folder. numpy only."""

from importlib import import_module
from pathlib import Path

import numpy as np

from kvgate.contract import Contract
from kvgate.strategies.host import Host


def opened(folder: Path, contract: Contract, mask: float) -> Host:
    """folder: of the contract and host.npz. mask: additive mask value, finite and negative."""
    half = import_module(f"kvgate.strategies.{contract.strategy}.host")
    with np.load(folder / "host.npz") as tables:
        return half.Host(contract, dict(tables), mask)
