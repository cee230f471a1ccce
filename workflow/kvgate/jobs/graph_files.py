"""A graph's contract and its host half, opened from what the export wrote. numpy only."""

from importlib import import_module
from pathlib import Path

import numpy as np

from kvgate.contract import Contract
from kvgate.jobs.job import Job, changed
from kvgate.strategies.host import Host


def contract(job: Job) -> Contract:
    """Of the graph that the job reads. Raises record.Blocked where it, or what it says of host.npz, is not recorded."""
    made = Contract.from_json(job.file("export", "contract.json").read_text(encoding="utf-8"))
    exported = job.read("export")
    if made.digest != exported.get("contract") or made.host_sha256 != exported["files"].get("host.npz"):
        raise changed(job.results, job.inputs["export"], "contract.json")
    return made


def graph(job: Job) -> Path:
    """model.onnx, beside the weights that it names. Raises record.Blocked."""
    if "weights.bin" in job.read("export")["files"]:
        job.file("export", "weights.bin")
    return job.file("export", "model.onnx")


def opened(job: Job, contract: Contract, mask: float) -> Host:
    """mask: additive mask value, finite and negative. Raises record.Blocked."""
    half = import_module(f"kvgate.strategies.{contract.strategy}.host")
    with np.load(job.file("export", "host.npz")) as tables:
        return half.Host(contract, dict(tables), mask)
