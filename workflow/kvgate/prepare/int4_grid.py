"""The toolkit's w4a16 grid: symmetric -7..7, scale = max |w| / 7 of a column, or of a group of its rows.

Measured: a column (or group) that already lies on its grid with an entry at +-7 comes back exactly.
"""

import numpy as np

TOP = 7


def scales(weight: np.ndarray, group: int) -> np.ndarray:
    """[in / group or 1, 1, out] of a matrix [in, out]. Raises ValueError where the group does not divide `in`."""
    rows = len(weight)
    if group and rows % group:
        raise ValueError(f"group: got {group}, allowed: a divisor of the matrix's {rows} input channels")
    largest = np.abs(weight.reshape(-1, group or rows, weight.shape[1])).max(1, keepdims=True)
    return np.where(largest == 0, 1.0, largest / TOP)


def nearest(weight: np.ndarray, group: int) -> np.ndarray:
    """The matrix [in, out] with every entry at its nearest point of the grid."""
    scale = scales(weight, group)
    rounded = np.rint(weight.reshape(len(scale), -1, weight.shape[1]) / scale) * scale
    return rounded.reshape(weight.shape).astype(np.float32)
