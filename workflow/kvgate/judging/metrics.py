"""How far an array is from its reference. numpy only; every sum in float64; a comparison of nothing raises."""

from itertools import permutations

import numpy as np

Array = np.ndarray

# A tensor is tried for permutations above this L2 (two unrelated vectors of equal norm are 1.41 apart) ...
SUSPECT_L2 = 0.5
# ... where the norms agree to this ratio, and a permutation fits below this L2.
NORM_RATIO = 0.05
FIT_L2 = 0.1


def pair(got: Array, want: Array) -> tuple[Array, Array]:
    """Both as float64. Raises ValueError where shapes differ (nothing is broadcast) or where there is nothing."""
    if got.shape != want.shape:
        raise ValueError(f"comparison: got shape {got.shape}, allowed: the reference's {want.shape}")
    if got.size == 0:
        raise ValueError(f"comparison: got no values (shape {got.shape}), allowed: at least one")
    return got.astype(np.float64), want.astype(np.float64)


def norms(rows: Array) -> Array:
    """[n, ...] -> [n]: the Euclidean norm of each row, over all its other axes."""
    flat = rows.reshape(len(rows), -1)
    return np.sqrt(np.einsum("ij,ij->i", flat, flat))


def l2_rows(got: Array, want: Array) -> Array:
    """[n, ...] twice -> [n]: ||got - want|| / ||want|| of each row.

    0 where both are zero, inf where only the reference is, NaN where `got` holds a NaN (inf where it holds an inf).
    """
    a, b = pair(got, want)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error, norm = norms(a - b), norms(b)
        return np.where(error == 0, 0.0, error / norm)


def l2(got: Array, want: Array) -> float:
    """Normalized L2, ||got - want|| / ||want||, over the flattened arrays; see `l2_rows`."""
    a, b = pair(got, want)
    return float(l2_rows(a[None], b[None])[0])


def centred(rows: Array) -> Array:
    """Logits less their mean over the last axis: softmax ignores a common offset."""
    wide = rows.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return wide - wide.mean(axis=-1, keepdims=True)


def sqnr(error: Array) -> Array:
    """Normalized L2 -> signal to quantization noise in dB, 20 log10(||want|| / ||got - want||); inf where equal."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return -20 * np.log10(error)


def cosine(got: Array, want: Array) -> float:
    """Cosine of the angle between the flattened arrays; NaN where one of them is all zero."""
    a, b = pair(got.ravel(), want.ravel())
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def log_softmax(rows: Array) -> Array:
    """[.., V] -> [.., V], in nats."""
    with np.errstate(invalid="ignore"):
        shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True).astype(np.float64)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(got: Array, want: Array) -> Array:
    """[.., V] logits twice -> [..]: KL(softmax(want) || softmax(got)) in nats."""
    pair(got, want)
    p = log_softmax(want)
    with np.errstate(invalid="ignore"):
        return (np.exp(p) * (p - log_softmax(got))).sum(axis=-1)


def surprise(rows: Array, targets: Array) -> Array:
    """Logits [n, V] and token ids [n] -> [n]: -log p(target) in nats."""
    if len(rows) != len(targets) or not len(rows):
        raise ValueError(f"surprise: got {len(rows)} rows for {len(targets)} targets, allowed: equal, at least one")
    return -log_softmax(rows)[np.arange(len(rows)), targets]


def perplexity(surprises: Array) -> float:
    """exp of the mean -log p(token); inf where it overflows."""
    if not len(surprises):
        raise ValueError("perplexity: got no tokens, allowed: at least one")
    with np.errstate(over="ignore"):
        return float(np.exp(np.mean(surprises, dtype=np.float64)))


def margin(rows: Array) -> Array:
    """[.., V] -> [..]: the best logit less the second best."""
    best = np.partition(rows.astype(np.float64), -2, axis=-1)[..., -2:]
    return best[..., 1] - best[..., 0]


def rms_error(got: Array, want: Array) -> Array:
    """[.., V] logits twice -> [..]: the root mean square of their difference with its mean removed, in logits.

    The measure that a margin is held against. The worst logit's error or the norm of the error would not do: where
    the best token changed they are at least half the margin by construction, so every change would be a near tie.
    """
    a, b = pair(got, want)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.sqrt(np.square(centred(a - b)).mean(axis=-1))


def oddity(array: Array) -> str | None:
    """`nan`, `inf`, `all_zero` or `all_equal` (more than one value, all the same), whichever comes first; else None."""
    if np.isnan(array).any():
        return "nan"
    if np.isinf(array).any():
        return "inf"
    if not array.any():
        return "all_zero"
    return "all_equal" if array.size > 1 and array.min() == array.max() else None


def permuted(got: Array, want: Array, axes: tuple[str, ...] = ()) -> str | None:
    """How the values of `want` were moved to give `got`, or None where no tried permutation fits.

    axes: their names, for the answer. Tried: every order of the axes (written in one order, read in another; for 4
    axes NCHW and NHWC are among them), and the halves of the last axis interleaved or taken apart (the two
    conventions of rotary channels).
    """
    error = l2(got, want)
    a, b = norms(np.stack(pair(got, want)))
    if not error > SUSPECT_L2 or not abs(a - b) <= NORM_RATIO * b:
        return None
    best, name = min(((l2(got, moved), name) for name, moved in _moves(want, axes)), default=(np.inf, ""))
    return name if best <= FIT_L2 else None


def _moves(want: Array, axes: tuple[str, ...]) -> list[tuple[str, Array]]:
    names = axes or tuple(f"axis {i}" for i in range(want.ndim))
    # A cube [n, c, c, c] fed as NCHW where NHWC is the default came back in the order (0, 3, 1, 2).
    known: dict[tuple[int, ...], str] = {(0, 3, 1, 2): "NCHW read as NHWC", (0, 2, 3, 1): "NHWC read as NCHW"}
    found = []
    for order in permutations(range(want.ndim)):
        if order == tuple(range(want.ndim)):
            continue
        name = f"written as ({', '.join(names[i] for i in order)}), read as ({', '.join(names)})"
        found.append((known.get(order, name), want.transpose(order).reshape(want.shape)))
    half, odd = divmod(want.shape[-1], 2)
    if half > 1 and not odd:
        for name, shape in (("interleaved", (2, half)), ("taken apart", (half, 2))):
            split = want.reshape(*want.shape[:-1], *shape)
            found.append((f"pairs of {names[-1]} {name}", np.swapaxes(split, -1, -2).reshape(want.shape)))
    return found
