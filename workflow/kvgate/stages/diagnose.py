"""diagnose: one row by layer, step, tensor and operator. Asked for by its path; no other stage reads it.

Reads the verdict, the metrics of every step, layer and tensor, host.npz, the traces, the artifact's boundary and the
accuracy analysis. Writes diagnosis.json, heatmap.png (error by layer and step) and diagnosis.html (the sentence, the
figures, the picture).
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypedDict

import numpy as np

from kvgate import contract as c
from kvgate.compiler import platforms
from kvgate.contract import State
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.judging import operator_errors, wording
from kvgate.judging.wording import percent
from kvgate.observe import Trace
from kvgate.report import columns
from kvgate.report.diagnosis_page import page

TAKES_BLOCKED = True
Array = np.ndarray
_FLOOR, _TOP = 1e-4, 1.0  # L2 at the ends of the picture's colours
_CELL = 8  # pixels of a step and layer
_WORST = 20  # operators shown
_SAME = 0.01  # L2 up to which the toolkit's own float32 run counts as the reference's


class CacheInput(TypedDict):
    """A cache input: its dtype and calibrated range, the reference's range, and the share of it beyond."""

    name: str
    dtype: str | None
    calibrated: list[float | None]
    reference: list[float]
    outside: float | None


LayerErrors = dict[str, int | float | None]  # `layer`, and {history}_{kind}_{median or worst}


def run(job: Job) -> dict[str, Any]:
    """A blocked row is explained by what blocked it."""
    verdict = job.read("judge")
    body: dict[str, Any] = {
        name: verdict.get(name) for name in ("row", "verdict", "reason", "cause", "remedy", "first")
    }
    files: dict[str, str] = {}
    if verdict["verdict"] != "blocked":
        errors = _errors(job)
        limits = job.config["thresholds"]
        body |= {"layers": _layers(errors), "first_layer": _first_layer(errors, limits), "tensors": _tensors(job)}
        body |= {"cpu_operators": verdict["figures"]["cpu_operators"], "coverage": verdict.get("coverage", {})}
        body["permuted"] = next((x["text"] for x in verdict["findings"] if x["kind"] == "permuted"), None)
        body |= _operators(job)
        picture = _picture(errors)
        if picture is not None:
            _write(job, files, "heatmap.png", picture)
    body["sentence"] = _sentence(body)
    seen = (job.folder / "heatmap.png").read_bytes() if "heatmap.png" in files else b""
    _write(job, files, "diagnosis.html", page(body, seen, _FLOOR, _TOP).encode())
    return body | {"files": files, "announce": body["sentence"]}


def _write(job: Job, files: dict[str, str], name: str, data: bytes) -> None:
    files[name] = record.write_bytes(job.folder / name, data)


def _errors(job: Job) -> dict[str, tuple[list[State], Array]]:
    """By history the states that were compared, and their L2 [n, S] over all programs; appended ones first."""
    states = graph_files.contract(job).kept()
    fields = {"kv": [x for x in states if x.appended], "replaced": [x for x in states if not x.appended]}
    found: dict[str, tuple[list[State], Array]] = {}
    runs: dict[str, dict[str, list[Array]]] = {}
    for program in job.config["programs"]:
        with np.load(job.file("verify", f"{program}/metrics.npz")) as file:
            for name in (x for x in file.files if x.endswith(("/kv", "/replaced"))):
                history, _, field = name.partition("/")
                if file[name].size:
                    runs.setdefault(history, {}).setdefault(field, []).append(file[name])
    for history, by_field in runs.items():
        known = [x for field, of in fields.items() if field in by_field for x in of]
        parts = [np.concatenate(by_field[field]) for field in fields if field in by_field]
        rows = max(len(x) for x in parts)  # a replaced state is known after fewer steps
        padded = [np.concatenate([x, np.full((rows - len(x), x.shape[1]), np.nan)]) for x in parts]
        seen = [np.arange(rows)[:, None] < len(x) for x in parts]
        held = [np.where(np.isfinite(x) | ~there, x, np.inf) for x, there in zip(padded, seen, strict=True)]
        found[history] = known, np.concatenate(held, axis=1)
    return found


def _layers(errors: dict[str, tuple[list[State], Array]]) -> list[LayerErrors]:
    """Median and worst L2 of every layer's states, by history."""
    found: dict[int, LayerErrors] = {}
    for history in (x for x in ("isolated", "forced") if x in errors):
        states, values = errors[history]
        for n, state in enumerate(states):
            row = found.setdefault(state.layer, {"layer": state.layer})
            for word, value in (("median", np.nanmedian(values[:, n])), ("worst", np.nanmax(values[:, n]))):
                row[f"{history}_{state.kind}_{word}"] = float(f"{value:.4g}") if np.isfinite(value) else None
    return [found[layer] for layer in sorted(found)]


def _first_layer(errors: dict[str, tuple[list[State], Array]], limits: dict[str, Any]) -> dict[str, Any] | None:
    """The first state whose isolated error passes its limit in most steps: what comes after it follows from it."""
    if "isolated" not in errors:
        return None
    states, values = errors["isolated"]
    medians = np.nanmedian(values, axis=0)
    allowed = [limits["kv_l2" if state.appended else "state_l2"]["pass"] for state in states]
    over = [(state.layer, n) for n, state in enumerate(states) if medians[n] > allowed[n]]
    if not over:
        return None
    n = min(over)[1]
    return wording.place(states[n].name) | {"median": float(f"{medians[n]:.4g}")}


def _tensors(job: Job) -> list[CacheInput]:
    if "build" not in job.inputs:
        return []
    contract = graph_files.contract(job)
    host = graph_files.opened(job, contract, -1.0)
    low = dict.fromkeys(host.buffers, 0.0)
    high = dict.fromkeys(host.buffers, 0.0)
    for label in job.labels("trace"):
        trace = Trace.load(str(job.file(label, "trace.npz")))
        length = min(len(trace.tokens), contract.cache.capacity)
        for position in trace.at[trace.at < length] if trace.replaced else [length - 1]:
            host.fill(trace.tokens.tolist(), trace.before(int(position) + 1), int(position) + 1)
            for name, buffer in host.buffers.items():
                low[name], high[name] = min(low[name], float(buffer.min())), max(high[name], float(buffer.max()))
    built = {t["name"]: t for t in job.read("build")["boundary"]["inputs"]}
    outside = job.read("judge").get("coverage", {})
    return [
        {
            "name": name,
            "dtype": built.get(name, {}).get("dtype"),
            "calibrated": [built.get(name, {}).get("low"), built.get(name, {}).get("high")],
            "reference": [float(f"{low[name]:.4g}"), float(f"{high[name]:.4g}")],
            "outside": outside.get(name),
        }
        for name in host.buffers
    ]


def _operators(job: Job) -> dict[str, Any]:
    """The first operator that is off by itself and the worst one, with inputs and kind of error; the worst in order."""
    if "accuracy" not in job.inputs:
        return {}  # a row of ONNX Runtime has no artifact
    found, limit = job.read("accuracy"), job.config["thresholds"]["operator_l2"]
    note = _unusable(found)
    facts = {name: found.get(name) for name in ("state", "artifact", "golden", "simulator", "ranges")}
    body: dict[str, Any] = {"accuracy": facts | {"limit": limit, "note": note}}
    if note:
        return body
    rows = found["operators"]
    contract = graph_files.contract(job)
    identity = record.read(job.file("build", "contract.json"))["identity"]
    masks = [t.name for t in contract.inputs if t.role == c.MASK]
    quant = identity["quant"]
    about = (masks, identity["mask_value"], platforms.dtype(quant), quant.get("headroom", 1.0))
    by_tensor = {row["tensor"]: row for row in rows}

    work = list(operator_errors.work(rows))

    def badness(n: int) -> float:
        value = work[n]["isolated_l2"]
        return np.inf if value is None else value

    order = sorted(range(len(work)), key=badness, reverse=True)
    body |= {"operators": [work[n] for n in sorted(order[:_WORST])], "off": sum(badness(n) > limit for n in order)}
    for which, row in (
        ("first", operator_errors.first(rows, limit)),
        ("worst", work[order[0]] if body["off"] > 1 else None),
    ):
        off = operator_errors.Off(row, by_tensor, *about) if row else None
        kind = operator_errors.explain(off) if off else None
        body |= {
            f"{which}_operator": row,
            f"{which}_inputs": off.inputs if off else [],
            f"{which}_kind": asdict(kind) | {"remedy": kind.remedy.beyond(job.wildcards)} if kind else None,
        }
    return body


def _unusable(found: Mapping[str, Any]) -> str:
    """Why an accuracy analysis says nothing of the row; empty where it does."""
    if found["status"] != "ok":
        return found["reason"]
    if found["fed"]:
        return f"the toolkit did not take the state as it was fed: {found['fed']}"
    if found["artifact"].startswith("got"):
        return f"not the row's artifact: {found['artifact']}"
    golden = found["golden"]
    figures = {name: golden[name] for name in ("kv_l2", "logits_l2")}  # None: NaN or infinity, or `why` says so
    off = [f"{k} {'not finite' if x is None else f'{x:.2g}'}" for k, x in figures.items() if x is None or x > _SAME]
    text = golden.get("why") or ", ".join(off)
    return f"the toolkit's own float32 run is not the reference: {text}" if text else ""


def _picture(errors: dict[str, tuple[list[State], Array]]) -> bytes | None:
    """A PNG: states down, steps across, the isolated ones first; colour is the L2 on a log scale."""
    import cv2

    rows = [errors[history][1] for history in ("isolated", "forced") if history in errors]
    if not rows:
        return None
    table = np.concatenate(rows).T
    table = np.where(np.isnan(table), _FLOOR, np.clip(table, _FLOOR, _TOP))
    scale = np.log(table / _FLOOR) / np.log(_TOP / _FLOOR)
    colours = cv2.applyColorMap((255 * scale).astype(np.uint8), cv2.COLORMAP_VIRIDIS)
    large = colours.repeat(_CELL, axis=0).repeat(_CELL, axis=1)
    return bytes(cv2.imencode(".png", large)[1])


def _sentence(body: Mapping[str, Any]) -> str:
    text = f"{columns.name(body['row'])}: {body['verdict']}: {body['reason']}"
    first = body.get("first_layer")
    if first:
        text += f". First layer off by itself: {first['layer']} {first['tensor']}, median {percent(first['median'])}"
    if body.get("first_operator"):
        text += f". First operator off by itself: {_operator(body, 'first')}"
        if body["worst_operator"] not in (None, body["first_operator"]):
            text += f"; the worst of {body['off']}: {_operator(body, 'worst')}"
    elif body.get("operators"):
        text += f". No operator is off by itself by more than {percent(body['accuracy']['limit'])}"
    found = [(body.get(f"{which}_kind") or {}).get("remedy") for which in ("first", "worst")]
    remedy = next(filter(None, [*found, body.get("remedy")]), "")
    return text + (f". What to try: {remedy}" if remedy else "")


def _operator(body: Mapping[str, Any], which: str) -> str:
    """Where and what it is, how far off, and why."""
    row, kind = body[f"{which}_operator"], body[f"{which}_kind"]
    where = f"{row['module']} " if row["module"] else ""
    cosine = "not finite" if row["isolated_cosine"] is None else f"{row['isolated_cosine']:.4f}"
    cpu = " on the CPU" if row["cpu"] else ""
    why = f": {kind['text']} ({kind['kind']})" if kind else ""
    return (
        f"{where}{row['operator']}{cpu} ({row['tensor']}), isolated {percent(row['isolated_l2'])}, "
        f"isolated cosine {cosine}{why}"
    )
