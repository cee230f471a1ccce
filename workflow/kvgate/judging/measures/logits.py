"""Logits: how far each step's are off, as they are and with their mean removed, and how sure the reference is. numpy
only."""

import numpy as np

from kvgate.judging import errors, metrics
from kvgate.judging.column import Column, figure
from kvgate.judging.errors import Errors
from kvgate.judging.gate import Gate
from kvgate.judging.measure import Array, History, Measure, Measured, Row, Run, number
from kvgate.judging.records import Figures, Thresholds, Worst
from kvgate.judging.wording import percent

THRESHOLDS = {
    "logits_l2": {"$ref": "#/$defs/levels", "description": "Logits, normalized L2 of the worst step."},
    "logits_measure": {"enum": ["centred", "raw"], "description": "Logits with their mean removed, or as they are."},
}


def arrays(history: History) -> dict[str, Array]:
    """Each [n], [0] where a part returns no logits: normalized L2 of the logits (`raw`), the same with their mean
    removed (`centred`), `cosine`, `kl` in nats, error of the mean-removed logits in logits (`rms`), and the reference's
    `margin`."""
    found: dict[str, list[float]] = {name: [] for name in ("raw", "centred", "cosine", "kl", "rms", "margin")}
    for got, want in history.logits():
        found["raw"].append(metrics.l2(got, want))
        found["centred"].append(metrics.l2(metrics.centred(got), metrics.centred(want)))
        found["cosine"].append(metrics.cosine(got, want))
        found["kl"].append(float(metrics.kl(got, want)))
        found["rms"].append(float(metrics.rms_error(got, want)))
        found["margin"].append(float(metrics.margin(want)))
    return {name: np.array(values) for name, values in found.items()}


def summary(steps: Measured) -> Figures:
    if not steps.arrays["raw"].size:
        return {"logits": None, "kl": None}
    margin = steps.arrays["margin"]
    return {
        "logits": {"centred": errors.spread(steps, "centred"), "raw": errors.spread(steps, "raw")},
        "cosine": {"worst": number(steps.arrays["cosine"].min())},
        "kl": number(steps.arrays["kl"].mean()),
        "margin": {"median": number(float(np.median(margin))), "least": number(margin.min())},
    }


def worst(figures: Figures) -> Worst | None:
    """Of the mean-removed logits: what float16's own error is of."""
    return figures["logits"]["centred"]["worst"] if figures["logits"] else None


def worst_raw(figures: Figures) -> Worst | None:
    return figures["logits"]["raw"]["worst"] if figures["logits"] else None


def gate(run: Run, thresholds: Thresholds) -> list[Gate]:
    if run.figures["logits"] is None:
        return []
    measure = thresholds["logits_measure"]
    of = Errors("logits_l2", measure, worst, tensor="logits")
    return [of.gate(run, f"logits ({measure})", thresholds["logits_l2"])]


def figures(row: Row) -> Figures:
    return errors.over_all(row.arrays, "logits", "centred", ()) | errors.over_all(row.arrays, "raw", "raw", ())


MEASURE = Measure(
    name="logits_l2",
    order=50,
    title="logits",
    number=True,
    arrays=arrays,
    summary=summary,
    gate=gate,
    figures=figures,
    check=Errors("logits_l2", "raw", worst_raw, tensor="logits").check,
    worst=worst,
    columns=(
        Column("logits_l2_median", figure("logits_median"), percent),
        Column("logits_l2_worst", figure("logits_worst", "value"), percent),
        Column("logits_raw_l2_median", figure("raw_median"), percent),
        Column("logits_raw_l2_worst", figure("raw_worst", "value"), percent),
    ),
    terminal={"logits_l2_worst": "logits"},
    bundle={"logits_l2_worst": "logits off by at most", "logits_l2_median": "logits, median"},
    words={
        "`logits_l2_median`, `logits_l2_worst`": "error of the logits with their mean removed (softmax ignores a "
        "common offset)",
        "`logits_raw_l2_...`": "the same of the logits as they are",
    },
    broke=("logits", "the last layers and the head, if `kv_l2` holds"),
)
