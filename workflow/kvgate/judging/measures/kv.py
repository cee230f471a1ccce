"""K and V of a step: what a strategy that keeps a cache returns, each layer's against the reference's. numpy only."""

import numpy as np

from kvgate.judging import errors
from kvgate.judging.column import Column, figure
from kvgate.judging.errors import Errors
from kvgate.judging.gate import Gate
from kvgate.judging.measure import Array, History, Measure, Measured, Row, Run
from kvgate.judging.records import Figures, Thresholds, Worst
from kvgate.judging.wording import percent

THRESHOLDS = {
    "kv_l2": {"$ref": "#/$defs/levels", "description": "K/V delta, normalized L2 of the worst layer and step."}
}
OVER = 0.01  # L2 that counts as off in `kv_over`


def arrays(history: History) -> dict[str, Array]:
    """[n, S] of every appended state's entry; S = 0 where the strategy keeps no cache."""
    found = errors.of_states(history, appended=True)
    return {"kv": np.stack(found, 1) if found else np.empty((len(history.positions), 0))}


def summary(steps: Measured) -> Figures:
    kv = steps.arrays["kv"]
    return {"kv": errors.of_each(kv, steps.positions, steps.states["states"]) if kv.size else None}


def worst(figures: Figures) -> Worst | None:
    return figures["kv"]["worst"] if figures["kv"] else None


def gate(run: Run, thresholds: Thresholds) -> list[Gate]:
    return [ERRORS.gate(run, "K/V delta", thresholds["kv_l2"])] if run.figures["kv"] is not None else []


def figures(row: Row) -> Figures:
    names = [x.name for x in row.contract.kept() if x.appended]
    over = errors.share_over(row.arrays, "kv", OVER)
    return errors.over_all(row.arrays, "kv", "kv", names) | {"kv_over": over}


ERRORS = Errors("kv_l2", "kv", worst, states="states")
MEASURE = Measure(
    name="kv_l2",
    order=10,
    title="K/V",
    number=True,
    arrays=arrays,
    summary=summary,
    gate=gate,
    figures=figures,
    check=ERRORS.check,
    worst=worst,
    columns=(
        Column("kv_l2_median", figure("kv_median"), percent),
        Column("kv_l2_worst", figure("kv_worst", "value"), percent),
        Column("kv_l2_over_1_percent", figure("kv_over"), percent),
        Column("kv_worst_layer", figure("kv_worst", "layer"), str),
        Column("kv_worst_tensor", figure("kv_worst", "tensor"), str),
        Column("kv_worst_position", figure("kv_worst", "position"), str),
        Column("kv_worst_history", figure("kv_worst", "history"), str),
    ),
    terminal={"kv_l2_worst": "K/V worst", "kv_l2_over_1_percent": "over 1 %"},
    bundle={"kv_l2_worst": "K and V off by at most", "kv_l2_median": "K and V, median"},
    words={
        "`kv_l2_median`, `kv_l2_worst`, `kv_worst_...`": "error of the K and V of a step, over all layers and steps; "
        "then the worst one's layer, tensor, position and history",
        "`kv_l2_over_1_percent`": "share of those errors above 1 %",
    },
    broke=("K or V of this step", "the first layer named: what comes after it follows from it"),
)
