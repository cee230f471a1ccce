"""What must hold of a graph before it is compiled, and of an artifact before it is run. An empty list: all is well."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgate.compiler import platforms
from kvgate.compiler.artifact import Artifact, Tensor
from kvgate.contract import Contract
from kvgate.contract import Tensor as Declared
from kvgate.jobs.record import finding

NAME_LIMIT = 127  # a longer tensor name fails the toolkit's build with a KeyError


def graph(model: Any, folder: Path, contract: Contract) -> list[dict[str, Any]]:
    """Of an ONNX model (without its external data): names, boundary, weight files beside it."""
    found = []
    for side, tensors, values in (
        ("input", contract.inputs, model.graph.input),
        ("output", contract.outputs, model.graph.output),
    ):
        declared, got = [t.name for t in tensors], [v.name for v in values]
        if declared != got:
            found.append(finding("boundary", f"graph {side}s: got {got[:6]}..., allowed: {declared[:6]}... in order"))
        found += [
            finding("long_name", f"graph {side} {n[:40]}...: got {len(n)} characters, allowed: at most {NAME_LIMIT}")
            for n in got
            if len(n) > NAME_LIMIT
        ]
    return found + _weights(model, folder)


def long_names(model: Any) -> list[str]:
    """Inner tensors whose name is too long: they fail the build unless a fusion removes them first."""
    names = {name for node in model.graph.node for name in node.output} | {t.name for t in model.graph.initializer}
    return sorted(n for n in names if len(n) > NAME_LIMIT)


def _weights(model: Any, folder: Path) -> list[dict[str, Any]]:
    """External data that is missing, elsewhere, or too short: the toolkit fills it with random numbers, silently."""
    needed: dict[str, int] = {}
    for tensor in model.graph.initializer:
        entries = {e.key: e.value for e in tensor.external_data}
        if entries:
            end = int(entries.get("offset", 0)) + int(entries.get("length", 0))
            needed[entries["location"]] = max(end, needed.get(entries["location"], 0))
    found = []
    for location, size in needed.items():
        if Path(location).name != location:
            found.append(finding("weights", f"weights: got location {location!r}, allowed: a file beside the graph"))
            continue
        path = folder / location
        got = path.stat().st_size if path.is_file() else -1
        if got < size:
            what = "no file" if got < 0 else f"{got} bytes"
            found.append(finding("weights", f"weights {location}: got {what}, allowed: at least {size} bytes"))
    return found


def artifact(built: Artifact, contract: Contract, dtype: str) -> list[dict[str, Any]]:
    """Every declared input and output is in the artifact, in order, with its shape, and a dtype and layout allowed."""
    found = _side("input", built.inputs, contract.inputs, dtype)
    return found + _side("output", built.outputs, contract.outputs, dtype)


def _side(side: str, built: Sequence[Tensor], declared: Sequence[Declared], dtype: str) -> list[dict[str, Any]]:
    names, got = [t.name for t in declared], [t.name for t in built]
    missing, extra = [n for n in names if n not in got], [n for n in got if n not in names]
    if missing:
        why = "nothing uses it" if side == "input" else "it is a constant, an input, or equal to another output"
        return [finding("missing", f"{side} {n!r}: not in the artifact, {why}", tensor=n) for n in missing]
    if extra or got != names:
        return [finding("order", f"artifact {side}s: got {got[:6]}..., allowed: {names[:6]}... in order")]
    return [x for a, b in zip(built, declared, strict=True) for x in _tensor(side, a, b, dtype)]


def _tensor(side: str, built: Tensor, declared: Declared, dtype: str) -> list[dict[str, Any]]:
    found: list[tuple[str, object, object]] = []
    if built.shape != declared.shape:
        found.append(("shape", list(built.shape), list(declared.shape)))
    kinds = platforms.BOUNDARY[dtype] if declared.dtype == "float32" else (declared.dtype,)
    if built.dtype not in kinds:
        found.append(("dtype", built.dtype, " or ".join(kinds)))
    layout = "NCHW" if side == "output" else "NHWC" if len(declared.shape) == 4 else "UNDEFINED"
    if built.layout != layout:
        found.append(("layout", built.layout, layout))
    return [
        finding(what, f"{side} {built.name!r}: got {what} {got} in the artifact, allowed: {allowed}", tensor=built.name)
        for what, got, allowed in found
    ]
