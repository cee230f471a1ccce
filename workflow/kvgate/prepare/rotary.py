"""Rotary embeddings: how an attention module applies cos and sin, measured; and the tables for the host."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvgate.checkpoint import precise
from kvgate.checkpoint.seams import Step
from kvgate.jobs.record import blocked
from kvgate.prepare.recipe import Angles
from kvgate.prepare.spec import Rotation
from kvgate.prepare.survey import Unsupported, rotary_arguments

# (cos [1, T, width], sin [1, T, width]) -> heads at the seams, [N, D] with all heads and tokens in N
Heads = Callable[[Tensor, Tensor], Tensor]


def measure(heads: Heads, tokens: int, rotation: Rotation) -> Rotation | None:
    """How a module rotates, None: not at all. Raises Unsupported where it is not cos * x + sin * (signed permutation).

    The module's own forward is called with chosen cos and sin; no name and no kind of rotary embedding is assumed.
    """
    width = rotation.width
    ramp = torch.linspace(1, 2, width).expand(1, tokens, width)  # distinct, so that a ratio names its column
    one, zero = torch.ones_like(ramp), torch.zeros_like(ramp)
    base = heads(one, zero).double()
    scaled, turned = heads(ramp, zero).double(), heads(zero, ramp).double()
    size = base.shape[1]
    if torch.equal(scaled, base) and torch.equal(turned, base):
        return None
    still = [_close(turned[:, d], base[:, d]) for d in range(size)]  # channels that pass as they are
    columns: list[tuple[int, int, int, int]] = []  # cosine, sine, turn, sign of each channel
    for d in range(size):
        if still[d]:
            columns.append((-1, -1, d, 0))
            continue
        source, ratio = _source(turned[:, d], base)
        cosine = _column(_ratio(scaled[:, d], base[:, d]), ramp)
        columns.append((cosine, _column(abs(ratio), ramp), source, 1 if ratio > 0 else -1))
    return Rotation(rotation.module, rotation.arguments, width, *zip(*columns, strict=True))


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-5 * b.norm())


def _ratio(a: Tensor, b: Tensor) -> float:
    """r with a = r * b. Raises Unsupported where there is none."""
    ratio = (a @ b / (b @ b)).item()
    if not _close(ratio * b, a):
        raise Unsupported("a rotary embedding that does not scale channels by cos")
    return ratio


def _source(a: Tensor, columns: Tensor) -> tuple[int, float]:
    """Which column of [N, D] `a` is a multiple of, and the factor."""
    ratios = (a @ columns) / (columns * columns).sum(0)
    errors = (a[:, None] - ratios * columns).norm(dim=0)
    best = int(errors.nan_to_num(float("inf")).argmin())
    return best, _ratio(a, columns[:, best])


def _column(value: float, ramp: Tensor) -> int:
    found = int((ramp[0, 0].double() - value).abs().argmin())
    if abs(ramp[0, 0, found].item() - value) > 1e-4:
        raise Unsupported("a rotary embedding that changes cos or sin")
    return found


class Stub(nn.Module):
    """In the place of a rotary module: hands on the angles of this step, which came in as inputs of the graph."""

    def __init__(self, inner: nn.Module, numbers: dict[tuple, int], step: Step) -> None:
        super().__init__()
        self.inner = inner
        self.numbers, self.step = numbers, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.step.rotations[self.numbers[rotary_arguments(args, kwargs)]]
        if isinstance(found, Angles):
            return found.cosine, found.sine
        return found if isinstance(found, tuple) else (found, found)  # the recipe reads its matrix elsewhere


def refuse_changing(stub: Stub, rotation: Rotation, positions: int) -> None:
    """Raises record.Blocked where a short text's angles are not those of one of `positions` tokens.

    A cache holds keys that were turned once: where they depend on the text's length, no table is right for all.
    """
    with torch.no_grad():
        long, short = (
            stub.inner(torch.zeros(1, 1, 1), torch.arange(n)[None], *rotation.arguments)
            for n in (positions, min(2, positions))
        )
    same = (torch.allclose(a[:, :2], b, rtol=0, atol=1e-6) for a, b in zip(long, short, strict=True))
    if not all(same):
        got = f"got other angles in a text of {positions} tokens than in one of 2"
        raise blocked("rotary", f"{rotation.module}: {got}, allowed: a smaller capacity, where they are the same")


def tables(stub: Stub, rotation: Rotation, positions: int) -> dict[str, np.ndarray]:
    """`cosine` and `sine` [P, D] of positions 0..P-1 and, for the recipe, `turn` [D, D], as the host reads them."""
    with torch.no_grad(), precise.float64():
        angles = stub.inner(torch.zeros(1, 1, 1), torch.arange(positions)[None], *rotation.arguments)
    cos, sin = (precise.single(x[0]) for x in angles)
    if not rotation.turn:
        return {"cosine": cos, "sine": sin}
    ones, zeros = np.ones((positions, 1), np.float32), np.zeros((positions, 1), np.float32)
    turn = np.zeros((len(rotation.turn),) * 2, np.float32)
    turn[np.arange(len(turn)), rotation.turn] = rotation.sign
    # Index -1 is the column added at the end: channels that pass as they are.
    return {
        "cosine": np.hstack([cos, ones])[:, rotation.cosine],
        "sine": np.hstack([sin, zeros])[:, rotation.sine],
        "turn": turn,
    }


def at(table: dict[str, np.ndarray], position: int) -> Any:
    """What the graph reads at a position: the matrix [1, D(in), 1, D(out)], or cos and sin [1, 1, width]."""
    cosine, sine = (torch.tensor(table[n][position], dtype=torch.get_default_dtype()) for n in ("cosine", "sine"))
    if "turn" not in table:
        return cosine[None, None], sine[None, None]
    matrix = torch.diag(cosine) + sine[:, None] * torch.from_numpy(table["turn"])
    return matrix.t()[None, :, None].contiguous()
