"""run: a row on a board. Brings the board what it lacks, runs the programs there, takes observations and times back.

Reads the graph's folder (export), the traces, for a chip the artifact's (build), and the self test's record, which says
whether this board can be believed. Writes observations/{program}.npz and run.json, and beside them board/: what else
the agent returned, and session.json (the board's greeting, seconds, its stderr), which differs between equal runs.
"""

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.contract import Contract
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.observe import spread
from kvgate.remote import agent_zip, untrusted
from kvgate.remote.session import Refused, Session, Trouble

LOAD = 120.0  # seconds for a board to load an artifact
CORES = {"auto": 0, "0": 1, "1": 2, "2": 4, "0_1": 3, "0_1_2": 7, "all": 0xFFFF}  # the runtime's masks
_FIELDS = ("phase", "exit", "signal", "core_mask", "ledger", "environment", "versions")
_SIDE = "board"
_ARRIVING = ".arriving"


@dataclass(frozen=True)
class Request:
    """What a board is asked: the job as its agent reads it, and the files that it needs by sha256."""

    job: dict[str, Any]
    files: dict[str, Path]
    contract: Contract


def run(job: Job) -> dict[str, Any]:
    """Raises record.Blocked where the board cannot run it; with `again` where it was not to be reached."""
    for name in ("observations", _SIDE, _ARRIVING):
        shutil.rmtree(job.folder / name, ignore_errors=True)
    board = job.config["board"]
    facts: dict[str, Any] = {"board": job.wildcards["backend"], "engine": board["engine"]}
    asked = request(job)
    try:
        status = _talk(job, asked)
        if not status["ok"]:
            raise record.Blocked(status["reason"], status["findings"], **facts, **_body(status))
        for name, program in job.config["programs"].items():
            path = job.folder / _ARRIVING / f"observations/{name}.npz"
            trace = job.file(f"trace.{name}", "trace.npz")
            steps = _steps(trace, job.config["isolated"], asked.contract.cache.capacity)
            untrusted.observations(path, asked.contract, {x: steps[x] for x in program["histories"]})
    except Trouble as why:
        raise why.blocked(**facts) from None
    except untrusted.Bad as why:
        raise record.Blocked(str(why), [record.finding("answer", str(why))], **facts) from None
    else:
        files = _accept(job, status["files"])
    finally:
        shutil.rmtree(job.folder / _ARRIVING, ignore_errors=True)
    return {**facts, **_body(status), "files": files}


def _talk(job: Job, asked: Request) -> dict[str, Any]:
    """The status of the board's last message; its files are in the folder `.arriving`. Raises Lost and Refused."""
    board, limits = job.config["board"], job.config["limits"]
    agent = agent_zip.build(board["engine"], asked.contract.strategy)
    room = untrusted.room(asked.contract, len(job.config["programs"]))
    side: dict[str, Any] = {"seconds": {}}
    clock = _Clock(side["seconds"])
    try:
        with Session(board, agent, limits["run_seconds"]) as session:
            clock.lap("start")
            side["hello"] = session.hello
            able(session.hello, board["engine"])
            session.push(asked.files, say)
            clock.lap("files")
            side["sent_bytes"] = session.sent
            status = session.run(asked.job, job.folder / _ARRIVING, say, room)
            clock.lap("run")
            side["stderr"] = status["stderr_tail"]
            return status
    finally:
        record.write(job.folder / _SIDE / "session.json", side)


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.began = seconds, time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self.began = round(now - self.began, 3), now


def able(hello: Mapping[str, Any], engine: str) -> None:
    """Before anything travels. Raises Refused on a board without what the engine needs."""
    found = hello["engines"].get(engine)
    if not isinstance(found, dict) or "error" in found:
        why = found.get("error") if isinstance(found, dict) else "the agent does not know it"
        raise Refused(f"the board has no engine {engine}: {untrusted.drivers.clean(why)}", "engine_missing")


def request(job: Job) -> Request:
    """Raises record.Blocked on a board of another chip than the artifact's."""
    config, board, platform = job.config, job.config["board"], job.wildcards["platform"]
    if board["platform"] != platform:
        text = f"board {job.wildcards['backend']}: got a {board['platform']}, the artifact is for {platform}"
        raise record.blocked("platform", text)
    contract, graph = graph_files.contract(job), job.read("export")["files"]
    names = {name: _held(job, "export", name) for name in ("contract.json", "host.npz")}
    names |= {f"trace/{name}.npz": _held(job, f"trace.{name}", "trace.npz") for name in config["programs"]}
    custom = ""
    if board["engine"] == "onnxruntime":
        names |= {name: _held(job, "export", name) for name in graph if name not in names}
        memory = sum(names[name][0].stat().st_size for name in graph) + contract.history_bytes(4)
    else:
        built = job.read("build")
        names["model.rknn"] = _held(job, "build", "model.rknn")
        names["artifact.json"] = _held(job, "build", "contract.json")
        custom = record.read(names["artifact.json"][0])["custom_string"]
        known = (built.get(name) or 0 for name in ("weight_bytes", "internal_bytes", "artifact_bytes"))
        memory = sum(known) + contract.history_bytes()
    body = {
        "engine": board["engine"],
        "files": {name: sha for name, (_, sha) in names.items()},
        "platform": platform,
        "custom_string": custom,
        "contract_digest": contract.digest,
        "mask": config["mask"],
        "programs": {name: {"histories": program["histories"]} for name, program in config["programs"].items()},
        "isolated": config["isolated"],
        "core_mask": CORES[board["core_mask"]],
        "clocks": board["clocks"],
        "memory_bytes": memory,
        "timing": config["timing"],
        "seconds": {"load": LOAD, "step": config["limits"]["step_seconds"]},
        "perf": board["engine"] == "native",
    }
    return Request(body, {sha: path for path, sha in names.values()}, contract)


def _held(job: Job, label: str, name: str) -> tuple[Path, str]:
    """A file of an input, and its sha256."""
    return job.file(label, name), job.read(label)["files"][name]


def _steps(path: Path, isolated: int, capacity: int) -> dict[str, int]:
    """How many steps each history of a trace has, as `observe` runs them: what is cut off is no observation."""
    with np.load(path) as trace:
        tokens, prompt = len(trace["tokens"]), int(trace["prompt"])
    room = min(tokens - (prompt < tokens), capacity)
    return {"isolated": len(spread(isolated, room)), "forced": room, "free": capacity + 1}


def _body(status: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into the record of a status, whatever it says."""
    body = {name: status[name] for name in _FIELDS}
    return body | ({"findings": status["findings"]} if status["ok"] else {})


def _accept(job: Job, digests: Mapping[str, str]) -> dict[str, str]:
    """Move what arrived to its place: observations beside the record, all else below board/. Returns their sha256."""
    files = {}
    for name, sha in digests.items():
        place = name if name.startswith("observations/") else f"{_SIDE}/{name}"
        (job.folder / place).parent.mkdir(exist_ok=True)
        (job.folder / _ARRIVING / name).replace(job.folder / place)
        files[place] = sha
    return files


def say(text: str) -> None:
    print(text, file=sys.stderr)
