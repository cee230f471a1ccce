"""Jobs for the agent on an emulated board, with the double's script for an artifact. Not a test itself."""

import hashlib
import importlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import standin
from board import rig
from kvgate import contract as c
from kvgate.observe import Trace
from kvgate.remote import agent_zip
from kvgate.remote.session import Limits, Session
from system import arm64, double

SLOW = Limits(connect=120, answer=240)  # an emulator on a busy machine
# Rank 4 in rows: its inputs are NHWC at the boundary, and heads, slots and channels all differ.
CONTRACT = standin.contract("cpu_managed", c.Cache(7, "rows", 4, "layer"))
TABLES = standin.tables(64)
CUSTOM = json.dumps({"kvgate": "0123456789abcdef"})


def trace() -> Trace:
    return standin.Model(standin.layers_of(CONTRACT)).generate([3, 1, 4], 3, TABLES, CONTRACT.windows)


def host() -> Any:
    half = importlib.import_module(f"kvgate.strategies.{CONTRACT.strategy}.host")
    return half.Host(CONTRACT, TABLES, -1e4)


class Rule:
    """What the double computes at half precision, by numpy: what a faithful engine must give."""

    def __init__(self, contract: c.Contract) -> None:
        self.contract = contract

    def step(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        stored = {name: x.astype(np.float16) for name, x in feeds.items()}
        found = double.expected(self.contract, stored)
        return {name: x.astype(np.float16).astype(np.float32) for name, x in found.items()}


class Row:
    """A session with the agent of one board; one job after the other."""

    def __init__(self, board: arm64.Board, engine: str, folder: Path) -> None:
        self.board, self.engine, self.folder = board, engine, folder
        entry = {"driver": "local", "address": "", "python": str(board.python), "work": str(folder / "work")}
        self.session = Session(entry, agent_zip.build(engine, CONTRACT.strategy), 1200, SLOW)

    def __enter__(self) -> "Row":
        self.session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)

    def run(
        self, *lines: str, artifact: str = "", identity: dict[str, Any] | None = None, **job: Any
    ) -> dict[str, Any]:
        """The status of a job whose artifact is the double's script with these lines."""
        names = {
            "model.rknn": (artifact or double.artifact(CONTRACT, *lines, custom=CUSTOM)).encode(),
            "contract.json": CONTRACT.to_json().encode(),
            "artifact.json": json.dumps({"identity": self.identity(identity), "custom_string": CUSTOM}).encode(),
            "host.npz": _npz(TABLES),
            "trace/chat.npz": _trace(self.folder / "trace.npz"),
        }
        files = {}
        for data in names.values():
            path = self.folder / hashlib.sha256(data).hexdigest()
            path.write_bytes(data)
            files[path.name] = path
        self.session.push(files)
        return self.session.run(
            rig.job(
                **{
                    "engine": self.engine,
                    "files": {name: hashlib.sha256(data).hexdigest() for name, data in names.items()},
                    "custom_string": CUSTOM,
                    "contract_digest": CONTRACT.digest,
                    "timing": {"warmup": 1, "steps": 4},
                    "seconds": {"load": 180, "step": 20},
                    **job,
                }
            ),
            self.folder / "results",
        )

    @staticmethod
    def identity(change: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"graph": CONTRACT.digest, "platform": "rk3576", "toolkit": "2.5.0", **(change or {})}


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _trace(path: Path) -> bytes:
    trace().save(str(path))
    return path.read_bytes()


def finding(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """The first finding of a kind. Fails with all of them where there is none."""
    found = [x for x in status["findings"] if x["kind"] == kind]
    assert found, status["findings"]
    first: dict[str, Any] = found[0]
    return first
