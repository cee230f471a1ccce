"""probe: the self-test graphs of kvgate.remote.selftests, compiled for a platform (for `host` as they are).

Writes {name}/model.onnx, contract.json (the graph's), feeds.npz, and for a chip model.rknn and artifact.json.
"""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.compiler import toolkit
from kvgate.compiler.request import Request
from kvgate.contract import canonical
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.remote import selftests

HOST = "host"


def run(job: Job) -> dict[str, Any]:
    """Raises record.Blocked where the toolkit does not compile one."""
    platform = job.wildcards["platform"]
    names = []
    for probe in selftests.probes():
        folder = job.folder / probe.name
        folder.mkdir(exist_ok=True)
        record.write_bytes(folder / "model.onnx", probe.model().SerializeToString(deterministic=True))
        record.write_bytes(folder / "contract.json", probe.contract.to_json().encode())
        buffer = io.BytesIO()
        np.savez(buffer, **probe.feeds)  # type: ignore[arg-type]
        record.write_bytes(folder / "feeds.npz", buffer.getvalue())
        names += [f"{probe.name}/{x}" for x in ("model.onnx", "contract.json", "feeds.npz")]
        if platform != HOST:
            _compile(probe, folder, platform, job.config["timeout"])
            names += [f"{probe.name}/{x}" for x in ("model.rknn", "artifact.json")]
    return {"files": {name: record.sha256(job.folder / name) for name in names}}


def _compile(probe: selftests.Probe, folder: Path, platform: str, timeout: float) -> None:
    custom = canonical({"kvgate": probe.contract.digest})
    work = toolkit.scratch(folder)
    try:
        request = Request(
            graph=str((folder / "model.onnx").resolve()),
            contract=str((folder / "contract.json").resolve()),
            tables="",
            result=str((work / "result.json").resolve()),
            artifact=str((work / "model.rknn").resolve()),
            observations=str(work.resolve()),
            platform=platform,
            dtype="fp16",
            config={},
            build={},
            dataset=None,
            custom=custom,
            mask=-1.0,
        )
        outcome = toolkit.compile(request, work, folder / "toolkit.log", timeout)
        if outcome.reason:
            raise outcome.blocked(f"self test {probe.name}: ")
        Path(request.artifact).replace(folder / "model.rknn")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    record.write(folder / "artifact.json", {"custom_string": custom})
