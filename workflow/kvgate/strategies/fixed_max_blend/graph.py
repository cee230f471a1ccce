"""Graph half of fixed_max_blend: selects this step's K and V into their slots of a fixed buffer, no scatter.

A select (Where) with a bool one-hot input is exact and stays on the NPU; K * keep + k * onehot is 5 rows a layer
longer, and an infinity in an overwritten slot would become NaN in it. Several tokens are placed by a product with
rows of one 1 and zeros, which is exact, and then selected.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvgate import contract as c


def columns(capacity: int, tokens: int) -> int:
    """How many columns attention sees."""
    return capacity


def returned(capacity: int, tokens: int) -> int:
    """How many slots every returned cache tensor has."""
    return capacity


def extras(cache: c.Cache, tokens: int) -> list[c.Tensor]:
    """What the graph reads besides the embedding, masks, rotations and the cache."""
    channels = cache.layout == "channels"
    write = c.Tensor(c.WRITE, c.WRITE, (1, cache.capacity) if channels else (cache.capacity, 1), "bool")
    if tokens == 1:
        return [write]
    return [write, c.Tensor(c.PLACE, c.PLACE, (tokens, cache.capacity) if channels else (cache.capacity, tokens))]


def write(history: Tensor, new: Tensor, axis: int, extra: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What attention sees and what is returned; `axis` is that of the slots, `new` has T of them."""
    if c.PLACE in extra:
        new = new @ extra[c.PLACE] if axis == new.dim() - 1 else extra[c.PLACE] @ new
    buffer = torch.where(extra[c.WRITE], new, history)
    return buffer, buffer
