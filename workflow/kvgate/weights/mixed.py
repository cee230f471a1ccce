"""Mixed precision by search: each matrix in int4 (gptq), as the sum of two (split2) or in float16 (keep), in a budget.

By measured isolated losses: what a matrix's form alone costs on the calibration texts, in nats a token; float16 counts
as nought. The budget is of the matrices alone, without scales and attention: `megabytes`, or `megacycles`, what the
compiler predicts for a token. What was chosen is in weights.json (`sums`, `kept`), and in choice.yaml as an entry of
weights.yaml that needs no search.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvgate.export import grid
from kvgate.weights import gptq, keep, split2

STATISTICS = True
MOVES = True  # weights, on purpose: the function is not kept
DTYPES = ("w4a16",)
DISABLE = ("fuse_conv_conv_add",)
HYBRID = ("@kept",)

# Of one weight in int4, as a sum, in float16.
_BYTES = (0.5, 1.0, 2.0)
# Predicted by toolkit 2.5.0 for rk3576. SmolLM2-135M, whose matrices have 134.5 M weights, takes 9.3 M cycles in int4
# per channel, 4.2 M in groups of 32, 8.5 M as sums of those, 36.2 M in float16.
_CYCLES = (0.069, 0.138, 0.27)
_CYCLES_GROUPED = (0.0316, 0.0632, 0.27)

Matrices = dict[str, np.ndarray]
Forms = Mapping[str, Sequence[float]]  # a number for each form of each matrix


def matrices(
    weights: Matrices,
    grams: Matrices,
    loss: Callable[[Matrices], Mapping[str, float]],
    kernels: Mapping[str, int],
    *,
    megabytes: float | None = None,
    megacycles: float | None = None,
    group: int = 0,
) -> dict[str, tuple[np.ndarray, ...]]:
    """weights: [in, out] by name; grams: [in, in] of those that were seen; loss: of changes by name, 0 where unseen;
    kernels: rows that are one input channel; group: of input channels.

    Raises ValueError where there is not one budget, or it is below all of them in int4.
    """
    budgets = {"megabytes": megabytes, "megacycles": megacycles}
    given = {unit: budget for unit, budget in budgets.items() if budget is not None}
    if len(given) != 1:
        raise ValueError(f"budget: got {' and '.join(given) or 'none'}, allowed: one of {', '.join(budgets)}")
    ((unit, budget),) = given.items()
    prices = _BYTES if unit == "megabytes" else _CYCLES_GROUPED if group else _CYCLES
    costs = {name: [price * weight.size / 1e6 for price in prices] for name, weight in weights.items()}
    least = sum(cost[0] for cost in costs.values())
    if budget < least:
        raise ValueError(f"{unit}: got {budget:g}, allowed: at least {least:.4g}, all in int4")
    rows = {name: group * kernels[name] for name in weights}
    found = {name: gptq.linear(name, weight, grams.get(name), rows[name]) for name, weight in weights.items()}
    int4 = loss({name: found[name][0] - weight for name, weight in weights.items()})
    sums = loss({name: _left(weight, rows[name]) for name, weight in weights.items()})
    for name, form in choose({name: (int4[name], sums[name], 0.0) for name in weights}, costs, budget).items():
        if form == 1:
            found[name] = split2.linear(name, weights[name], None, rows[name])
        if form == 2:
            found[name] = keep.linear(name, weights[name], None)
    return found


def choose(losses: Forms, costs: Forms, budget: float) -> dict[str, int]:
    """The number of each one's form, by what its forms lose and cost; the budget holds all of the first forms.

    It loses no more than any one form for all that fits the budget, and a larger budget never loses more.
    """
    found = []
    for form in range(len(next(iter(costs.values())))):
        left = budget - sum(cost[form] for cost in costs.values())
        if form == 0 or left >= 0:
            found.append(_upgraded(losses, costs, dict.fromkeys(losses, form), left))
    return min(found, key=lambda chosen: sum(losses[name][form] for name, form in chosen.items()))


def _upgraded(losses: Forms, costs: Forms, chosen: dict[str, int], left: float) -> dict[str, int]:
    """Greedy: the change that gains most for its cost among those that fit, again and again.

    It may pass over a form, so that a poor one does not hide a good one behind it.
    """
    while True:
        moves = []
        for name, now in chosen.items():
            for form in range(now + 1, len(costs[name])):
                gain, cost = losses[name][now] - losses[name][form], costs[name][form] - costs[name][now]
                if gain > 0 and cost <= left:
                    moves.append((gain / cost, cost, name, form))
        if not moves:
            return chosen
        _, cost, name, form = max(moves)
        chosen[name], left = form, left - cost


def steps(sums: Iterable[str], kept: Iterable[str], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of an entry of weights.yaml, those that make the same again without a search. options: the search's."""
    group = {"group": options["group"]} if "group" in options else {}
    made = [{"name": "gptq", "options": {**group, "skip": [*sums, *kept]}}]
    if sums:
        made.append({"name": "split2", "options": {**group, "only": [*sums]}})
    if kept:
        made.append({"name": "keep", "options": {"only": [*kept]}})
    return made


def _left(weight: np.ndarray, group: int) -> np.ndarray:
    """What is wrong with the sum [in, out]: the toolkit rounds its second term."""
    _, second = split2.linear("", weight, None, group)
    return grid.nearest(second, group) - second
