"""Mixed precision by search: each matrix in int4 (gptq), in int4 over a widened input (widen), as the sum of two
(split2) or in float16 (keep), in a budget.

By measured isolated losses: what a matrix's form alone costs on the calibration texts, in nats a token; float16 counts
as nought. The budget is of the matrices alone, without scales and attention: `megabytes`, `share` of what float16
takes, or `megacycles`, what the compiler predicts for a token. What was chosen is in weights.json (`sums`, `widened`,
`kept`), and in choice.yaml as an entry of weights.yaml that needs no search.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvgate.prepare import int4_grid
from kvgate.prepare.widened import Terms, Widened
from kvgate.weights import gptq, keep, split2, widen

STATISTICS = True
MOVES = True  # weights, on purpose: the function is not kept
DTYPES = ("w4a16",)
DISABLE = ("fuse_conv_conv_add",)
HYBRID = ("@kept",)

# Of one weight in int4, as a sum, in float16; cycles as toolkit 2.5.0 predicts for rk3576. SmolLM2-135M, whose matrices
# have 134.5 M weights, takes 9.3 M cycles in int4 per channel, 4.2 M in groups of 32, 8.5 M as sums of those, 36.2 M in
# float16.
_PRICES = {"megabytes": (0.5, 1.0, 2.0), "share": (0.25, 0.5, 1.0), "megacycles": (0.069, 0.138, 0.27)}
_CYCLES_GROUPED = (0.0316, 0.0632, 0.27)

Matrices = dict[str, np.ndarray]
Forms = Mapping[str, Sequence[float]]  # a number for each form of each matrix
Loss = Callable[[Matrices], Mapping[str, float]]


@dataclass(frozen=True)
class Form:
    make: Callable[[str], Terms]  # of a matrix's name
    price: float  # of one weight
    kinds: int = 0  # rows that a widened matrix has more, of each group


def matrices(
    weights: Matrices,
    grams: Matrices,
    loss: Loss,
    kernels: Mapping[str, int],
    *,
    megabytes: float | None = None,
    megacycles: float | None = None,
    share: float | None = None,
    group: int = 0,
    signs: Sequence[int] = (),
) -> dict[str, Terms]:
    """weights: [in, out] by name; grams: [in, in] of those that were seen; loss: of changes by name, 0 where unseen;
    kernels: rows that are one input channel; group: of input channels; signs: of widened forms, fewest first.

    Raises ValueError where there is not one budget, or it is below all of them in int4.
    """
    unit, budget = _budget(megabytes=megabytes, megacycles=megacycles, share=share)
    rows = {name: group * kernels[name] for name in weights}
    prices = _CYCLES_GROUPED if unit == "megacycles" and group else _PRICES[unit]
    forms = _forms(weights, grams, rows, [name for name in weights if kernels[name] > 1], prices, group, signs)
    scale = 1e6 if unit != "share" else sum(weight.size for weight in weights.values())
    more = {name: -(-len(weight) // group) if group and kernels[name] == 1 else 0 for name, weight in weights.items()}
    costs = {
        name: [form.price * (len(weight) + form.kinds * more[name]) * weight.shape[1] / scale for form in forms]
        for name, weight in weights.items()
    }
    least = sum(cost[0] for cost in costs.values())
    if budget < least:
        raise ValueError(f"{unit}: got {budget:g}, allowed: at least {least:.4g}, all in int4")
    lost = [
        loss({name: _error(form.make(name), weight, rows[name]) for name, weight in weights.items()})
        for form in forms[:-1]
    ]
    losses = {name: (*(one[name] for one in lost), 0.0) for name in weights}
    return {name: forms[form].make(name) for name, form in choose(losses, costs, budget).items()}


def _forms(
    weights: Matrices,
    grams: Matrices,
    rows: Mapping[str, int],
    convolutions: Sequence[str],
    prices: tuple[float, float, float],
    group: int,
    signs: Sequence[int],
) -> list[Form]:
    """From the least bytes to the most. A convolution's input cannot be widened: that form of it is int4."""

    def int4(name: str) -> Terms:
        return gptq.linear(name, weights[name], grams.get(name), rows[name])

    def wide(count: int, name: str) -> Terms:
        if name in convolutions:
            return int4(name)
        return widen.linear(name, weights[name], grams.get(name), group, count)

    return [
        Form(int4, prices[0]),
        *(Form(partial(wide, count), prices[0], widen.KINDS + count) for count in signs),
        Form(lambda name: split2.linear(name, weights[name], None, rows[name]), prices[1]),
        Form(lambda name: keep.linear(name, weights[name], None), prices[2]),
    ]


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


def steps(
    sums: Iterable[str], kept: Iterable[str], signs: Mapping[str, np.ndarray], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Of an entry of weights.yaml, those that make the same again without a search. options: the search's."""
    group = {"group": options["group"]} if "group" in options else {}
    counts: dict[int, list[str]] = {}
    for name, of in signs.items():
        counts.setdefault(of.shape[1] - widen.KINDS, []).append(name)
    made = [{"name": "gptq", "options": {**group, "skip": [*sums, *signs, *kept]}}]
    made += [{"name": "widen", "options": {**group, "signs": n, "only": counts[n]}} for n in sorted(counts)]
    if sums:
        made.append({"name": "split2", "options": {**group, "only": [*sums]}})
    if kept:
        made.append({"name": "keep", "options": {"only": [*kept]}})
    return made


def _budget(**budgets: float | None) -> tuple[str, float]:
    """The one that is given. Raises ValueError where there is not one."""
    given = {unit: budget for unit, budget in budgets.items() if budget is not None}
    if len(given) != 1:
        raise ValueError(f"budget: got {' and '.join(given) or 'none'}, allowed: one of {', '.join(budgets)}")
    return given.popitem()


def _error(made: Terms, weight: np.ndarray, group: int) -> np.ndarray:
    """What is wrong with it [in, out]: of a sum only what the toolkit rounds, its second term."""
    if isinstance(made, Widened):
        return made.flat() - weight
    return made[0] - weight if len(made) == 1 else int4_grid.nearest(made[1], group) - made[1]
