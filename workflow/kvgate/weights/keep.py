"""Matrices left as they are, which a quant with `@kept` leaves in float16. Options: `only` and `skip`."""

import numpy as np

HYBRID = ("@kept",)  # without it the toolkit would round them to their nearest int4


def linear(name: str, weight: np.ndarray, gram: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """weight: [in, out], and so is what it gives: the same array, by which a kept matrix is known."""
    return (weight,)
