"""Int4 with an offset to each group of channels and all 16 levels, over an input that is widened by sums of its groups.

The grid of the toolkit, -7..7 about zero, wastes a level of 16 and what a group's mean is off zero. Here a group of a
column is d u + m, m its middle and u in -7.5..7.5 in steps of 1 (as the Q4_1 and Q4_K of GGUF have it, which this finds
again). With the offset m + d / 2 or m - d / 2 all levels but one fit; the sign of d / 2 may differ by channel, as in a
row of a Hadamard matrix, one of `signs` to choose from and its negative: few groups then lose a level at all. The rows
beside the group's own hold m in two digits and, in the chosen one, d / 2. Weights of more levels than 16 are rounded as
in gptq. At the end least squares over the calibration texts for all scales: the points of the grid stay.
"""

import numpy as np

from kvgate.prepare import int4_grid, widened
from kvgate.prepare.orthogonal import hadamard
from kvgate.prepare.widened import Widened
from kvgate.weights import gptq

STATISTICS = True
MOVES = True  # weights, on purpose: the function is not kept
DTYPES = ("w4a16",)
KINDS = 2  # rows that a group has more, beside those of signs
_DIGITS = (4.0, 0.5)  # of the two rows of ones: m / 4 is about as large as d / 2, whose scale it shares; then the rest
_EXACT = 0.02  # of a step: nearer to one of 16 levels is on it; share of a column's weights that may be off
_EQUAL = 1 + 1e-12  # a loss up to so many times the least is as little
_STEPS = 1024  # of one, in which scales are found: their last digits would be the PC's
_DAMPING = 0.01  # of the Gram matrix's mean diagonal
_TOWARDS = 1e-4  # weight of the scales as they were
_RANGE = (0.7, 1.3)  # of the scales as they were
_COLUMNS = 128  # at once: they do not know of each other


def linear(name: str, weight: np.ndarray, gram: np.ndarray | None, group: int = 32, signs: int = 3) -> Widened:
    """weight: [in, out]; gram: [in, in], the sum of x^T x; None: all inputs count alike, and the scales stay.

    Raises ValueError where the group is no power of two that divides the rows, or has not so many rows of signs.
    """
    basis = _basis(group, signs)
    known = None if gram is None else _Known(gram)
    starts = range(0, weight.shape[1], _COLUMNS)
    made = [_columns(weight[:, start : start + _COLUMNS], known, basis) for start in starts]
    return Widened(np.concatenate(made, axis=1), basis)


class _Known:
    """What a Gram matrix is read as."""

    def __init__(self, gram: np.ndarray) -> None:
        self.energy = np.diag(gram).astype(np.float64)
        self.damped = gram.astype(np.float64)
        self.damped[np.diag_indices_from(gram)] += _DAMPING * self.energy.mean()
        self.order, self.factor = gptq.ordered(gram)


def _columns(weight: np.ndarray, known: _Known | None, basis: np.ndarray) -> np.ndarray:
    """[Q; M] of some columns, which do not know of the others."""
    energy = np.ones(len(weight)) if known is None else known.energy
    points, more, levels = _rounded(weight, energy, basis)
    if known is not None:
        if np.mean(np.abs(levels - np.rint(levels)) > _EXACT) > _EXACT:
            unit = int4_grid.scales(points, len(basis))
            points = gptq.rounded(weight - widened.spread(more, basis), unit, known.order, known.factor)
        points, more = _refitted(weight, known.damped, points, more, basis)
    return np.concatenate([points, more])


def _basis(group: int, signs: int) -> np.ndarray:
    """[group, 2 + signs]: all ones by digit, then rows of a Hadamard matrix."""
    if group < 2 or group & (group - 1):
        raise ValueError(f"group: got {group}, allowed: a power of two")
    chosen = [*(1 << n for n in range(group.bit_length() - 1)), group - 1]
    if not 1 <= signs <= len(chosen):
        raise ValueError(f"signs: got {signs}, allowed: 1 to {len(chosen)}")
    rows = hadamard(group)
    assert rows is not None
    return np.stack([*(digit * rows[0] for digit in _DIGITS), *rows[chosen[:signs]]], axis=1).astype(np.float32)


def _rounded(weight: np.ndarray, energy: np.ndarray, basis: np.ndarray) -> tuple[np.ndarray, ...]:
    """Q [in, out] and M [kinds * in / group, out], both on the toolkit's grid; and what was rounded, in steps."""
    group, signs = len(basis), basis[:, len(_DIGITS) :]
    int4_grid.scales(weight, group)  # raises where the group does not divide
    parts = weight.reshape(-1, group, weight.shape[1])
    low, high = parts.min(1), parts.max(1)
    middle, step = (low + high) / 2, (high - low) / 15
    unit = np.where(step == 0, 1, step)[:, None]
    levels = (parts - middle[:, None]) / unit
    plus, minus = ((levels - half - _near(levels - half)) ** 2 * energy.reshape(-1, group, 1) for half in (0.5, -0.5))
    up, down = (signs.T > 0).astype(np.float64), (signs.T < 0).astype(np.float64)
    lost = np.concatenate([up @ plus + down @ minus, down @ plus + up @ minus], axis=1)  # [groups, 2 signs, out]
    # Many lose the same but for the order of the sum, which is the PC's: the first of them.
    best, count = (lost <= lost.min(1, keepdims=True) * _EQUAL).argmax(1), signs.shape[1]
    sign = np.where(best < count, 0.5, -0.5)
    picked = np.arange(count)[:, None, None] == best % count  # [signs, groups, out]
    more = _more(middle, (picked * sign * step).reshape(-1, weight.shape[1]), group)
    left = (weight - widened.spread(more, basis)).reshape(parts.shape)
    return (_near(left / unit) * unit).reshape(weight.shape).astype(np.float32), more, levels - 0.5


def _near(levels: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(levels), -int4_grid.TOP, int4_grid.TOP)


def _more(middle: np.ndarray, halves: np.ndarray, group: int) -> np.ndarray:
    """M of the middles [groups, out] and the signed halves of a step [signs * groups, out], on its own grid."""
    (coarse, fine), groups = _DIGITS, len(middle)
    more = _nearest(np.concatenate([middle / coarse, np.zeros_like(middle), halves]), group)
    more[groups : 2 * groups] = (middle - coarse * more[:groups]) / fine
    return _nearest(more, group)


def _nearest(more: np.ndarray, group: int) -> np.ndarray:
    """The nearest points; the last group may be shorter, and has its own scale in the toolkit too."""
    padded = np.pad(more, ((0, -len(more) % group), (0, 0)))
    return int4_grid.nearest(padded, group)[: len(more)]


def _refitted(
    weight: np.ndarray, gram: np.ndarray, points: np.ndarray, more: np.ndarray, basis: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Q and M with the scales of their groups that bring x W nearest: least squares, a column by itself.

    gram: damped. Every point keeps its place on its grid.
    """
    group, size, columns = len(basis), *weight.shape
    count = size // group
    starts = range(0, len(more), group)
    # What each group of Q, then each of M, gives the weights of all channels, and that times the Gram matrix.
    given = np.zeros((columns, count + len(starts), size))
    weighed = np.empty_like(given)
    blocks = points.reshape(count, group, columns).transpose(0, 2, 1)  # a group of Q gives its own channels only
    for n in range(count):
        given[:, n, n * group : (n + 1) * group] = blocks[n]
        weighed[:, n] = blocks[n] @ gram[n * group : (n + 1) * group]
    for n, start in enumerate(starts, start=count):
        one = np.zeros_like(more)
        one[start : start + group] = more[start : start + group]
        given[:, n] = widened.spread(one, basis).T
        weighed[:, n] = given[:, n] @ gram
    square = weighed @ given.transpose(0, 2, 1)
    wanted = np.einsum("nki,in->nk", weighed, weight, optimize=True)
    ridge = _TOWARDS * np.diagonal(square, axis1=1, axis2=2) + np.finfo(np.float32).tiny
    square += ridge[:, None] * np.eye(square.shape[1])
    found = np.linalg.solve(square, (wanted + ridge)[..., None])[..., 0]
    scales = (np.rint(_STEPS * np.clip(found, *_RANGE)) / _STEPS).astype(np.float32).T
    return points * scales[:count].repeat(group, 0), more * scales[count:].repeat(group, 0)[: len(more)]
