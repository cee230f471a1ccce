"""A graph's contract and its host half, opened from what the export wrote. numpy only."""

from importlib import import_module
from pathlib import Path

import numpy as np

from kvgate.contract import Contract
from kvgate.jobs import record
from kvgate.jobs.job import Job, changed
from kvgate.strategies.host import Host


def contract(job: Job, label: str = "export") -> Contract:
    """Of the graph that the job reads. Raises record.Blocked where it, or what it says of host.npz, is not recorded."""
    made = Contract.from_json(job.file(label, "contract.json").read_text(encoding="utf-8"))
    exported = job.read(label)
    if made.digest != exported.get("contract") or made.host_sha256 != exported["files"].get("host.npz"):
        raise changed(job.results, job.inputs[label], "contract.json")
    return made


def graph(job: Job, label: str = "export") -> Path:
    """model.onnx, beside the weights that it names. Raises record.Blocked."""
    if "weights.bin" in job.read(label)["files"]:
        job.file(label, "weights.bin")
    return job.file(label, "model.onnx")


def opened(job: Job, contract: Contract, mask: float) -> Host:
    """mask: additive mask value, finite and negative. Raises record.Blocked."""
    half = import_module(f"kvgate.strategies.{contract.strategy}.host")
    with np.load(job.file("export", "host.npz")) as tables:
        return half.Host(contract, dict(tables), mask)


def piece_names(part: str) -> list[str]:
    """The files of a piece beside the whole graph: its graph, which reads the same weights, and its contract."""
    return [f"{part}.onnx", f"{part}.json"]


def put_piece(folder: Path, contract: Contract, model: bytes) -> None:
    """Write a piece's files."""
    graph, told = piece_names(contract.part)
    record.write_bytes(folder / graph, model)
    record.write_bytes(folder / told, (contract.to_json() + "\n").encode())


def pieces(job: Job) -> list[tuple[Path, Contract]]:
    """Graph and contract of every piece, in the order in which they run; none where the graph is one."""
    found, exported = [], job.read("export")
    for name in ("weights.bin", "head.bin"):
        if exported.get("pieces") and name in exported["files"]:
            job.file("export", name)
    for part in exported.get("pieces", []):
        graph, told = piece_names(part)
        made = Contract.from_json(job.file("export", told).read_text(encoding="utf-8"))
        found.append((job.file("export", graph), made))
    return found
