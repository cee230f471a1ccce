"""A state that each step replaces (a convolution's, linear attention's), whole, where the reference knows it. numpy
only."""

from collections.abc import Mapping

import numpy as np

from kvgate.judging import errors
from kvgate.judging.column import Column, figure
from kvgate.judging.errors import Errors
from kvgate.judging.gate import Gate
from kvgate.judging.measure import Array, History, Measure, Measured, Row, Run
from kvgate.judging.records import Figures, Finding, Record, Thresholds, Worst
from kvgate.judging.wording import percent

THRESHOLDS = {
    "state_l2": {
        "$ref": "#/$defs/levels",
        "default": {"pass": 0.005, "warn": 0.01},
        "description": "A state that each step replaces, whole, normalized L2 of the worst layer and step.",
    }
}


def arrays(history: History) -> dict[str, Array]:
    """[m, R] of every replaced state, and [m] of the positions, those after which the reference knows them."""
    found = errors.of_states(history, appended=False)
    known = [int(p) for p in history.positions if p in history.trace.at] if found else []
    return {
        "replaced": np.stack(found, 1) if found else np.empty((0, 0)),
        "replaced_positions": np.array(known, np.int64),
    }


def summary(steps: Measured) -> Figures:
    values, positions = steps.arrays["replaced"], steps.arrays["replaced_positions"]
    return {"replaced": errors.of_each(values, positions, steps.states["replaced"]) if values.size else None}


def worst(figures: Figures) -> Worst | None:
    return figures["replaced"]["worst"] if figures["replaced"] else None


def gate(run: Run, thresholds: Thresholds) -> list[Gate]:
    """Replaced states that nothing was compared of are no pass."""
    if run.figures.get("replaced") is not None:
        return [ERRORS.gate(run, "state", thresholds["state_l2"])]
    names = run.metrics.get("replaced")
    if not names:
        return []
    return [Gate("compared", "fail", f"none of {len(names)} replaced states compared", run.program, run.history)]


def check(body: Record, arrays: Mapping[str, Array], limit: float) -> tuple[Figures, list[Finding]]:
    return ERRORS.check(body, arrays, limit) if body["replaced"] else ({}, [])


def figures(row: Row) -> Figures:
    names = [x.name for x in row.contract.kept() if not x.appended]
    return errors.over_all(row.arrays, "state", "replaced", names, "replaced_positions") if names else {}


ERRORS = Errors("state_l2", "replaced", worst, states="replaced", where="replaced_positions")
MEASURE = Measure(
    name="state_l2",
    order=20,
    listed=35,  # behind `disturbed`
    title="states",
    number=True,
    arrays=arrays,
    summary=summary,
    gate=gate,
    figures=figures,
    check=check,
    worst=worst,
    columns=(
        Column("state_l2_median", figure("state_median"), percent),
        Column("state_l2_worst", figure("state_worst", "value"), percent),
        Column("state_worst", figure("state_worst", "state"), str),
        Column("state_worst_position", figure("state_worst", "position"), str),
    ),
    optional=True,
    terminal={"state_l2_worst": "state worst"},
    bundle={"state_l2_worst": "other states off by at most"},
    words={
        "`state_l2_median`, `state_l2_worst`, `state_worst_...`": "the same of states that each "
        "step replaces, whole, at the positions where the reference has them; only in a table that has such rows"
    },
    broke=("a state that each step replaces (a convolution's, linear attention's), whole", "the first layer named"),
)
