"""How texts read with the row's own cache: perplexity, KL, best tokens. Beside the gates, changes no verdict. numpy
only."""

import numpy as np

from kvgate.judging import behaviour, metrics
from kvgate.judging.column import Column, figure, text
from kvgate.judging.measure import Measure, Row, Whole, number
from kvgate.judging.records import Figures, Perplexity, Verdict
from kvgate.judging.wording import percent

THRESHOLDS = {
    "behaviour": {
        "description": "Beside the gates; changes no verdict.",
        "type": "object",
        "additionalProperties": False,
        "required": ["perplexity", "top1"],
        "properties": {
            "perplexity": {
                "type": "number",
                "minimum": 1,
                "description": "The largest ratio of a row's perplexity to the reference's.",
            },
            "top1": {
                "type": "number",
                "minimum": 0,
                "maximum": 1,
                "description": "The smallest share of equal best tokens.",
            },
        },
    }
}


def program(whole: Whole) -> Figures:
    """Null where the program is no text, its own cache was not run, or the part returns no logits."""
    trace = whole.trace
    own = trace.prompt == len(trace.tokens) and "forced" in whole.measured
    return {"perplexity": perplexity(whole) if own and whole.measured["forced"].arrays["raw"].size else None}


def perplexity(whole: Whole) -> Perplexity:
    """Of a teacher-forced text, with the graph's own cache, beside the reference's on the same positions."""
    trace = whole.trace
    assert trace.logits is not None
    positions = whole.seen["forced/positions"]
    rows = np.flatnonzero(positions < len(trace.tokens) - 1)
    if not len(rows):
        raise ValueError("forced: got no position with a next token, allowed: at least one")
    logits, mine, theirs = whole.seen["forced/logits"], [], []
    for n in rows:
        p = positions[n]
        mine.append(metrics.surprise(logits[n : n + 1], trace.tokens[p + 1 : p + 2])[0])
        theirs.append(metrics.surprise(trace.logits[p : p + 1], trace.tokens[p + 1 : p + 2])[0])
    return {
        "tokens": len(rows),
        "value": number(metrics.perplexity(np.array(mine))),
        "reference": number(metrics.perplexity(np.array(theirs))),
        "kl": whole.figures["forced"]["kl"],
    }


def figures(row: Row) -> Figures:
    return {"behaviour": behaviour.measure(row.metrics, row.thresholds["behaviour"])}


def behaves(verdict: Verdict) -> str | None:
    found = figure("behaviour", "behaves")(verdict)
    return None if found is None else "yes" if found else "no"


def ships(verdict: Verdict) -> str | None:
    return behaviour.ships(verdict) or None


MEASURE = Measure(
    name="behaviour",
    order=80,
    program=program,
    figures=figures,
    columns=(
        Column("behaves", behaves, str),
        Column("ships", ships, str),
        Column("perplexity", figure("behaviour", "perplexity"), text),
        Column("perplexity_reference", figure("behaviour", "reference"), text),
        Column("perplexity_ratio", figure("behaviour", "ratio"), lambda v: f"{v:.3f}"),
        Column("kl", figure("behaviour", "kl"), text),
        Column("top1_text", figure("behaviour", "top1"), percent),
    ),
    terminal={"perplexity_ratio": "perplexity x", "top1_text": "top-1 text", "behaves": "behaves"},
    bundle={"perplexity": "perplexity", "perplexity_reference": "perplexity of the float32 reference"},
    words={
        "`perplexity`, `perplexity_reference`, `kl`": "of the forced text with the row's own cache, the reference's on "
        "the same positions, and the mean KL in nats",
        "`ships`": "as what the row may be handed over: `pass`, `warn`, `behaves`; empty: not at all",
        "`behaves`, `perplexity_ratio`, `top1_text`": "beside the gates: does the row read like float32, over the text "
        "programs with its own cache? Limits: `behaviour` in thresholds.yaml",
    },
)
