"""Another basis for a layer's cached rows: what its joint product, norms and output projection become.

A cached row changes from `row` to `row @ matrix` (V) or `row * factor` (K) of its KV head; queries and the output
projection take the inverse in, so scores and what attention hands on are what they were. Recipe tensors only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgate.checkpoint import precise
from kvgate.prepare.spec import Layer


@dataclass(frozen=True)
class Change:
    """key: [Hk] factors; value: [Hk, D, D]; None: as it is."""

    key: Tensor | None = None
    value: Tensor | None = None


def apply(layer: Layer, tensors: dict[str, Tensor], change: Change) -> None:
    """Change a layer's tensors (recipe.TENSORS, those that it has) in place of the dictionary."""
    if change.value is not None:
        matrix = change.value.double()
        if "gate" in tensors:
            raise ValueError(f"{layer.module}: got a gate on its values' channels, allowed: a basis that stays")
        with _joint(layer, tensors) as parts:
            parts["v"] = precise.rounded(torch.einsum("nhd,hde->nhe", parts["v"], matrix))
        _output(layer, tensors, torch.linalg.inv(matrix))
    if change.key is not None:
        factor = change.key.double()
        if not layer.norm:
            with _joint(layer, tensors) as parts:
                parts["q"] = parts["q"] / factor[:, None, None]
                parts["k"] = parts["k"] * factor[:, None]
        elif layer.norm == "head":
            for name in ("norm", "shift"):
                if name in tensors:
                    tensors[name] = _scaled_norm(layer, tensors[name], factor)
        else:
            groups = layer.heads // layer.kv_heads
            per_key = factor.repeat_interleave(layer.key_size)
            per_query = factor.repeat_interleave(layer.key_size * groups)
            tensors["norm_q"] = (tensors["norm_q"].double() / per_query).float()
            tensors["norm_k"] = (tensors["norm_k"].double() * per_key).float()


def parts(layer: Layer, joint: Tensor) -> dict[str, Tensor]:
    """The joint product's columns [N, ..]: q [N, Hk, D, g], k and v [N, Hk, D]."""
    heads, size, groups = layer.kv_heads, layer.key_size, layer.heads // layer.kv_heads
    if layer.norm == "all":
        one = heads * size
        q, k, v = joint.split([one * groups, one, one], dim=1)
        return {
            "q": q.reshape(-1, heads, size, groups),
            "k": k.reshape(-1, heads, size),
            "v": v.reshape(-1, heads, size),
        }
    columns = joint.reshape(-1, heads, size, groups + 2)
    return {"q": columns[..., :groups], "k": columns[..., groups], "v": columns[..., groups + 1]}


def _join(layer: Layer, found: dict[str, Tensor]) -> Tensor:
    if layer.norm == "all":
        return torch.cat([found[name].flatten(1) for name in "qkv"], dim=1)
    return torch.cat([found["q"], found["k"][..., None], found["v"][..., None]], dim=3).flatten(1)


@contextmanager
def _joint(layer: Layer, tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The columns of matrix and bias as one table, its last row the bias; what they are at the end is written back."""
    matrix, bias = tensors["qkv"].double(), tensors.get("bias")
    rows = torch.zeros(1, matrix.shape[1], dtype=matrix.dtype) if bias is None else bias.double()[None]
    found = parts(layer, torch.cat([matrix, rows]))
    yield found
    joined = _join(layer, found).float()
    tensors["qkv"] = joined[:-1].contiguous()
    if bias is not None:
        tensors["bias"] = joined[-1].contiguous()


def _output(layer: Layer, tensors: dict[str, Tensor], inverse: Tensor) -> None:
    out = tensors["out"].double()
    if layer.kernel:  # [C, D, 1, g], one KV head
        tensors["out"] = precise.rounded(torch.einsum("ed,cdog->ceog", inverse[0], out)).float().contiguous()
        return
    groups = layer.heads // layer.kv_heads
    rows = out.reshape(layer.kv_heads, layer.key_size, groups, -1)
    turned = precise.rounded(torch.einsum("hed,hdgc->hegc", inverse, rows))
    tensors["out"] = turned.flatten(0, 2).float().contiguous()


def _scaled_norm(layer: Layer, weight: Tensor, factor: Tensor) -> Tensor:
    """[1 or Hk, D, 1, g + 1]: the queries' columns and the key's."""
    scale = torch.ones(layer.kv_heads, 1, 1, weight.shape[3], dtype=torch.float64)
    scale[..., :-1] /= factor[:, None, None, None]
    scale[..., -1] *= factor[:, None, None]
    return (weight.double() * scale).float().contiguous()
