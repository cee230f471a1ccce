"""What a stage takes at its peak, in MB, of a model whose size is known: for the scheduler, and for a refusal.

Slopes that were measured, a little above what was seen: on SmolLM2-135M, Gemma 3 270M, and on the shapes of Qwen2 of
0.5 and 1.5 billion parameters. What is mapped from a file counts as memory. A build's is the model's `build_mb`.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvgate.jobs import record
from kvgate.jobs.job import record_path
from kvgate.planning.module_facts import constants, parsed

UNKNOWN = 2500  # of a model that was never fetched
_PROGRAM = 600  # Python with its libraries
_KEPT = 2048  # float64 that is kept for the next reader (checkpoint/mapped.py)
_COLUMNS = 65_536  # of a head in one piece (export/pieces.py)
_NOTHING = 500  # of a job that only passes on why the one before it is blocked
# In float32 weights: what a step with such a hook adds to a preparation.
_HOOKS = {"checkpoint": 2.0, "linear": 3.0, "matrices": 14.0}
_STATISTICS = 2.0


@dataclass(frozen=True)
class Size:
    """Of a model, in MB of float32."""

    weights: float  # all of them
    embedding: float  # the table alone; the head is as large
    layer: float
    row: float  # logits of one token
    columns: float  # of the head, as many as are in one piece


def known(results: Path, model: str) -> Size | None:
    """None where there is no usable checkpoint. Raises FileNotFoundError while the model was not fetched."""
    path = results / record_path("fetch", {"model": model})
    return _size(path, path.stat().st_mtime_ns)


@cache
def _size(path: Path, changed: int) -> Size | None:
    body = record.read(path)
    if body.get("status") != "ok":
        return None
    table = body["vocabulary"] * body["hidden"]
    layers = len({name.split(".")[1] for name in body["states"]})
    inside = body["parameters"] - table * (1 if body["tied"] else 2)
    found = (body["parameters"], table, inside / layers, body["vocabulary"], min(table, _COLUMNS * body["hidden"]))
    return Size(*(4 * x / 2**20 for x in found))


def needed(stage: str, wildcards: Mapping[str, str], config: Mapping[str, Any], results: Path) -> int:
    """Raises FileNotFoundError while the model was not fetched, but of fetch and tabulate."""
    if stage == "tabulate":
        return _PROGRAM + int(max((3.5 * x.embedding for x in _all(config, results)), default=UNKNOWN))
    try:
        size = known(results, wildcards["model"])
    except FileNotFoundError:
        if stage != "fetch":
            raise
        return UNKNOWN
    if size is None:
        return UNKNOWN if stage == "fetch" else _NOTHING
    return _PROGRAM + int(_STAGES[stage](size, wildcards, config))


def _all(config: Mapping[str, Any], results: Path) -> list[Size]:
    found = []
    for model in {x for block in config["sweep"]["blocks"] for x in block["models"]}:
        try:
            found.append(known(results, model))
        except FileNotFoundError:
            continue
    return [x for x in found if x]


def _fetch(size: Size, wildcards: Mapping[str, str], config: Mapping[str, Any]) -> float:
    return 2.9 * size.weights


def _trace(size: Size, wildcards: Mapping[str, str], config: Mapping[str, Any]) -> float:
    """The file, what is kept or read of it in float64, and three arrays of all logits in that."""
    tokens = config["programs"][wildcards["program"]]["tokens"]
    return size.weights + _float64(size, 2) + 6 * tokens * size.row


def _prepare(size: Size, wildcards: Mapping[str, str], config: Mapping[str, Any]) -> float:
    """The file, its attention as it was measured, what is read in float64 as it lies and turned, the host's table."""
    steps = config["weights"][wildcards["weights"]]["steps"]
    return (1.2 + sum(_step(x["name"]) for x in steps)) * size.weights + _float64(size, 4) + size.embedding


def _step(name: str) -> float:
    hooks = {x.name for x in parsed("weights", name).body if isinstance(x, ast.FunctionDef)}
    more = _STATISTICS if constants("weights", name).get("STATISTICS") else 0.0
    return more + max((factor for hook, factor in _HOOKS.items() if hook in hooks), default=0.0)


def _export(size: Size, wildcards: Mapping[str, str], config: Mapping[str, Any]) -> float:
    """The file and the host's table; a library's exporter has the weights in its model and in what it writes."""
    if config["strategies"][wildcards["strategy"]]["form"] == "exporter":
        return 6 * size.weights
    return size.weights + 2 * size.embedding


def _check(size: Size, wildcards: Mapping[str, str], config: Mapping[str, Any]) -> float:
    """ONNX Runtime's own copies of the float32 and of the ideal float16 run, of the whole graph or of a piece of it."""
    layers, whole = config["strategies"][wildcards["strategy"]]["layers"], 3.2 * size.weights + 2 * size.embedding
    if wildcards["part"] != "decode":  # its own copy and the decode part's
        return 2.2 * size.weights + 2 * size.embedding
    if not layers:
        return whole
    build = config["models"][wildcards["model"]]["build_mb"]
    piece = build / 8.5 if layers == "auto" else layers * size.layer  # as large as export/pieces.py lets it be
    cut = size.weights + 2 * size.embedding + 3.2 * max(piece, size.columns)
    return min(whole, cut) if layers == "auto" else cut


def _verify(size: Size, wildcards: Mapping[str, str], config: Mapping[str, Any]) -> float:
    """All programs' logits, and of the longest one what they are compared by."""
    tokens = [config["programs"][name]["tokens"] for name in config["sweep"]["programs"]]
    return size.embedding + (sum(tokens) + 10 * max(tokens)) * size.row


def _float64(size: Size, most: float) -> float:
    """What is kept, and beside it the largest matrix while it is read; `most`: times all weights."""
    return min(_KEPT + 2 * size.embedding, most * size.weights)


_STAGES: dict[str, Callable[[Size, Mapping[str, str], Mapping[str, Any]], float]] = {
    "fetch": _fetch,
    "trace": _trace,
    "prepare": _prepare,
    "export": _export,
    "check": _check,
    "verify": _verify,
}
STAGES = (*_STAGES, "tabulate")  # whose peak follows the model
