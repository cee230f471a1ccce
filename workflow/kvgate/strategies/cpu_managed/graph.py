"""Graph half of cpu_managed: reads the history, returns this step's K and V alone (the delta)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvgate import contract as c


def columns(capacity: int, tokens: int) -> int:
    """How many columns attention sees."""
    return capacity + tokens


def returned(capacity: int, tokens: int) -> int:
    """How many slots every returned cache tensor has."""
    return tokens


def extras(cache: c.Cache, tokens: int) -> list[c.Tensor]:
    """What the graph reads besides the embedding, masks, rotations and the cache."""
    return []


def write(history: Tensor, new: Tensor, axis: int, extra: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What attention sees and what is returned; `axis` is that of the slots, `new` has T of them."""
    return torch.cat([history, new], axis), new
