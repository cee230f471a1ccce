"""Every matrix on the toolkit's int4 grid, each row's rounding error made up for by the rows after it.

After GPTQ (arXiv 2210.17323), with the Hessian of the calibration texts; the rows of the largest inputs come first.
A group's scale is the one that loses least (its largest entries may be cut), and its largest entry is pinned to the
grid's end: so the toolkit finds the same scale and changes nothing.
"""

import numpy as np
import torch

from kvgate.prepare import int4_grid

STATISTICS = True
MOVES = True  # weights, on purpose: the function is not kept
DTYPES = ("w4a16",)
_DAMPING = 0.01  # of the Hessian's mean diagonal
_SHARES = np.linspace(1, 0.7, 20, dtype=np.float32)  # of the largest scale, that are tried
_COLUMNS = 4096  # at once: they do not know of each other, and a head has 262,144
_BLOCK = 128  # rows whose errors are passed on together


def linear(name: str, weight: np.ndarray, gram: np.ndarray | None, group: int = 0) -> tuple[np.ndarray, ...]:
    """weight: [in, out]; gram: [in, in], the sum of x^T x; None (a matrix that is no product): the nearest points.

    Raises ValueError where the group does not divide the rows.
    """
    if gram is None:
        return (int4_grid.nearest(weight, group),)
    order, factor = ordered(gram)
    done = np.empty(weight.shape, np.float32)
    for start in range(0, weight.shape[1], _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        scale = _scales(weight[:, columns], group, np.diag(gram))
        done[:, columns] = rounded(weight[:, columns], scale, order, factor)
    return (done,)


def ordered(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order of the rows, largest inputs first, and in it the factor of the inverse Hessian, for `rounded`."""
    order = np.argsort(-np.diag(gram), kind="stable")
    return order, _factor(gram[np.ix_(order, order)].astype(np.float64))


def rounded(weight: np.ndarray, scale: np.ndarray, order: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Columns on the grid of `scale` [groups, 1, out], row by row in `order`, each row's error passed on."""
    span = len(weight) // len(scale)
    ends = np.abs(weight.reshape(len(scale), span, -1)).argmax(1) + span * np.arange(len(scale))[:, None]
    left, done = weight[order].astype(np.float64), np.empty(weight.shape, np.float32)
    for start in range(0, len(order), _BLOCK):
        stop = min(start + _BLOCK, len(order))
        errors = np.empty((stop - start, weight.shape[1]))
        for n in range(start, stop):
            row = order[n]
            step = scale[row // span, 0]
            point = np.clip(np.rint(left[n] / step), -int4_grid.TOP, int4_grid.TOP)
            pinned = ends[row // span] == row
            done[row] = step * np.where(pinned, np.sign(weight[row]) * int4_grid.TOP, point)
            errors[n - start] = (left[n] - done[row]) / factor[n, n]
            left[n + 1 : stop] -= np.outer(factor[n, n + 1 : stop], errors[n - start])
        left[stop:] -= factor[start:stop, stop:].T @ errors
    return done


def _scales(weight: np.ndarray, group: int, energy: np.ndarray) -> np.ndarray:
    """[in / group or 1, 1, out]: of each group the scale up to max |w| / 7 whose nearest points lose least.

    energy: [in], the mean square of each input (times a number).
    """
    whole = int4_grid.scales(weight, group)
    parts, energy = weight.reshape(len(whole), -1, weight.shape[1]), energy.reshape(len(whole), -1, 1)
    best, least = whole, np.full(whole.shape, np.inf)
    for share in _SHARES:
        scale = whole * share
        points = np.clip(np.rint(parts / scale), -int4_grid.TOP, int4_grid.TOP)
        lost = np.sum((parts - points * scale) ** 2 * energy, axis=1, keepdims=True)
        best, least = np.where(lost < least, scale, best), np.minimum(lost, least)
    return best


def _factor(gram: np.ndarray) -> np.ndarray:
    """Upper Cholesky factor U of the inverse of the damped Hessian H; inputs that are always zero count as one.

    H^-1 = U^T U, so H = V V^T with V = U^-1 upper: the Cholesky factor from the other end, without inverting H.
    """
    dead = np.diag(gram) == 0
    gram[dead, dead] = 1.0
    gram[np.diag_indices_from(gram)] += _DAMPING * np.diag(gram).mean()
    try:
        upper = torch.linalg.cholesky(torch.from_numpy(gram).flip(0, 1)).flip(0, 1)
    except torch.linalg.LinAlgError:
        raise ValueError("Hessian: got NaN or no positive definite matrix, allowed: finite inputs") from None
    eye = torch.eye(len(gram), dtype=upper.dtype)
    return torch.linalg.solve_triangular(upper, eye, upper=True).numpy()
