"""Mixed precision by search: every matrix in int4 (gptq), and those that gain most a byte as the sum of two (split2).

Greedy on measured isolated losses: of each matrix what its int4 form alone costs on the calibration texts, in nats a
token, by the bytes that the second term takes. `megabytes`: of all int4 weights together, at half a byte each. What was
chosen is in weights.json (`sums`); so `gptq` with `skip` and `split2` with `only` make the same again.
"""

from collections.abc import Callable, Mapping

import numpy as np

from kvgate.weights import gptq, split2

STATISTICS = True
MOVES = True  # weights, on purpose: the function is not kept
DTYPES = ("w4a16",)
DISABLE = ("fuse_conv_conv_add",)
_BYTES = 0.5  # of an int4 weight

Matrices = dict[str, np.ndarray]


def matrices(
    weights: Matrices,
    grams: Matrices,
    loss: Callable[[Matrices], Mapping[str, float]],
    *,
    megabytes: float,
    group: int = 0,
) -> dict[str, tuple[np.ndarray, ...]]:
    """weights: [in, out] by name; grams: [in, in] of those that were seen; loss: of changes by name, 0 where unseen.

    Raises ValueError where the budget is below all of them in int4.
    """
    sizes = {name: _BYTES * weight.size for name, weight in weights.items()}
    left = megabytes * 1e6 - sum(sizes.values())
    if left < 0:
        raise ValueError(
            f"megabytes: got {megabytes:g}, allowed: at least {sum(sizes.values()) / 1e6:.1f}, all in int4"
        )
    found = {name: gptq.linear(name, weight, grams.get(name), group) for name, weight in weights.items()}
    lost = loss({name: found[name][0] - weight for name, weight in weights.items()})
    for name in sorted(weights, key=lambda name: -lost[name] / sizes[name]):
        if sizes[name] <= left:
            left -= sizes[name]
            found[name] = split2.linear(name, weights[name], None, group)
    return found
