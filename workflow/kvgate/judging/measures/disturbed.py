"""Slots that a step should give back as they were fed: of strategies that return the whole buffer. numpy only."""

import numpy as np

from kvgate.judging import errors
from kvgate.judging.errors import Errors
from kvgate.judging.gate import Gate
from kvgate.judging.measure import Array, History, Measure, Measured, Run
from kvgate.judging.records import Figures, Thresholds, Worst

THRESHOLDS = {
    "disturbed": {"$ref": "#/$defs/levels", "description": "Slots that should come back as fed, normalized L2."}
}


def arrays(history: History) -> dict[str, Array]:
    """[n] Step.disturbed"""
    return {"disturbed": np.asarray(history.get("disturbed"), np.float64)}


def summary(steps: Measured) -> Figures:
    return {"disturbed": errors.worst(steps, "disturbed")}


def worst(figures: Figures) -> Worst | None:
    return figures["disturbed"]


def gate(run: Run, thresholds: Thresholds) -> list[Gate]:
    """Of a strategy that keeps a cache."""
    return [ERRORS.gate(run, "other slots", thresholds["disturbed"])] if run.figures["kv"] is not None else []


ERRORS = Errors("disturbed", "disturbed", worst)
MEASURE = Measure(
    name="disturbed",
    order=30,
    number=True,
    arrays=arrays,
    summary=summary,
    gate=gate,
    check=ERRORS.check,
    broke=("slots that the step should give back as fed", "how the graph writes the buffer"),
)
