"""The logits' error in decibels, as quantizers give it. No gate. numpy only."""

import numpy as np

from kvgate.judging import metrics
from kvgate.judging.column import Column, figure
from kvgate.judging.measure import Measure, Measured, Row, number
from kvgate.judging.measures.logits import figures as of_logits
from kvgate.judging.records import Figures


def summary(steps: Measured) -> Figures:
    if not steps.arrays["centred"].size:
        return {}
    noise = metrics.sqnr(steps.arrays["centred"])
    return {"sqnr_db": {"median": number(float(np.median(noise))), "worst": number(noise.min())}}


def figures(row: Row) -> Figures:
    worst = of_logits(row)["logits_worst"]
    return {"sqnr_db": number(-20 * np.log10(worst["value"])) if worst and worst["value"] else None}


MEASURE = Measure(
    name="sqnr_db",
    order=55,
    summary=summary,
    figures=figures,
    columns=(Column("sqnr_db", figure("sqnr_db"), lambda v: f"{v:.1f}"),),
    words={"`sqnr_db`": "the worst logits error in dB: 40 dB is 1 %; empty where there is no error"},
)
