"""Figures in words. Standard library only."""

import math

from kvgate.judging.records import StatePlace

# A board's times a step, medians; the overhead is what `inference` takes beyond the runtime's own run time.
TIMES = ("total", "inference", "npu", "cpu", "inputs", "cache", "overhead", "first_token")


def percent(value: float | None) -> str:
    """A ratio for people: 0.00873 -> `0.87 %`."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{100 * value:.{0 if value >= 1 else 2 if value >= 0.001 else 4}f} %"


def place(state: str) -> StatePlace:
    """Where a state is: `layers.3.key` -> its name, its layer and its kind."""
    _, layer, kind = state.split(".")
    return {"state": state, "layer": int(layer), "tensor": kind}
