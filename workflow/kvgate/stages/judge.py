"""judge: metrics x thresholds -> the verdict of a row, its reason, and every figure that the table shows.

Reads metrics.json and metrics.npz of all programs, the contract, the check's and the build's record; for a row on a
board also the run's and the self test's record and the verdict in the simulator. Seconds: moving a threshold runs only
this and tabulate. Takes blocked inputs: a blocked row has a verdict too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np

from kvgate.compiler import platforms
from kvgate.contract import Contract
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.jobs.rows import ROW
from kvgate.judging import boards, explanations, gate, gates, measures, summary, wording
from kvgate.judging.gate import Gate
from kvgate.judging.measure import Array, Row
from kvgate.judging.records import Finding, Place, Record, Verdict, finding
from kvgate.report import columns

TAKES_BLOCKED = True


def run(job: Job) -> Verdict:
    row = {k: v for k, v in job.wildcards.items() if k in ROW}
    try:
        inputs = {label: job.read(label) for label in job.inputs}
        body = _blocked(inputs) or _judged(job, inputs)
    except record.Blocked as why:  # a file that is not what its stage wrote
        body = _unjudged(job.stage, {"reason": why.reason, "findings": why.findings})
        body |= cast(Verdict, why.facts)
    body["row"] = row
    body["announce"] = columns.line(body)
    return body


def _blocked(inputs: Mapping[str, Record]) -> Verdict | None:
    """The first blocked input blocks the row, for its reason."""
    # The simulator's verdict is only compared with; its row is blocked by itself.
    found = next((x for x in inputs.items() if x[0] != "simulator" and x[1]["status"] == "blocked"), None)
    if found is None:
        return None
    label, above = found
    return _unjudged(above.get("blocked_by", label.split(".")[0]), above)


def _unjudged(stage: str, above: Record) -> Verdict:
    return {
        "verdict": "blocked",
        "reason": above.get("reason") or f"{stage} gave no reason",
        "first": {"stage": stage},
        "gates": [],
        "risks": above.get("risks", []),
        "findings": above.get("findings", []),
        "figures": {},
    }


def _judged(job: Job, inputs: Mapping[str, Record]) -> Verdict:
    contract = graph_files.contract(job)
    build = inputs.get("build", {})
    others = {k.partition(".")[2]: x for k, x in inputs.items() if k.startswith("build.")}
    metrics = inputs["verify"]["programs"]
    arrays: dict[str, dict[str, Array]] = {}
    for name in metrics:
        with np.load(job.file("verify", f"{name}/metrics.npz")) as file:
            arrays[name] = dict(file)
    limits = job.config["thresholds"]
    found = [g for name in metrics for g in gates.judge(name, metrics[name], arrays[name], limits)]
    if not found:
        found = [Gate("compared", "fail", "no comparison was made")]
    elif contract.cache_outputs():
        for part in sorted({m["part"] for m in metrics.values()}):
            own = {name: a for name, a in arrays.items() if metrics[name]["part"] == part}
            found += gates.capacity(contract.cache.capacity, own, part)
    ran = inputs.get("run", {})
    found += boards.gates(ran, inputs.get("selftest"))
    verdict = gate.worst([g.verdict for g in found])
    findings: list[Record] = [x for b in (build, *others.values()) for x in b.get("findings", ())]
    findings += [*ran.get("findings", ()), *_unseen(contract)]
    findings += [x | {"program": name} for name, m in metrics.items() for x in m["findings"]]
    broken = sorted((g for g in found if g.verdict == verdict), key=gates.place) if verdict != "pass" else []
    first = broken[0] if broken else None
    place: Place = {}
    if first:
        place = {"stage": "verify", "program": first.program, "history": first.history, "gate": first.name}
        place |= first.first
    outside = inputs["verify"].get("coverage", {})
    evidence = _as_built(job, _evidence(contract, build, findings, arrays, found, place, outside))
    known = first is None or first.name in (*gates.OF_BOARD, *gates.OF_SWEEP)  # its text is the cause
    evidence = replace(evidence, check=_checked(inputs["check"]))
    cause = "" if known else explanations.explain(evidence)
    findings += [] if known else explanations.uncovered(evidence, outside)
    risks = list(dict.fromkeys(x for b in (build, *others.values()) for x in b.get("risks", [])))
    reason = _reason(verdict, first, cause, found) + _limit(verdict, evidence.dtype, inputs["check"].get("float16"))
    if "simulator" in inputs:
        reason = boards.beside(verdict, reason, inputs["simulator"]["verdict"], risks, first, findings)
    return {
        "verdict": verdict,
        "reason": reason,
        "cause": cause,
        "remedy": "" if known else explanations.remedy(evidence).beyond(job.wildcards),
        "first": place or None,
        "gates": [g.to_json() for g in found],
        "coverage": outside,
        "risks": [*risks, *(x["text"] for x in ran.get("findings", ()) if x["kind"] == "version_mismatch")],
        "findings": findings,
        "figures": summary.figures(contract, build, Row(contract, metrics, arrays, limits))
        | summary.parts(contract.cache.capacity, build, others)
        | {"float16": inputs["check"].get("float16"), "dtype": evidence.dtype or "fp32"}
        | boards.figures(ran, inputs.get("simulator"), build),
    }


def _unseen(contract: Contract) -> list[Finding]:
    """A finding a window that sees less than the cache keeps: what lies beyond is fed, and masked, at every step."""
    kept = contract.cache.capacity
    found: list[Finding] = []
    for mask, window in enumerate(contract.windows):
        layers = [str(n) for n, layer in enumerate(contract.layers) if layer.mask == mask]
        if window is not None and window < kept and layers and contract.cache_inputs():
            text = f"layers {', '.join(layers)} see the last {window} of {kept} slots, and keep all"
            found.append(finding("unseen", text, window=window))
    return found


def _reason(verdict: str, first: Gate | None, cause: str, found: list[Gate]) -> str:
    """One short sentence: the cause where there is one, what broke and where it broke first."""
    if first is None:
        return f"all {len(found)} gates hold"
    where = [f"layer {first.first['layer']} {first.first['tensor']}"] if "layer" in first.first else []
    where += [f"position {first.first['position']}"] if "position" in first.first else []
    where += [f"{first.history} run of {first.program}"] if first.history else []
    text = first.text + (f" at {', '.join(where)}" if where else "")
    if first.name in gates.FATAL:  # its text says where
        text = first.text
    return f"{cause}; {text}" if cause and cause not in text else text


def _limit(verdict: str, dtype: str, float16: Mapping[str, float | None] | None) -> str:
    """Beside a float16 row's error the one that no float16 run of the model is free of: no fault to look for."""
    if verdict == "pass" or dtype != "fp16" or not float16:
        return ""
    known = [x for x in measures.every() if x.floor and x.name in float16]
    texts = (f"{x.title} {wording.percent(float16[x.name])}" for x in known)
    return f"; float16's own limit for this model: {', '.join(texts)}"


def _evidence(
    contract: Contract,
    build: Record,
    findings: list[Record],
    arrays: Mapping[str, Mapping[str, Array]],
    found: list[Gate],
    place: Place,
    outside: dict[str, float],
) -> explanations.Evidence:
    verdict = gate.worst([g.verdict for g in found])
    broken, steps = [], []
    for g in found:
        if g.program in arrays and f"{g.history}/positions" in arrays[g.program]:
            positions = arrays[g.program][f"{g.history}/positions"]
            steps += [(g.history, int(p)) for p in positions]
            if g.verdict == verdict:
                broken += [(g.history, int(positions[n])) for n in g.steps]
    early, late = _early_late(arrays)
    return explanations.Evidence(
        first=place,
        gates=sorted({g.name for g in found if g.verdict != "pass"}),
        findings=findings,
        cpu_operators=build.get("cpu_operators", {}),
        roles=[t.role for t in contract.inputs],
        boundary=summary.boundary(contract, build),
        broken=broken,
        steps=steps,
        early=early,
        late=late,
        outside=max(outside.items(), key=lambda x: x[1], default=("", 0.0)),
    )


def _as_built(job: Job, evidence: explanations.Evidence) -> explanations.Evidence:
    """With what the artifact's contract says of it; a row of ONNX Runtime has none."""
    if "build" not in job.inputs:
        return evidence
    identity = record.read(job.file("build", "contract.json"))["identity"]
    return replace(evidence, dtype=platforms.dtype(identity["quant"]), mask=identity["mask_value"])


def _checked(check: Record) -> float | None:
    """The check's worst L2 of logits and states; None where it compared nothing or something that is not finite."""
    names = [x.name for x in measures.every() if x.floor]
    values = [facts[name] for facts in check.get("programs", {}).values() for name in names if name in facts]
    return max(values) if values and None not in values else None


def _early_late(arrays: Mapping[str, Mapping[str, Array]]) -> tuple[float | None, float | None]:
    """Median K/V delta of the isolated steps in the first and last quarter of the positions; the first token apart."""
    found = [(a["isolated/positions"], a["isolated/kv"]) for a in arrays.values() if "isolated/positions" in a]
    found = [(p, kv) for p, kv in found if kv.size]
    if not found:
        return None, None
    positions, kv = max(found, key=lambda x: int(x[0].max()))
    last = positions.max()
    early, late = kv[(positions > 0) & (positions <= last / 4)], kv[positions >= last * 3 / 4]
    if not early.size or not late.size or not np.isfinite(np.concatenate([early, late])).all():
        return None, None
    return float(np.median(early)), float(np.median(late))
