"""The best token of each step: the reference's, or another one, by a hair or truly. numpy only."""

from collections.abc import Mapping

import numpy as np

from kvgate.judging.column import Column
from kvgate.judging.gate import Gate
from kvgate.judging.measure import Array, History, Measure, Measured, Row, Run, number
from kvgate.judging.records import Change, Figures, Finding, Record, Thresholds, Verdict, finding
from kvgate.judging.ties import near_tie, said


def arrays(history: History) -> dict[str, Array]:
    """Each [n], [0] where a part returns no logits: the best token and the reference's."""
    best = [(int(got.argmax()), int(want.argmax())) for got, want in history.logits()]
    tokens = np.array(best).reshape(-1, 2)
    return {"got": tokens[:, 0], "want": tokens[:, 1]}


def summary(steps: Measured) -> Figures:
    """Uses the logits' margin and error."""
    got, want = steps.arrays["got"], steps.arrays["want"]
    if not got.size:
        return {"top1": None}
    changed: list[Change] = [
        {
            "step": int(n),
            "position": int(steps.positions[n]),
            "token": int(got[n]),
            "reference": int(want[n]),
            "margin": number(steps.arrays["margin"][n]),
            "error": number(steps.arrays["rms"][n]),
        }
        for n in np.flatnonzero(got != want)
    ]
    return {"top1": {"equal": len(got) - len(changed), "of": len(got), "changed": changed}}


def gate(run: Run, thresholds: Thresholds) -> list[Gate]:
    top1 = run.figures.get("top1")
    if top1 is None:
        return []
    if not top1["changed"]:
        text = f"best token equal in {top1['equal']} of {top1['of']} steps"
        return [Gate("top1", "pass", text, run.program, run.history)]
    true = [x for x in top1["changed"] if not near_tie(x)]
    changed = true or top1["changed"]
    change = changed[0]
    steps = tuple(x["step"] for x in changed)
    return [
        Gate(
            "top1",
            "fail" if true else "warn",
            ("" if true else "near tie: ") + said(change),
            run.program,
            run.history,
            first={"step": change["step"], "position": change["position"], "tensor": "logits"},
            steps=steps,
        )
    ]


def check(body: Record, arrays: Mapping[str, Array], limit: float) -> tuple[Figures, list[Finding]]:
    """How many best tokens are equal, and of each history the first that is not."""
    equal, found = 0, []
    for history, figures in body["histories"].items():
        top1 = figures["top1"] or {"equal": 0, "changed": []}
        equal += top1["equal"]
        for at in top1["changed"][:1]:
            text = f"{history}: token {at['token']} instead of {at['reference']} at position {at['position']}"
            found.append(finding("differs", text, gate="top1", history=history, **at))
    return {"top1": equal}, found


def figures(row: Row) -> Figures:
    histories = [h["top1"] for m in row.metrics.values() for h in m["histories"].values() if h["top1"]]
    return {"top1_equal": sum(x["equal"] for x in histories), "top1_of": sum(x["of"] for x in histories)}


def cell(verdict: Verdict) -> str | None:
    f = verdict["figures"]
    return f"{f['top1_equal']}/{f['top1_of']}" if f.get("top1_of") else None


MEASURE = Measure(
    name="top1",
    order=60,
    number=True,
    arrays=arrays,
    summary=summary,
    gate=gate,
    figures=figures,
    check=check,
    columns=(Column("top1", cell, str),),
    terminal={"top1": "top-1"},
    bundle={"top1": "steps with the reference's best token"},
    words={"`top1`": "steps whose best token is the reference's, of all steps"},
    broke=("the best token of a step", "`margin` and `error`: below the error it is a near tie and only warns"),
)
