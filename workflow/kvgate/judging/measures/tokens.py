"""The free run: its own tokens with its own cache, as a user runs it, against the reference's generated ones. numpy
only."""

from collections.abc import Mapping

import numpy as np

from kvgate.judging.column import Column, figure, text
from kvgate.judging.gate import FREE, Gate
from kvgate.judging.measure import Array, Measure, Row, Whole, number
from kvgate.judging.records import Change, Figures, Finding, Free, Record, Thresholds, finding
from kvgate.judging.ties import near_tie, said

STEPS = (0, 1, 2, 3, 16)  # generated steps whose tokens the table shows
_NAMES = (*map(str, STEPS), "end")


def program(whole: Whole) -> Figures:
    """Null where there is no free run: a text generates nothing."""
    there = "free/tokens" in whole.seen and whole.trace.prompt < len(whole.trace.tokens)
    return {"free": compared(whole) if there else None}


def compared(whole: Whole) -> Free:
    """`end`: all tokens are the reference's, and the text ended where the reference's did; null where the full cache
    cut the run."""
    trace, got = whole.trace, whole.seen["free/tokens"]
    want = trace.tokens[trace.prompt :]
    if not len(want) or not len(got):
        raise ValueError(f"free: got {len(got)} tokens for {len(want)} of the reference, allowed: at least one")
    both = min(len(want), len(got))
    step = int(whole.seen["free/diverged"])
    equal: dict[str, bool | None] = {
        str(n): bool(n < len(got) and got[n] == want[n]) if n < len(want) else None for n in STEPS
    }
    same = bool(np.array_equal(got[:both], want[:both]))
    if same and len(got) < len(want) and step < 0:  # the cache was full before the reference's end
        equal |= {k: None for k, v in equal.items() if v is False}
        equal["end"] = None
    else:
        equal["end"] = same and len(got) == len(want)
    return {
        "tokens": [int(t) for t in got],
        "reference": [int(t) for t in want],
        "equal": equal,
        "diverged": _diverged(whole, step, int(got[step]), int(want[step])) if step >= 0 else None,
        "ended": bool(got[-1] in trace.end_ids),
        "reference_ended": trace.ended,
    }


def _diverged(whole: Whole, step: int, token: int, reference: int) -> Change:
    position = whole.trace.prompt - 1 + step
    found: Change = {"step": step, "position": position, "token": token, "reference": reference}
    forced = whole.measured.get("forced")  # up to there it is the same run
    if forced is not None:
        n = int(np.flatnonzero(forced.positions == position)[0])
        found |= {"margin": number(forced.arrays["margin"][n]), "error": number(forced.arrays["rms"][n])}
    return found


def gate(program: str, metrics: Record, thresholds: Thresholds) -> list[Gate]:
    free = metrics["free"]
    if free is None:
        return []
    end, at = free["equal"]["end"], free["diverged"]
    if at is None:
        verdict = "fail" if end is False else "pass"
        what = {True: "all tokens equal", False: "the end differs", None: "equal to the full cache"}[end]
        return [Gate("tokens", verdict, what, program, FREE)]
    tie = near_tie(at)
    what = ("near tie: " if tie else "") + f"generated step {at['step']}: {said(at)}"
    # The step counted in the program, not in the generated part: it sorts against the other histories' steps.
    position = at["position"]
    return [
        Gate(
            "tokens",
            "warn" if tie else "fail",
            what,
            program,
            FREE,
            first={"step": position, "position": position, "generated": at["step"], "tensor": "logits"},
        )
    ]


def check(body: Record, arrays: Mapping[str, Array], limit: float) -> tuple[Figures, list[Finding]]:
    if not body["free"] or body["free"]["equal"]["end"] is not False:
        return {}, []
    return {}, [finding("differs", "free: the tokens are not the reference's", gate="tokens", history=FREE)]


def figures(row: Row) -> Figures:
    free = {name: m["free"] for name, m in row.metrics.items() if m["free"]}
    diverged = [{"program": name, **f["diverged"]} for name, f in free.items() if f["diverged"]]
    return {
        "tokens": {n: _count([f["equal"][n] for f in free.values()]) for n in _NAMES},
        "diverged": min(diverged, key=lambda d: d["step"]) if diverged else None,
    }


def _count(equal: list[bool | None]) -> str:
    """How many programs have the reference's token there: `2/2`; empty where none has such a step."""
    known = [x for x in equal if x is not None]
    return f"{sum(known)}/{len(known)}" if known else ""


MEASURE = Measure(
    name="tokens",
    order=70,
    program=program,
    gate_program=gate,
    figures=figures,
    check=check,
    columns=(
        *(Column(f"tokens_{n}", figure("tokens", n), str) for n in _NAMES),
        Column("diverged_program", figure("diverged", "program"), str),
        Column("diverged_step", figure("diverged", "step"), str),
        Column("diverged_margin", figure("diverged", "margin"), text),
        Column("diverged_error", figure("diverged", "error"), text),
    ),
    terminal={"tokens_end": "to end"},
    bundle={"tokens_end": "prompts with all tokens right"},
    words={
        "`tokens_0` ... `tokens_end`": "free run: programs whose token at that generated step is the reference's, of "
        "those that have the step; `end`: all tokens to the end",
        "`diverged_...`": "the first token that differs: program, generated step, the reference's margin between its "
        "two best logits, and the logits' error there (root mean square, mean removed)",
    },
    broke=("a token of the free run", "the same; where only its end differs, when it stopped"),
)
