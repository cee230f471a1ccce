"""Graph half of fixed_max_scatter: writes this step's K and V into their slots of a fixed buffer by ScatterND."""

from typing import Any

import torch
from torch import Tensor

from kvgate import contract as c
from kvgate.strategies.fixed_max_blend import graph as fixed_max_blend

columns = fixed_max_blend.columns
returned = fixed_max_blend.returned


def extras(cache: c.Cache, tokens: int) -> list[c.Tensor]:
    """What the graph reads besides the embedding, masks, rotations and the cache."""
    return [c.Tensor(c.SLOT, c.SLOT, (tokens,), "int64")]


def write(history: Tensor, new: Tensor, axis: int, extra: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What attention sees and what is returned; `axis` is that of the slots, `new` has T of them."""
    name = f"index {tuple(new.shape)} {axis}"
    if name not in extra:  # the same for every layer of one shape: computed once in the graph
        extra[name] = _index(new, axis, extra[c.SLOT])
    buffer = _ScatterND.apply(history, extra[name], new.reshape(-1, *new.shape[axis + 1 :]))
    return buffer, buffer


def _index(new: Tensor, axis: int, slot: Tensor) -> Tensor:
    """[N, axis + 1]: where each element (axis last) or row of `new` goes, the slot in the last place.

    Rank 2, as the compiler (2.5.0) fails on a product of rank 5.
    """
    leading = torch.meshgrid(*(torch.arange(n) for n in new.shape[:axis]), indexing="ij")
    rows = torch.stack([x.flatten() for x in leading], 1)
    if len(slot) == 1:
        return torch.cat([rows, slot.expand(len(rows))[:, None]], 1)
    slots = torch.cat([slot] * len(rows))[:, None]  # the compiler (2.5.0) fails on an Expand before a Reshape
    return torch.cat([rows.repeat_interleave(len(slot), 0), slots], 1)


class _ScatterND(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, index: Tensor, update: Tensor) -> Tensor:
        return data.index_put(tuple(index.unbind(-1)), update)

    @staticmethod
    def symbolic(g: Any, data: Any, index: Any, update: Any) -> Any:
        return g.op("ScatterND", data, index, update).setType(data.type())
