"""selftest: the probes on a board. One that gets them wrong gets no pass for anything else.

Reads the probes' folders. Writes selftest.json, and beside it {probe}/outputs.npz as the board returned them.
"""

import shutil
from typing import Any

import numpy as np

from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.remote import agent_zip, selftests, untrusted
from kvgate.remote.session import Session, Trouble
from kvgate.stages.run import CORES, LOAD, able, say

_OUTPUTS = "outputs.npz"
_ROOM = 64 << 20  # bytes that may come back


def run(job: Job) -> dict[str, Any]:
    """Raises record.Blocked where the board cannot be asked; with `again` where it was not to be reached."""
    board = job.config["board"]
    tests: dict[str, list[str]] = {}
    files: dict[str, str] = {}
    facts: dict[str, Any] = {}
    try:
        agent = agent_zip.build(board["engine"], "")
        with Session(board, agent, job.config["limits"]["run_seconds"]) as session:
            able(session.hello, board["engine"])
            for probe in selftests.probes():
                shutil.rmtree(job.folder / probe.name, ignore_errors=True)
                tests[probe.name], facts = _test(job, probe, session)
                if (job.folder / probe.name / _OUTPUTS).exists():
                    files[f"{probe.name}/{_OUTPUTS}"] = record.sha256(job.folder / probe.name / _OUTPUTS)
    except Trouble as why:
        raise why.blocked() from None
    wrong = [text for lines in tests.values() for text in lines]
    return {"passed": not wrong, "reason": wrong[0] if wrong else "", "tests": tests, "files": files, **facts}


def _test(job: Job, probe: selftests.Probe, session: Session) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, a line each, and what the board said of itself."""
    board, limits = job.config["board"], job.config["limits"]
    known = job.read("probe")["files"]
    artifact = ["model.onnx"] if board["engine"] == "onnxruntime" else ["model.rknn", "artifact.json"]
    names = {name: known[f"{probe.name}/{name}"] for name in ("contract.json", "feeds.npz", *artifact)}
    paths = {name: job.file("probe", f"{probe.name}/{name}") for name in names}
    custom = record.read(paths["artifact.json"])["custom_string"] if "artifact.json" in names else ""
    request = {
        "engine": board["engine"],
        "files": names,
        "platform": board["platform"],
        "custom_string": custom,
        "contract_digest": probe.contract.digest,
        "pieces": [],
        "parts": {},
        "core_mask": CORES[board["core_mask"]],
        "clocks": "record",
        "memory_bytes": sum(path.stat().st_size for path in paths.values()),
        "seconds": {"load": LOAD, "step": limits["step_seconds"]},
        "perf": False,
    }
    session.push({sha: paths[name] for name, sha in names.items()}, say)
    status = session.run(request, job.folder / probe.name, say, _ROOM, expected=())
    facts = {name: status[name] for name in ("environment", "versions")}
    if not status["ok"]:
        return [f"{probe.name}: {status['reason']}"], facts
    path = job.folder / probe.name / _OUTPUTS
    try:
        untrusted.headers(path)
    except untrusted.Bad as why:
        return [f"{probe.name}: {why}"], facts
    with np.load(path, allow_pickle=False) as outputs:
        return selftests.differences(probe, dict(outputs)), facts
