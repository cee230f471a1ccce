"""Every matrix as the sum of two on the int4 grid: W1 = round(7 W / max) max / 7, W2 = W - W1; y = x W1 + x W2.

The accuracy of int8 out of int4 kernels, at the bytes of int8. `group`: input channels that share a scale (0: all).
"""

import numpy as np

from kvgate.prepare import int4_grid

DTYPES = ("w4a16",)
DISABLE = ("fuse_conv_conv_add",)  # rules of the toolkit that cannot take the sum of two products


def linear(name: str, weight: np.ndarray, gram: np.ndarray | None, group: int = 0) -> tuple[np.ndarray, ...]:
    """weight: [in, out]. Raises ValueError where the group does not divide its rows."""
    first = int4_grid.nearest(weight, group)
    return first, weight - first
