"""A program's observation against its trace: how far off each step is, by history, layer and tensor. numpy only.

Facts, no judgement. `compare` is what verify writes, `differences` is what check asks: is the graph the model?
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgate import observe
from kvgate.contract import KINDS, LOGITS, Contract
from kvgate.jobs import record
from kvgate.judging import metrics, symptoms, wording
from kvgate.observe import Trace

Array = np.ndarray

HISTORIES = ("isolated", "forced")  # the free run is compared by its tokens: after a divergence nothing else can be
TOKEN_STEPS = (0, 1, 2, 3, 16)  # generated steps whose tokens the table shows
EXPLAINS = ("permuted", "rotation", "no_window")  # kinds of findings that say why the others are there
# Gates and tensors of findings, as a step computes them.
_ORDER = (*KINDS, "kv_l2", "state_l2", "disturbed", "logits", "logits_l2", "top1")


@dataclass(frozen=True)
class Steps:
    """The measurements of a history, n steps in order. NaN where the observation holds NaN."""

    positions: Array  # [n]
    kv: Array  # [n, S] normalized L2 of every appended state's entry; S = 0 where the strategy keeps no cache
    replaced: Array  # [m, R] of every other state, whole
    replaced_positions: Array  # [m] of `positions`, those after which the reference knows them
    raw: Array  # [n] normalized L2 of the logits; this and the next eight are [0] where a part returns none
    centred: Array  # [n] the same with their mean removed
    cosine: Array  # [n]
    kl: Array  # [n] nats
    rms: Array  # [n] error of the mean-removed logits, in logits
    margin: Array  # [n] the reference's
    got: Array  # [n] best token
    want: Array  # [n] the reference's best token
    disturbed: Array  # [n] Step.disturbed

    def arrays(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def compare(
    contract: Contract, trace: Trace, seen: Mapping[str, Array], off: float = metrics.SUSPECT_L2
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The body of metrics.json, and the arrays of metrics.npz: `{history}/{field of Steps}`.

    seen: what `observe.observe` returned. off: the L2 above which a wrong rotation or window is looked for. Raises
    ValueError where nothing can be compared, or a tensor of the contract was not observed.
    """
    histories: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    findings: list[dict[str, Any]] = []
    measured = {h: measure(contract, trace, seen, h) for h in HISTORIES if f"{h}/positions" in seen}
    if not measured:
        raise ValueError(f"observation: got {sorted(seen)[:3]}, allowed: at least one step of isolated or forced")
    names = [x.name for x in contract.kept() if x.appended]
    replaced = [x.name for x in contract.kept() if not x.appended]
    for history, steps in measured.items():
        histories[history] = summary(steps, names, replaced)
        findings += symptoms.odd(contract, trace, seen, history)
        findings += symptoms.moved(contract, trace, seen, history, steps.kv)
        findings += symptoms.turned(contract, trace, seen, history, steps.kv, off)
        findings += symptoms.unhidden(contract, history, steps.positions, steps.kv, steps.raw, off)
        arrays |= {f"{history}/{name}": array for name, array in steps.arrays().items()}
    body: dict[str, Any] = {"states": names, "replaced": replaced}
    body |= {"histories": histories, "findings": findings, "free": None, "perplexity": None}
    if "free/tokens" in seen and trace.prompt < len(trace.tokens):  # a text generates nothing
        body["free"] = free(trace, seen, measured.get("forced"))
    if trace.prompt == len(trace.tokens) and "forced" in measured and measured["forced"].raw.size:
        body["perplexity"] = text(trace, seen) | {"kl": histories["forced"]["kl"]}
    return body, arrays


def measure(contract: Contract, trace: Trace, seen: Mapping[str, Array], history: str) -> Steps:
    """Measure a history step by step: one step's logits are widened at a time, a whole history may not fit."""
    if trace.logits is None:
        raise ValueError("trace: got no logits, allowed: the trace of a chat or a text")
    positions = seen[f"{history}/positions"]
    speaks = any(t.role == LOGITS for t in contract.outputs)
    logits = seen[f"{history}/logits"] if speaks else np.zeros((0, 0))
    if not len(positions) or (speaks and len(logits) != len(positions)):
        raise ValueError(f"{history}: got {len(logits)} logits for {len(positions)} steps, allowed: equal, at least 1")
    fields: dict[str, list[float]] = {name: [] for name in ("raw", "centred", "cosine", "kl", "rms", "margin")}
    best = []
    for row, position in zip(logits, positions if speaks else (), strict=True):
        got, want = np.asarray(row, np.float64), np.asarray(trace.logits[position], np.float64)
        fields["raw"].append(metrics.l2(got, want))
        fields["centred"].append(metrics.l2(metrics.centred(got), metrics.centred(want)))
        fields["cosine"].append(metrics.cosine(got, want))
        fields["kl"].append(float(metrics.kl(got, want)))
        fields["rms"].append(float(metrics.rms_error(got, want)))
        fields["margin"].append(float(metrics.margin(want)))
        best.append((int(got.argmax()), int(want.argmax())))
    known = [int(p) for p in positions if p in trace.at]
    errors: dict[bool, list[Array]] = {True: [], False: []}
    for state in contract.kept():
        if f"{history}/{state.name}" not in seen:
            raise ValueError(f"observation: lacks {history}/{state.name}, which the contract returns")
        got = seen[f"{history}/{state.name}"]
        want = wanted(trace, state.name, positions)
        if len(got) != len(want):
            raise ValueError(f"{history}/{state.name}: got {len(got)} entries, allowed: {len(want)}")
        errors[state.appended].append(metrics.l2_rows(got, want))
    kv, replaced = (
        np.stack(x, 1) if x else np.empty((n, 0)) for n, x in ((len(positions), errors[True]), (0, errors[False]))
    )
    tokens = np.array(best).reshape(-1, 2)
    return Steps(
        positions,
        kv,
        replaced,
        np.array(known, np.int64) if errors[False] else np.zeros(0, np.int64),
        **{name: np.array(values) for name, values in fields.items()},
        got=tokens[:, 0],
        want=tokens[:, 1],
        disturbed=np.asarray(seen[f"{history}/disturbed"], np.float64),
    )


def wanted(trace: Trace, state: str, positions: Array) -> Array:
    """The reference's values of a state at the positions of a history; of a replaced one at those that it knows."""
    if state in trace.replaced:
        return trace.replaced[state][np.searchsorted(trace.at, [p for p in positions if p in trace.at])]
    return trace.states[state][positions]


def summary(steps: Steps, names: Sequence[str] = (), replaced: Sequence[str] = ()) -> dict[str, Any]:
    """A history in a few figures. A figure that is NaN or infinite is null, and its finding says why."""
    changed = [
        {
            "step": int(n),
            "position": int(steps.positions[n]),
            "token": int(steps.got[n]),
            "reference": int(steps.want[n]),
            "margin": number(steps.margin[n]),
            "error": number(steps.rms[n]),
        }
        for n in np.flatnonzero(steps.got != steps.want)
    ]
    found: dict[str, Any] = {
        "steps": len(steps.positions),
        "positions": [int(p) for p in steps.positions],
        "kv": _states(steps.kv, steps.positions, names) if steps.kv.size else None,
        "replaced": _states(steps.replaced, steps.replaced_positions, replaced) if steps.replaced.size else None,
        "disturbed": _worst(steps, steps.disturbed),
    }
    if not steps.raw.size:
        return found | {"logits": None, "kl": None, "top1": None}
    noise = metrics.sqnr(steps.centred)
    return found | {
        "logits": {"centred": _spread(steps, steps.centred), "raw": _spread(steps, steps.raw)},
        "sqnr_db": {"median": number(np.median(noise)), "worst": number(noise.min())},
        "cosine": {"worst": number(steps.cosine.min())},
        "kl": number(steps.kl.mean()),
        "top1": {"equal": len(steps.got) - len(changed), "of": len(steps.got), "changed": changed},
        "margin": {"median": number(np.median(steps.margin)), "least": number(steps.margin.min())},
    }


def _states(values: Array, positions: Array, names: Sequence[str]) -> dict[str, Any]:
    """Median and worst of errors [n, S], in all and of every state."""
    ranked = np.where(np.isnan(values), np.inf, values)
    n, which = (int(i) for i in np.unravel_index(ranked.argmax(), ranked.shape))
    worst = (
        {"value": number(values[n, which])} | wording.place(names[which]) | {"step": n, "position": int(positions[n])}
    )
    each = {
        name: {"median": number(np.median(x)), "worst": number(x.max())}
        for name, x in zip(names, ranked.T, strict=True)
    }
    return {"median": number(np.median(ranked)), "worst": worst, "states": each}


def _spread(steps: Steps, values: Array) -> dict[str, Any]:
    return {
        "median": number(np.median(np.where(np.isnan(values), np.inf, values))),
        "worst": _worst(steps, values),
    }


def _worst(steps: Steps, values: Array) -> dict[str, Any]:
    n = int(np.where(np.isnan(values), np.inf, values).argmax())
    return {"value": number(values[n]), "step": n, "position": int(steps.positions[n])}


def free(trace: Trace, seen: Mapping[str, Array], forced: Steps | None) -> dict[str, Any]:
    """The free run's tokens against the reference's generated ones.

    `equal` maps a generated step to whether its token is the reference's; null: the reference has no such step.
    `end`: all of them, and the text ended where the reference's did; null where the full cache cut the run.
    """
    want, got = trace.tokens[trace.prompt :], seen["free/tokens"]
    if not len(want) or not len(got):
        raise ValueError(f"free: got {len(got)} tokens for {len(want)} of the reference, allowed: at least one")
    both = min(len(want), len(got))
    step = int(seen["free/diverged"])
    equal: dict[str, bool | None] = {
        str(n): bool(n < len(got) and got[n] == want[n]) if n < len(want) else None for n in TOKEN_STEPS
    }
    same = bool(np.array_equal(got[:both], want[:both]))
    if same and len(got) < len(want) and step < 0:  # the cache was full before the reference's end
        equal |= {k: None for k, v in equal.items() if v is False}
        equal["end"] = None
    else:
        equal["end"] = same and len(got) == len(want)
    diverged: dict[str, Any] | None = None
    if step >= 0:
        position = trace.prompt - 1 + step
        diverged = {"step": step, "position": position, "token": int(got[step]), "reference": int(want[step])}
        if forced is not None:
            n = int(np.flatnonzero(forced.positions == position)[0])
            diverged |= {"margin": number(forced.margin[n]), "error": number(forced.rms[n])}
    return {
        "tokens": [int(t) for t in got],
        "reference": [int(t) for t in want],
        "equal": equal,
        "diverged": diverged,
        "ended": bool(got[-1] in trace.end_ids),
        "reference_ended": trace.ended,
    }


def text(trace: Trace, seen: Mapping[str, Array]) -> dict[str, Any]:
    """Perplexity of a teacher-forced text, with the graph's own cache, beside the reference's on the same positions."""
    assert trace.logits is not None
    positions = seen["forced/positions"]
    rows = np.flatnonzero(positions < len(trace.tokens) - 1)
    if not len(rows):
        raise ValueError("forced: got no position with a next token, allowed: at least one")
    logits, mine, theirs = seen["forced/logits"], [], []
    for n in rows:
        p = positions[n]
        mine.append(metrics.surprise(logits[n : n + 1], trace.tokens[p + 1 : p + 2])[0])
        theirs.append(metrics.surprise(trace.logits[p : p + 1], trace.tokens[p + 1 : p + 2])[0])
    return {
        "tokens": len(rows),
        "value": number(metrics.perplexity(np.array(mine))),
        "reference": number(metrics.perplexity(np.array(theirs))),
    }


def counted(
    contract: Contract, trace: Trace, seen: Mapping[str, Array], histories: Sequence[str], isolated: int
) -> dict[str, dict[str, int]]:
    """Of every history of a program the steps that there are (`got`) and that it has (`of`); of `free` its tokens.

    Steps count as far as they stand at the positions that the program has, in order.
    """
    capacity = contract.cache.capacity
    found = {}
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
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Is the graph the model? The worst figures over all histories, and a finding for each that says no, the first
    place first (`place`).

    For the check stage: logits L2 (raw) and every state's L2 at most `limit`, slots that should be as fed likewise,
    every best token and the whole free run equal. No findings: the graph is the model.
    """
    body, arrays = compare(contract, trace, seen, limit)
    facts: dict[str, Any] = {"logits_l2": 0.0, "kv_l2": 0.0, "disturbed": 0.0, "steps": 0, "top1": 0}
    facts |= {"state_l2": 0.0} if body["replaced"] else {}
    found = list(body["findings"])
    for history, figures in body["histories"].items():
        worst = {"disturbed": figures["disturbed"]}
        worst |= {"logits_l2": figures["logits"]["raw"]["worst"]} if figures["logits"] else {}
        worst |= {"kv_l2": figures["kv"]["worst"]} if figures["kv"] else {}
        worst |= {"state_l2": figures["replaced"]["worst"]} if figures["replaced"] else {}
        for name, at in worst.items():
            facts[name] = None if None in (at["value"], facts[name]) else max(at["value"], facts[name])
            found += _first(body, arrays, history, name, limit)
        facts["steps"] += figures["steps"]
        top1 = figures["top1"] or {"equal": 0, "changed": []}
        facts["top1"] += top1["equal"]
        for at in top1["changed"][:1]:
            text = f"{history}: token {at['token']} instead of {at['reference']} at position {at['position']}"
            found.append(record.finding("differs", text, gate="top1", history=history, **at))
    if body["free"] and body["free"]["equal"]["end"] is False:
        found.append(
            record.finding("differs", "free: the tokens are not the reference's", gate="tokens", history="free")
        )
    return facts, sorted(found, key=place)


_FIELDS = {"kv_l2": "kv", "state_l2": "replaced", "disturbed": "disturbed", "logits_l2": "raw"}


def _first(
    body: Mapping[str, Any], arrays: Mapping[str, Array], history: str, name: str, limit: float
) -> list[dict[str, Any]]:
    """The finding of a figure at the first step and state where it is above the limit; none where it holds."""
    values = arrays[f"{history}/{_FIELDS[name]}"]  # [n] or [n, S]
    over = np.argwhere(~(values <= limit))
    if not len(over):
        return []
    n, *inside = (int(i) for i in over[0])
    field = "replaced_positions" if name == "state_l2" else "positions"
    at: dict[str, Any] = {
        "value": number(values[n, *inside]),
        "step": n,
        "position": int(arrays[f"{history}/{field}"][n]),
    }
    at |= wording.place(body["replaced" if name == "state_l2" else "states"][inside[0]]) if inside else {}
    where = f"layer {at['layer']} {at['tensor']}, " if inside else ""
    text = f"{history}: {name} {at['value']} at {where}position {at['position']}, allowed {limit:g}"
    return [record.finding("differs", text, gate=name, history=history, **at)]


def place(finding: Mapping[str, Any]) -> tuple[float, float, int, int]:
    """Sorts findings by where they are: position, layer, then as a step computes (a strange value before the error
    that it makes), history. What explains the others, and what has no place, comes last."""
    if "position" not in finding or finding["kind"] in EXPLAINS:
        return np.inf, finding.get("position", np.inf), 0, 0
    layer = finding.get("layer")
    what = _ORDER.index(finding.get("gate") or finding["tensor"])
    return finding["position"], np.inf if layer is None else layer, what, HISTORIES.index(finding["history"])


def reason(found: Sequence[Mapping[str, Any]], isolated: bool) -> str:
    """Findings in the order of `place` in a sentence: the first place, what explains it, and other slots where they
    changed too. isolated: some step was fed the reference's own cache."""
    first, *rest = found
    said = [x for x in rest if x["kind"] in EXPLAINS][:1]
    said += [x for x in rest if x.get("gate") == "disturbed" != first.get("gate")][:1]
    texts = [str(x["text"]) for x in (first, *said)]
    if isolated and not said and not any(x.get("history") == "isolated" for x in found):
        texts.append("every step holds with the reference's own cache: what is kept in the slots between steps")
    return "; ".join(texts)


def number(value: float) -> float | None:
    """A figure for JSON: 6 significant digits, null where it is NaN or infinite."""
    value = float(value)
    return float(f"{value:.6g}") if np.isfinite(value) else None
