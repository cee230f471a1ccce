"""run: a row on a board. Brings the board what it lacks, runs the programs there, takes observations and times back.

Reads the graphs' folders (export), the traces, for a chip the artifacts' (build), and the self test's record, which
says whether this board can be believed. All parts of the row go in one job. Writes observations/{program}.npz, those of
another part than `decode` in a folder of its name, and run.json, and beside them board/: what else the agent returned,
and session.json (the board's greeting, seconds, its stderr), which differs between equal runs.
"""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgate import observe
from kvgate.contract import Contract
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.observe import Trace
from kvgate.remote import agent_zip, untrusted
from kvgate.remote.session import Refused, Session, Trouble

LOAD = 120.0  # seconds for a board to load an artifact
CORES = {"auto": 0, "0": 1, "1": 2, "2": 4, "0_1": 3, "0_1_2": 7, "all": 0xFFFF}  # the runtime's masks
_FIELDS = ("phase", "exit", "signal", "core_mask", "ledger", "environment", "versions")
_SIDE = "board"
_ARRIVING = ".arriving"
Held = tuple[Path, str]  # a file of an input, and its sha256


@dataclass(frozen=True)
class Request:
    """What a board is asked: the job as its agent reads it, and the files that it needs by sha256."""

    job: dict[str, Any]
    files: dict[str, Path]
    contract: Contract  # of `decode`
    parts: dict[str, Contract]  # of the others


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
        _hold(job, asked)
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
    contracts = (asked.contract, *asked.parts.values())
    room = sum(untrusted.room(x, len(job.config["programs"])) for x in contracts)
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
    decode = _decode(job)
    others = {label.partition(".")[2]: graph_files.contract(job, label) for label in job.labels("export")[1:]}
    parts = {part: _part(job, part, contract) for part, contract in others.items()}
    files = {"contract.json": _held(job, "export", "contract.json"), "host.npz": _held(job, "export", "host.npz")}
    files |= {f"trace/{name}.npz": _held(job, f"trace.{name}", "trace.npz") for name in config["programs"]}
    for artifact in (*decode.values(), *parts.values()):
        files |= artifact.files
    whole = decode.get("")
    contract = graph_files.contract(job)
    on_chip = board["engine"] != "onnxruntime"
    body = {
        "engine": board["engine"],
        "files": {name: sha for name, (_, sha) in files.items()},
        "platform": platform,
        "contract_digest": contract.digest,
        "custom_string": whole.custom if whole else "",
        "pieces": [{"part": name, **x.told()} for name, x in decode.items() if name],
        "parts": {name: x.told() for name, x in parts.items()},
        "mask": config["mask"],
        "programs": {name: {"histories": program["histories"]} for name, program in config["programs"].items()},
        "isolated": config["isolated"],
        "core_mask": CORES[board["core_mask"]],
        "clocks": board["clocks"],
        "memory_bytes": _memory(job, files, [contract, *others.values()], on_chip),
        "timing": config["timing"],
        "seconds": {"load": LOAD, "step": config["limits"]["step_seconds"]},
        "perf": board["engine"] == "native",
    }
    return Request(body, {sha: path for path, sha in files.values()}, contract, others)


@dataclass(frozen=True)
class Artifact:
    """A graph that the board runs, or what was built of it: its files by their names in the job."""

    contract: Contract
    custom: str  # the custom string; empty where nothing was built
    files: dict[str, Held]

    def told(self) -> dict[str, str]:
        return {"contract_digest": self.contract.digest, "custom_string": self.custom}


def _decode(job: Job) -> dict[str, Artifact]:
    """The pieces of `decode` in the order in which they run; the whole under an empty name where it is one."""
    pieces = graph_files.pieces(job)
    if not pieces:
        return {"": _part(job, "", graph_files.contract(job))}
    return {x.part: _piece(job, x) for _, x in pieces}


def _part(job: Job, part: str, contract: Contract) -> Artifact:
    """An artifact with a record of its own; part: empty of `decode`."""
    dot, slash = (f".{part}", f"{part}/") if part else ("", "")
    told = {f"{slash}contract.json": _held(job, f"export{dot}", "contract.json")}
    if job.config["board"]["engine"] == "onnxruntime":
        names = [x for x in ("model.onnx", "weights.bin") if x in job.read(f"export{dot}")["files"]]
        return Artifact(contract, "", told | {f"{slash}{x}": _held(job, f"export{dot}", x) for x in names})
    return _built(job, f"build{dot}", "", slash, contract, told)


def _piece(job: Job, contract: Contract) -> Artifact:
    graph, own = graph_files.piece_names(contract.part)
    place = f"{contract.part}/"
    told = {f"{place}contract.json": _held(job, "export", own)}
    if job.config["board"]["engine"] != "onnxruntime":
        return _built(job, "build", place, place, contract, told)
    names = {x: x for x in ("weights.bin", "head.bin") if x in job.read("export")["files"]} | {"model.onnx": graph}
    return Artifact(contract, "", told | {f"{place}{x}": _held(job, "export", of) for x, of in names.items()})


def _built(job: Job, label: str, at: str, place: str, contract: Contract, told: dict[str, Held]) -> Artifact:
    """at: the artifact's folder beside the build's record; place: in the job."""
    made = _held(job, label, f"{at}contract.json")
    files = told | {f"{place}artifact.json": made, f"{place}model.rknn": _held(job, label, f"{at}model.rknn")}
    return Artifact(contract, record.read(made[0])["custom_string"], files)


def _memory(job: Job, files: Mapping[str, Held], contracts: Sequence[Contract], on_chip: bool) -> int:
    """Bytes that all artifacts need together, as all are open at once."""
    if not on_chip:
        graphs = {sha: path for name, (path, sha) in files.items() if name.rpartition(".")[2] in ("onnx", "bin")}
        return sum(path.stat().st_size for path in graphs.values()) + contracts[0].history_bytes(4)
    builds = [job.read(label) for label in job.labels("build")]
    known = (built.get(name) or 0 for built in builds for name in ("weight_bytes", "internal_bytes", "artifact_bytes"))
    return sum(known) + sum(x.history_bytes() for x in contracts)


def _hold(job: Job, asked: Request) -> None:
    """What came is what was asked for, part by part. Raises untrusted.Bad."""
    for part, contract in {"": asked.contract, **asked.parts}.items():
        for name, program in job.config["programs"].items():
            path = job.folder / _ARRIVING / "observations" / part / f"{name}.npz"
            trace = Trace.load(str(job.file(f"trace.{name}", "trace.npz")))
            steps = _steps(trace, contract, program["histories"], job.config["isolated"])
            untrusted.observations(path, contract, steps, trace.at if trace.replaced else None)


def _held(job: Job, label: str, name: str) -> Held:
    return job.file(label, name), job.read(label)["files"][name]


def _steps(trace: Trace, contract: Contract, histories: Sequence[str], isolated: int) -> dict[str, list[int]]:
    """The positions of each history that a part has, as `observe` runs them: what is cut off is no observation. Of the
    free run those that it can have at most."""
    asked = observe.histories(contract, histories)
    capacity = contract.cache.capacity
    found = observe.planned(trace, capacity, asked, isolated, contract.tokens)
    own = {"free": list(range(capacity + 1))} if "free" in asked else {}
    return {x: (found | own)[x] for x in asked}


def _body(status: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into the record of a status, whatever it says."""
    body = {name: status[name] for name in _FIELDS}
    return body | ({"findings": status["findings"]} if status["ok"] else {})


def _accept(job: Job, digests: Mapping[str, str]) -> dict[str, str]:
    """Move what arrived to its place: observations beside the record, all else below board/. Returns their sha256."""
    files = {}
    for name, sha in digests.items():
        place = name if name.startswith("observations/") else f"{_SIDE}/{name}"
        (job.folder / place).parent.mkdir(parents=True, exist_ok=True)
        (job.folder / _ARRIVING / name).replace(job.folder / place)
        files[place] = sha
    return files


def say(text: str) -> None:
    print(text, file=sys.stderr)
