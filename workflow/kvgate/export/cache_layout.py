"""The cache at the graph's boundary (layout, rank, packing) and as attention wants it, [Hk, D, 1, S] or [1, Hk, S, D].

A strategy writes in the boundary's own layout and rank, so that a returned buffer crosses without a conversion.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvgate import contract as c

# What each layer with K and V writes, in the boundary's layout and rank: K and V, or (packing `layer`) both as one.
History = dict[int, tuple[Tensor, ...]]


_KINDS = (c.KEY, c.VALUE)


def slot_axis(cache: c.Cache) -> int:
    return cache.rank - 1 if cache.layout == "channels" else cache.rank - 2


def to_boundary(x: Tensor, cache: c.Cache, form: str) -> Tensor:
    """From the form's own layout, channels [Hk, D, 1, S] for the recipe and rows [1, Hk, S, D] for plain."""
    layout = "channels" if form == "recipe" else "rows"
    if layout != cache.layout:
        x = x.permute(2, 0, 3, 1) if layout == "channels" else x.permute(1, 3, 0, 2)
    if cache.rank == 4:
        return x
    return x.squeeze(2) if cache.layout == "channels" else x.squeeze(0)


def from_boundary(x: Tensor, cache: c.Cache, form: str) -> Tensor:
    """The inverse of to_boundary."""
    if cache.rank == 3:
        x = x.unsqueeze(2) if cache.layout == "channels" else x.unsqueeze(0)
    layout = "channels" if form == "recipe" else "rows"
    if layout == cache.layout:
        return x
    return x.permute(1, 3, 0, 2) if layout == "channels" else x.permute(2, 0, 3, 1)


def unpack(inputs: Mapping[str, Tensor], contract: c.Contract) -> History:
    """What the layers write into, out of the boundary's cache inputs."""
    cache, keyed = contract.cache, [x for x in contract.states if x.kind == c.KEY]
    layers = [x.layer for x in keyed]
    if cache.packing == "model":
        heads = keyed[0].entry[0]
        keys, values = (inputs[name].split(heads, _heads(cache)) for name in ("keys", "values"))
        return dict(zip(layers, zip(keys, values, strict=True), strict=True))
    if cache.packing == "layer":
        return {i: (inputs[f"pair.{i}"],) for i in layers}
    return {i: (inputs[f"key.{i}"], inputs[f"value.{i}"]) for i in layers}


def join(key: Tensor, value: Tensor, cache: c.Cache) -> tuple[Tensor, ...]:
    """A step's K and V as they are written."""
    return (torch.cat([key, value], _channels(cache)),) if cache.packing == "layer" else (key, value)


def part(written: Sequence[Tensor], cache: c.Cache, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The inverse of join. sizes: channels of K and of V."""
    return written[0].split(list(sizes), _channels(cache)) if cache.packing == "layer" else written


def pack(returned: History, cache: c.Cache) -> dict[str, Tensor]:
    """The boundary's outputs of K and V, by the names of its inputs."""
    if cache.packing == "model":
        layers = [returned[i] for i in sorted(returned)]
        both = zip(*layers, strict=True)
        return {f"{kind}s": torch.cat(x, _heads(cache)) for kind, x in zip(_KINDS, both, strict=True)}
    names = ("pair",) if cache.packing == "layer" else _KINDS
    return {f"{name}.{i}": x for i in sorted(returned) for name, x in zip(names, returned[i], strict=True)}


def _heads(cache: c.Cache) -> int:
    return 1 if cache.layout == "rows" and cache.rank == 4 else 0


def _channels(cache: c.Cache) -> int:
    return 1 if cache.layout == "channels" else cache.rank - 1
