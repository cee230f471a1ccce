"""Figures in words. Standard library only."""

import math


def percent(value: float | None) -> str:
    """A ratio for people: 0.00873 -> `0.87 %`."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{100 * value:.{0 if value >= 1 else 2 if value >= 0.001 else 4}f} %"
