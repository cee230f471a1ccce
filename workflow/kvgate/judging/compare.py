"""A program's observation against its trace: how far off each step is, by history, layer and tensor. numpy only.

Facts, no judgement: what is measured is in `measures/`. `compare` is what verify writes, `differences` is what check
asks: is the graph the model?
"""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from kvgate import observe
from kvgate.contract import KINDS, Contract
from kvgate.judging import measures, metrics, symptoms
from kvgate.judging.gate import HISTORIES
from kvgate.judging.measure import STATES, STEPPED, STRANGE, Array, History, Measured, Whole
from kvgate.judging.records import Count, Figures, Finding, Program, Record
from kvgate.observe import Trace

EXPLAINS = ("permuted", "rotation", "no_window")  # kinds of findings that say why the others are there


def compare(
    contract: Contract, trace: Trace, seen: Mapping[str, Array], off: float = metrics.SUSPECT_L2
) -> tuple[Program, dict[str, Array]]:
    """The body of metrics.json, and the arrays of metrics.npz: `{history}/{array of a measure}`.

    seen: what `observe.observe` returned. off: the L2 above which a wrong rotation or window is looked for. Raises
    ValueError where nothing can be compared, or a tensor of the contract was not observed.
    """
    appended, replaced = ([x.name for x in contract.kept() if x.appended is kind] for kind in (True, False))
    opened = [History(h, contract, trace, seen) for h in STEPPED if f"{h}/positions" in seen]
    if not opened:
        raise ValueError(f"observation: got {sorted(seen)[:3]}, allowed: at least one step of isolated or forced")
    measured = {x.name: measure(x, {"states": appended, "replaced": replaced}) for x in opened}
    histories: dict[str, Figures] = {}
    findings: list[Finding] = []
    for name, steps in measured.items():
        histories[name] = summary(steps)
        kv, raw = steps.arrays["kv"], steps.arrays["raw"]
        findings += symptoms.odd(contract, trace, seen, name)
        findings += symptoms.moved(contract, trace, seen, name, kv)
        findings += symptoms.turned(contract, trace, seen, name, kv, off)
        findings += symptoms.unhidden(contract, name, steps.positions, kv, raw, off)
    body: Figures = {"states": appended, "replaced": replaced, "histories": histories, "findings": findings}
    for of in measures.every():
        measures.add(body, of, of.program(Whole(trace, seen, measured, histories)))
    return cast(Program, body), {
        f"{h}/{name}": array for h, steps in measured.items() for name, array in steps.arrays.items()
    }


def measure(history: History, states: Mapping[str, list[str]]) -> Measured:
    """A history by all measures, step by step. Raises ValueError where there is nothing to compare."""
    history.check()
    arrays = {"positions": history.positions}
    for of in measures.every():
        measures.add(arrays, of, of.arrays(history))
    return Measured(arrays, states)


def summary(steps: Measured) -> Figures:
    """A history in a few figures. A figure that is NaN or infinite is null, and its finding says why."""
    found: Figures = {"steps": len(steps.positions), "positions": [int(p) for p in steps.positions]}
    for of in measures.every():
        measures.add(found, of, of.summary(steps))
    return found


def counted(
    contract: Contract, trace: Trace, seen: Mapping[str, Array], histories: Sequence[str], isolated: int
) -> dict[str, Count]:
    """Of every history of a program the steps that there are (`got`) and that it has (`of`); of `free` its tokens.

    Steps count as far as they stand at the positions that the program has, in order.
    """
    capacity = contract.cache.capacity
    found: dict[str, Count] = {}
    for history, planned in observe.planned(trace, capacity, histories, isolated, contract.tokens).items():
        got = seen[f"{history}/positions"].tolist()
        same = [a == b for a, b in zip(got, planned, strict=False)]
        found[history] = {"got": (*same, False).index(False), "of": len(planned)}
    if "free" in histories and trace.prompt < len(trace.tokens):
        tokens = seen["free/tokens"]
        most = min(len(trace.tokens), capacity + 1) - trace.prompt
        diverged = int(seen["free/diverged"]) >= 0  # then its own text may end earlier
        ended = diverged and len(tokens) and int(tokens[-1]) in trace.end_ids
        found["free"] = {"got": len(tokens), "of": len(tokens) if ended else most}
    return found


def differences(
    contract: Contract, trace: Trace, seen: Mapping[str, Array], limit: float = 1e-4
) -> tuple[Figures, list[Finding]]:
    """Is the graph the model? The worst figures over all histories, and a finding for each that says no, the first
    place first (`place`).

    For the check stage: what a measure holds is at most `limit` (an L2) or equal. No findings: the graph is the model.
    """
    body, arrays = compare(contract, trace, seen, limit)
    facts: Figures = {"steps": sum(x["steps"] for x in body["histories"].values())}
    found: list[Finding] = list(body["findings"])
    for of in measures.every():
        more, differs = of.check(body, arrays, limit)
        measures.add(facts, of, more)
        found += differs
    return facts, sorted(found, key=place)


def place(finding: Record) -> tuple[float, float, int, int]:
    """Sorts findings by where they are: position, layer, then as a step computes (a strange value before the error
    that it makes), history. What explains the others, and what has no place, comes last."""
    if "position" not in finding or finding["kind"] in EXPLAINS:
        return np.inf, finding.get("position", np.inf), 0, 0
    layer = finding.get("layer")
    order = {kind: STATES + n for n, kind in enumerate(KINDS)} | {"logits": STRANGE}
    order |= {x.name: x.order for x in measures.every()}
    what = order[finding.get("gate") or finding["tensor"]]
    return finding["position"], np.inf if layer is None else layer, what, HISTORIES.index(finding["history"])


def reason(found: Sequence[Record], isolated: bool) -> str:
    """Findings in the order of `place` in a sentence: the first place, what explains it, and other slots where they
    changed too. isolated: some step was fed the reference's own cache."""
    first, *rest = found
    said = [x for x in rest if x["kind"] in EXPLAINS][:1]
    said += [x for x in rest if x.get("gate") == "disturbed" != first.get("gate")][:1]
    texts = [str(x["text"]) for x in (first, *said)]
    if isolated and not said and not any(x.get("history") == "isolated" for x in found):
        texts.append("every step holds with the reference's own cache: what is kept in the slots between steps")
    return "; ".join(texts)
