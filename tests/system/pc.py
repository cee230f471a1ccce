"""The tiny model through the stages whose results another PC must share: their sha256, by name. Not a test itself.

Runs in a process of its own, on this machine's CPU or on one that qemu-user emulates.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvgate.compiler import artifact, calibration
from kvgate.contract import Contract
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.planning import config
from kvgate.stages import build, export, prepare
from kvgate.strategies.cpu_managed.host import Host
from tiny import fetched, random_source, traced

ROOT = Path(__file__).parents[2]
_SECONDS = 3600  # emulated
TEXT = "A plain text of some length, and then some more."
CAPACITY = 32
QEMU = "qemu-x86_64-static"
WEIGHTS: dict[str, list[dict[str, Any]]] = {
    "plain": [],
    "turned": [{"name": name, "options": {}} for name in ("rotate", "vrot", "krot", "qkv")],
    "gptq": [{"name": "gptq", "options": {"group": 16}}],
    "wide": [{"name": "widen", "options": {"group": 16}}],
}
BUILT = "turned"


def emulated(folder: Path, cpu: str) -> Path:
    """A Python on another CPU, with this one's packages; what it starts by `sys.executable` runs there too."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {QEMU} -cpu {cpu} -0 "$0" {Path(sys.executable).resolve()} "$@"\n')
    python.chmod(0o755)
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    return python


def made(python: Path, folder: Path, compile: bool = False, **environment: str) -> dict[str, str]:
    """What is printed by this module in a process of that Python."""
    folder.mkdir()
    paths = {"PYTHONPATH": f"{ROOT / 'workflow'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [str(python), __file__, str(folder), *(["compile"] if compile else [])]
    done = subprocess.run(
        command, env=os.environ | paths | environment, capture_output=True, text=True, timeout=_SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "found.json").read_text())


class Pc:
    def __init__(self, folder: Path) -> None:
        self.results, self.found = folder / "results", {}  # type: Path, dict[str, str]
        self.folder = folder

    def all(self, compile: bool) -> dict[str, str]:
        checkpoint = fetched(self.results, random_source(max_position_embeddings=128))
        self.note("fetch", checkpoint / "model.safetensors")
        for name, program in {
            "chat": {"kind": "chat", "tokens": 8},
            "text": {"kind": "text", "tokens": 24},
            "calibration": {"kind": "calibration", "tokens": 48, "generated": 24},
        }.items():
            body, path = traced(self.results, TEXT, self.folder, **program)
            self.note(f"trace {name}", path)
        record.write(path.with_name("trace.json"), body | {"status": "ok"})
        self.text = path
        for name in WEIGHTS:
            self.graph(name)
        self.feeds(self.results / "models/tiny/graphs/plain/s/decode")
        if compile:
            self.built(BUILT)
        # What float32 gives: another PC may differ here, or nothing above is proved.
        self.found["float32"] = hashlib.sha256(torch.linspace(-9, 9, 9999).exp().numpy().tobytes()).hexdigest()
        return self.found

    def note(self, what: str, path: Path) -> None:
        self.found[what] = record.sha256(path)

    def graph(self, name: str) -> None:
        fetch = {"fetch": self.results / "models/tiny/checkpoint/manifest.json"}
        inputs = fetch | {"calibration.c": self.text.with_name("trace.json")}
        made = self.job("prepare", name, {"weights": {"steps": WEIGHTS[name]}}, inputs)
        record.write(made.record, prepare.run(made) | {"status": "ok"})
        strategy = {"module": "cpu_managed", "capacity": CAPACITY, "form": "recipe", "layers": 0}
        strategy |= {"layout": "channels", "rank": 4, "packing": "apart"}
        inputs = fetch | {"prepare": made.record}
        exported = self.job("export", name, {"strategy": strategy}, inputs)
        record.write(exported.record, export.run(exported) | {"status": "ok"})
        self.note(f"{name} weights.json", made.record)
        for file in ("weights.bin", "model.onnx", "host.npz"):
            self.note(f"{name} {file}", exported.folder / file)

    def feeds(self, graph: Path) -> None:
        """Calibration samples of a graph."""
        contract = Contract.from_json((graph / "contract.json").read_text())
        texts, drawn = calibration.tokens({"c": self.text})
        samples = calibration.choose(texts, CAPACITY, 4, drawn)
        folder = self.folder / "feeds"
        folder.mkdir()
        with np.load(graph / "host.npz") as tables:
            calibration.write(folder, contract, Host(contract, dict(tables), -1e4), {"c": self.text}, samples)
        for path in sorted(folder.glob("*.npy")):
            self.note(f"feeds {path.name}", path)

    def built(self, name: str) -> None:
        quant = config.load(ROOT, {})["quants"]["w8a8"]
        settings = {"quant": quant, "programs": {}, "isolated": 0, "timeout": 3000, "calibration": {"samples": 4}}
        exported = self.job("export", name, {}, {}).record
        job = self.job(
            "build", name, settings, {"export": exported, "calibration.c": self.text.with_name("trace.json")}
        )
        build.run(job)
        artifact._ADDRESS = range(1 << 16)  # an emulated program's heap lies elsewhere
        self.found["w8a8"] = artifact.read(job.folder / "model.rknn").content_digest

    def job(self, stage: str, weights: str, settings: dict[str, Any], inputs: dict[str, Path]) -> Job:
        names = {"model": "tiny", "weights": weights, "form": "recipe", "strategy": "s", "part": "decode"}
        made = Job(stage, names | {"platform": "rk3576", "quant": "w8a8"}, settings, inputs, self.results)
        made.folder.mkdir(parents=True, exist_ok=True)
        return made


if __name__ == "__main__":
    found = Pc(Path(sys.argv[1])).all(compile="compile" in sys.argv)
    Path(sys.argv[1], "found.json").write_text(json.dumps(found))
