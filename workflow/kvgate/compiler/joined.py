"""What a row that was built in pieces is as a whole: one observation a program, one record."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvgate import observe
from kvgate.contract import HIDDEN, Contract, sha256_text
from kvgate.jobs import record
from kvgate.jobs.job import Job

Array = np.ndarray
_SUMS = ("rows", "cycles", "traffic_bytes", "weight_bytes", "internal_bytes", "artifact_bytes")
_COUNTS = ("operators", "cpu_operators", "operator_cycles")
_LISTS = ("cpu_names", "findings")


def body(job: Job, pieces: Sequence[tuple[Contract, Path]], bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The build's record, over the pieces' own; writes the joined observations and the artifact's contract.

    pieces: the contract and the folder of each, in the order in which they run.
    """
    files: dict[str, str] = {}
    for (contract, _), of in zip(pieces, bodies, strict=True):
        files |= {f"{contract.part}/{name}": sha for name, sha in of["files"].items()}
    for label in job.labels("trace"):
        name = label.partition(".")[2]
        trace = observe.Trace.load(str(job.file(label, "trace.npz")))
        seen = observation(name, pieces, trace, job.config["programs"][name]["histories"])
        buffer = io.BytesIO()
        np.savez(buffer, **seen)  # type: ignore[arg-type]
        file = f"observations/{name}.npz"
        files[file] = record.write_bytes(job.folder / file, buffer.getvalue())
    boundary = {side: [t for of in bodies for t in of["boundary"][side]] for side in ("inputs", "outputs")}
    first = record.read(pieces[0][1] / "contract.json")
    record.write(job.folder / "contract.json", first | {"boundary": boundary, "custom_string": ""})
    files["contract.json"] = record.sha256(job.folder / "contract.json")
    found: dict[str, Any] = {name: _total([of[name] for of in bodies]) for name in _SUMS}
    found |= {name: dict(sorted(sum((Counter(of[name]) for of in bodies), Counter()).items())) for name in _COUNTS}
    found |= {name: [x for of in bodies for x in of[name]] for name in _LISTS}
    return bodies[0] | {
        **found,
        "hybrid": {k: v for of in bodies for k, v in (of["hybrid"] or {}).items()},
        "boundary": boundary,
        "risks": list(dict.fromkeys(x for of in bodies for x in of["risks"])),
        "sha256": None,
        "content_digest": sha256_text(" ".join(of["content_digest"] for of in bodies)),
        "pieces": {c.part: {x: of[x] for x in (*_SUMS, "sha256")} for (c, _), of in zip(pieces, bodies, strict=True)},
        "files": files,
    }


def _total(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(values)  # type: ignore[arg-type]


def observation(
    program: str, pieces: Sequence[tuple[Contract, Path]], trace: observe.Trace, histories: Sequence[str]
) -> dict[str, Array]:
    """All that the pieces returned of a program, without the streams between them; what was spoken by the last one.

    pieces: the contract of each, and the folder that has its `observations`.
    """
    found: dict[str, Array] = {}
    for _, folder in pieces:
        with np.load(folder / "observations" / f"{program}.npz") as file:
            for name in (x for x in file.files if not x.endswith(f"/{HIDDEN}")):
                found[name] = _together(name, found.get(name), file[name])
    if "free" in histories:
        found |= spoken(trace, found)
    if "forced" not in histories and "free" not in histories:
        return {name: x for name, x in found.items() if not name.startswith("forced/")}
    return found


def _together(name: str, one: Array | None, two: Array) -> Array:
    """An array that several pieces have: which steps were run must be equal, the worst disturbance counts."""
    if one is None:
        return two
    if name.endswith("/disturbed"):
        return np.maximum(one, two)
    if name.endswith("/logits"):  # of a head in several pieces
        return np.concatenate([one, two], axis=1)
    if not np.array_equal(one, two):
        raise ValueError(f"observations: {name} differs between pieces")
    return one


def spoken(trace: observe.Trace, seen: Mapping[str, Array]) -> dict[str, Array]:
    """The free run as far as the forced one is it: to the first token that is not the reference's, that one too.

    What a row in pieces would say after it nobody has run: all pieces would have to be in memory at once.
    """
    best = seen["forced/logits"].argmax(axis=1)
    for position, token in zip(seen["forced/positions"], best, strict=True):
        if trace.prompt - 1 <= position < len(trace.tokens) - 1 and token != trace.tokens[position + 1]:
            own = [*trace.tokens[trace.prompt : position + 1], token]
            return {"free/tokens": np.array(own, np.int64), "free/diverged": np.array(position - (trace.prompt - 1))}
    room = len(best)
    return {"free/tokens": trace.tokens[trace.prompt : room + 1].astype(np.int64), "free/diverged": np.array(-1)}
