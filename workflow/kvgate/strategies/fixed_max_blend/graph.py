"""Graph half of fixed_max_blend: selects this step's K and V into their slot of a fixed buffer, no scatter.

A select (Where) with a bool one-hot input is exact and stays on the NPU; K * keep + k * onehot is 5 rows a layer
longer, and an infinity in an overwritten slot would become NaN in it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvgate import contract as c


def columns(capacity: int) -> int:
    """How many columns attention sees."""
    return capacity


def returned(capacity: int) -> int:
    """How many slots every returned cache tensor has."""
    return capacity


def extras(cache: c.Cache) -> list[c.Tensor]:
    """What the graph reads besides the embedding, masks, rotations and the cache."""
    shape = (1, cache.capacity) if cache.layout == "channels" else (cache.capacity, 1)
    return [c.Tensor(c.WRITE, c.WRITE, shape, "bool")]


def write(history: Tensor, new: Tensor, axis: int, extra: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What attention sees and what is returned; `axis` is that of the slots, `new` has one slot."""
    buffer = torch.where(extra[c.WRITE], new, history)
    return buffer, buffer
