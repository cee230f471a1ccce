"""Mixed precision by search: every matrix in int4 (gptq), and those that gain most a byte as the sum of two (split2).

Greedy on measured isolated errors: of each matrix the share of its output's energy that int4 loses on the calibration
texts, ||X (W - W')||^2 / ||X W||^2; what the sum of two saves of it, by the bytes that the second term takes.
`megabytes`: of all int4 weights together, at half a byte each. What was chosen is in weights.json (`sums`).
"""

from collections.abc import Mapping

import numpy as np

from kvgate.weights import gptq, split2

STATISTICS = True
DTYPES = ("w4a16",)
DISABLE = ("fuse_conv_conv_add",)
_BYTES = 0.5  # of an int4 weight


def matrices(
    weights: Mapping[str, np.ndarray], grams: Mapping[str, np.ndarray], megabytes: float, group: int = 0
) -> dict[str, tuple[np.ndarray, ...]]:
    """weights: [in, out] by name; grams: [in, in] of those that were seen.

    Raises ValueError where the budget is below all of them in int4.
    """
    sizes = {name: _BYTES * weight.size for name, weight in weights.items()}
    left = megabytes * 1e6 - sum(sizes.values())
    if left < 0:
        raise ValueError(
            f"megabytes: got {megabytes:g}, allowed: at least {sum(sizes.values()) / 1e6:.1f}, all in int4"
        )
    found, gain = {}, {}
    for name, weight in weights.items():
        gram = grams.get(name)
        found[name] = gptq.linear(name, weight, gram, group)
        gain[name] = _lost(weight, found[name][0], gram) / sizes[name]
    for name in sorted(gain, key=lambda name: -gain[name]):
        if sizes[name] <= left:
            left -= sizes[name]
            found[name] = split2.linear(name, weights[name], None, group)
    return found


def _lost(weight: np.ndarray, made: np.ndarray, gram: np.ndarray | None) -> float:
    """||X (W - W')||^2 / ||X W||^2; of a matrix that was not seen as if its inputs were independent."""

    def energy(matrix: np.ndarray) -> float:
        wide = matrix.astype(np.float64)
        return float(np.sum(wide * (wide if gram is None else gram.astype(np.float64) @ wide)))

    return energy(weight - made) / max(energy(weight), 1e-30)
