"""Alibi: a bias of each head on its scores, that falls with the distance between query and key."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvgate.prepare.spec import Layer


def bias(layer: Layer, columns: int, capacity: int, position: Any, form: str) -> Tensor:
    """What is added to a query's scores: [Hk, 1, g, columns] in the recipe, [1, Hq, 1, columns] in the plain form.

    Column j holds the key of position j; one past the capacity is the token itself, whose distance is 0 whatever its
    position. position: the query's, a number or a tensor [1, 1].
    """
    shape = (layer.kv_heads, 1, -1, 1) if form == "recipe" else (1, -1, 1, 1)
    slots = np.arange(columns, dtype=np.float32)
    moves = (slots < capacity).astype(np.float32)
    if not layer.bfloat16:
        distances = torch.from_numpy(slots * moves) - torch.from_numpy(moves) * position
        return torch.tensor(layer.slopes).view(shape) * distances
    table = rounded(layer.slopes, capacity) * np.float32(layer.bfloat16)
    # The query's own row by a product with 0, .., 1, .., 0: a Gather would run on the CPU.
    found = torch.relu(1 - (torch.arange(capacity, dtype=torch.float32) - position).abs()).view(1, -1)
    own = (found @ torch.from_numpy(np.ascontiguousarray(table.T)).to(found)).view(shape)  # float64 while preparing
    keys = np.zeros((len(table), columns), np.float32)
    keys[:, :capacity] = table[:, :columns]
    return torch.from_numpy(keys).view(*shape[:-1], columns) - own * torch.from_numpy(moves)


def chunk(layer: Layer, columns: int, capacity: int, positions: Tensor, form: str) -> Tensor:
    """The same of T tokens: [Hk, 1, g * T, columns] (a query's tokens side by side), or [1, Hq, T, columns].

    Columns past the capacity are the tokens themselves. positions: [1, T].
    """
    slots = torch.arange(capacity, dtype=torch.float32)
    if layer.bfloat16:
        table = torch.from_numpy(rounded(layer.slopes, capacity) * np.float32(layer.bfloat16))  # [heads, capacity]
        # [T, capacity] 0, .., 1, .., 0 as above; with the slots first the difference would run on the CPU.
        found = torch.relu(1 - (positions.view(1, -1, 1) - slots).abs())[0]
        own = (found @ table.t().contiguous()).t()  # [heads, T]
        keys = torch.cat([table, own], 1) if columns > capacity else table
        biases = keys[None, :, None] - own[None, :, :, None]
    else:
        own = positions.view(-1)
        keys = torch.cat([slots, own]) if columns > capacity else slots
        biases = torch.tensor(layer.slopes).view(1, -1, 1, 1) * (keys - own[:, None])
    return biases if form == "plain" else biases.reshape(layer.kv_heads, 1, -1, columns)


def rounded(slopes: tuple[float, ...], count: int) -> np.ndarray:
    """slope * position in bfloat16, [heads, count]: Falcon's, whatever the type of the model."""
    positions = _bfloat16(np.arange(count, dtype=np.float32))
    return _bfloat16(_bfloat16(np.array(slopes, np.float32))[:, None] * positions)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to 8 bits, half to even. In numpy, so that an export traces none of it."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
