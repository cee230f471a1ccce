"""Every figure of a row, from the metrics of its programs and the build. numpy only."""

import math
from collections.abc import Iterable, Mapping

from kvgate.contract import Contract, Tensor
from kvgate.jobs.rows import PREFILL
from kvgate.judging import measures
from kvgate.judging.measure import Row
from kvgate.judging.records import Figures, Record

PROMPT = 64  # tokens of the prompt whose first token is predicted
_ITEM = {"float32": 4, "float16": 2, "int16": 2, "int8": 1, "uint8": 1}  # bytes


def boundary(contract: Contract, build: Record) -> list[str]:
    """The dtypes of the cache tensors as they cross the artifact's boundary; the graph's where there is no artifact."""
    names = {t.name for t in (*contract.cache_inputs(), *contract.cache_outputs())}
    tensors = [t for side in build.get("boundary", {}).values() for t in side]
    built = [str(t["dtype"]) for t in tensors if t["name"] in names]
    return sorted(set(built)) or sorted({t.dtype for t in contract.cache_inputs()})


def figures(contract: Contract, build: Record, row: Row) -> Figures:
    """A row's figures: what the build says (empty: no artifact), and what the measures say over all programs."""
    found: Figures = {
        "form": contract.form,
        "form_reason": contract.reason,
        "history_bytes": _bytes(contract.cache_inputs(), build, "inputs"),
        "delta_bytes": _bytes(contract.cache_outputs(), build, "outputs"),
    }
    for name in ("rows", "cycles", "traffic_bytes", "weight_bytes", "internal_bytes", "artifact_bytes"):
        found[name] = build.get(name)
    found["cpu_operators"] = build.get("cpu_operators")
    for of in measures.every():
        measures.add(found, of, of.figures(row))
    return found


def parts(capacity: int, build: Record, others: Mapping[str, Record]) -> Figures:
    """What all artifacts of a row are together: their bytes, what they leave to the CPU, and the predicted cycles to
    the first token of a prompt of PROMPT tokens (of the capacity, if that is less).

    build: of `decode`; others: by part. Empty where there is no artifact.
    """
    if not build:
        return {}
    every = [build, *others.values()]
    cpu: dict[str, int] = {}
    for x in every:
        for name, count in (x.get("cpu_operators") or {}).items():
            cpu[name] = cpu.get(name, 0) + count
    found: Figures = {"artifact_bytes": sum(x.get("artifact_bytes") or 0 for x in every) or None}
    found |= {"cpu_operators": cpu if build.get("cpu_operators") is not None else None}
    prompt, cycles, chunk = min(PROMPT, capacity), build.get("cycles"), others.get(PREFILL)
    if cycles and chunk and chunk.get("cycles"):
        steps = math.ceil((prompt - 1) / chunk["tokens"])  # the last token of a prompt goes through `decode`
        found |= {"first_token_cycles": steps * chunk["cycles"] + cycles, "prefill_tokens": chunk["tokens"]}
    elif cycles:
        found["first_token_cycles"] = prompt * cycles
    return found


def _bytes(tensors: Iterable[Tensor], build: Record, side: str) -> int:
    """Of cache tensors, each in the dtype that it crosses the artifact's boundary in; unknown: the graph's."""
    built = {t["name"]: str(t["dtype"]) for t in build.get("boundary", {}).get(side, ())}
    return sum(math.prod(t.shape) * _ITEM[built.get(t.name, t.dtype)] for t in tensors)
