"""Every figure of a row, from the metrics of its programs and the build. numpy only."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvgate.contract import Contract, Tensor
from kvgate.jobs.rows import PREFILL
from kvgate.judging.compare import HISTORIES, TOKEN_STEPS, number
from kvgate.judging.wording import place

Array = np.ndarray
PROMPT = 64  # tokens of the prompt whose first token is predicted
OVER = 0.01  # L2 of a K/V delta that counts as off in `kv_over`
_ITEM = {"float32": 4, "float16": 2, "int16": 2, "int8": 1, "uint8": 1}  # bytes


def boundary(contract: Contract, build: Mapping[str, Any]) -> list[str]:
    """The dtypes of the cache tensors as they cross the artifact's boundary; the graph's where there is no artifact."""
    names = {t.name for t in (*contract.cache_inputs(), *contract.cache_outputs())}
    tensors = [t for side in build.get("boundary", {}).values() for t in side]
    built = [str(t["dtype"]) for t in tensors if t["name"] in names]
    return sorted(set(built)) or sorted({t.dtype for t in contract.cache_inputs()})


def figures(
    contract: Contract,
    build: Mapping[str, Any],
    metrics: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, Mapping[str, Array]],
) -> dict[str, Any]:
    """A row's figures: the errors over all programs and histories, and what the build says (empty: no artifact)."""
    found: dict[str, Any] = {
        "form": contract.form,
        "form_reason": contract.reason,
        "history_bytes": _bytes(contract.cache_inputs(), build, "inputs"),
        "delta_bytes": _bytes(contract.cache_outputs(), build, "outputs"),
    }
    for name in ("rows", "cycles", "traffic_bytes", "weight_bytes", "internal_bytes", "artifact_bytes"):
        found[name] = build.get(name)
    found["cpu_operators"] = build.get("cpu_operators")
    names = [x.name for x in contract.kept() if x.appended]
    for label, field in (("kv", "kv"), ("logits", "centred"), ("raw", "raw")):
        median, worst = _over_all(arrays, field, names)
        found |= {f"{label}_median": median, f"{label}_worst": worst}
    replaced = [x.name for x in contract.kept() if not x.appended]
    if replaced:
        median, worst = _over_all(arrays, "replaced", replaced, "replaced_positions")
        found |= {"state_median": median, "state_worst": worst}
    found["kv_over"] = _share_over(arrays, "kv", OVER)
    centred = found["logits_worst"]
    found["sqnr_db"] = None if not centred or not centred["value"] else number(-20 * np.log10(centred["value"]))
    histories = [h for m in metrics.values() for h in m["histories"].values() if h["top1"]]
    found["top1_equal"] = sum(h["top1"]["equal"] for h in histories)
    found["top1_of"] = sum(h["top1"]["of"] for h in histories)
    free = {name: m["free"] for name, m in metrics.items() if m["free"]}
    found["tokens"] = {str(n): _count([f["equal"][str(n)] for f in free.values()]) for n in (*TOKEN_STEPS, "end")}
    diverged = [{"program": name, **f["diverged"]} for name, f in free.items() if f["diverged"]]
    found["diverged"] = min(diverged, key=lambda d: d["step"]) if diverged else None
    return found


def parts(capacity: int, build: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
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
    found: dict[str, Any] = {"artifact_bytes": sum(x.get("artifact_bytes") or 0 for x in every) or None}
    found |= {"cpu_operators": cpu if build.get("cpu_operators") is not None else None}
    prompt, cycles, chunk = min(PROMPT, capacity), build.get("cycles"), others.get(PREFILL)
    if cycles and chunk and chunk.get("cycles"):
        steps = math.ceil((prompt - 1) / chunk["tokens"])  # the last token of a prompt goes through `decode`
        found |= {"first_token_cycles": steps * chunk["cycles"] + cycles, "prefill_tokens": chunk["tokens"]}
    elif cycles:
        found["first_token_cycles"] = prompt * cycles
    return found


def _bytes(tensors: Iterable[Tensor], build: Mapping[str, Any], side: str) -> int:
    """Of cache tensors, each in the dtype that it crosses the artifact's boundary in; unknown: the graph's."""
    built = {t["name"]: str(t["dtype"]) for t in build.get("boundary", {}).get(side, ())}
    return sum(math.prod(t.shape) * _ITEM[built.get(t.name, t.dtype)] for t in tensors)


def _over_all(
    arrays: Mapping[str, Mapping[str, Array]], field: str, names: Sequence[str], where: str = "positions"
) -> tuple[float | None, dict[str, Any] | None]:
    """The median of a measure over all steps, and its worst value with program, history, step and state.

    where: the positions of its steps.
    """
    every, worst, top = [], None, -1.0
    for program, found in arrays.items():
        for history in HISTORIES:
            values = found.get(f"{history}/{field}")
            if values is None or not values.size:
                continue
            ranked = np.where(np.isfinite(values), values, np.inf)
            every.append(ranked.ravel())
            if ranked.max() > top:
                top = float(ranked.max())
                at = np.unravel_index(ranked.argmax(), ranked.shape)
                position = int(found[f"{history}/{where}"][at[0]])
                worst = {"value": number(top), "program": program, "history": history, "step": int(at[0])}
                worst["position"] = position
                if len(at) == 2:
                    worst |= place(names[int(at[1])])
    return (number(np.median(np.concatenate(every))), worst) if every else (None, None)


def _share_over(arrays: Mapping[str, Mapping[str, Array]], field: str, limit: float) -> float | None:
    """The share of a measure's values above a limit or not finite, over all steps."""
    every = [a[f"{h}/{field}"] for a in arrays.values() for h in HISTORIES if f"{h}/{field}" in a]
    values = np.concatenate([x.ravel() for x in every]) if every else np.zeros(0)
    return number(float(np.mean(~(values <= limit)))) if values.size else None


def _count(equal: list[bool | None]) -> str:
    """How many programs have the reference's token there: `2/2`; empty where none has such a step."""
    known = [x for x in equal if x is not None]
    return f"{sum(known)}/{len(known)}" if known else ""
