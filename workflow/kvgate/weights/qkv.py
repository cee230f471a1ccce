"""Queries, keys and values of a KV head as large as each other: their joint tensor has one scale, and V drowns in it.

From the largest |q| (scaled), |k|, |v| on the calibration texts, t their layer's mean of sqrt(q k): k *= t / k,
q *= k / t, v *= t / v, and the output projection takes v / t in. K and V are cached scaled.
"""

import torch
from torch import Tensor

from kvgate.prepare import heads as basis
from kvgate.prepare.heads import Change
from kvgate.prepare.spec import Layer

STATISTICS = True


def heads(layer: Layer, tensors: dict[str, Tensor], peak: Tensor | None) -> Change:
    """peak: [columns] of the joint product, its largest values without the bias."""
    assert peak is not None
    bias = tensors.get("bias")
    largest = peak.double() if bias is None else peak.double() + bias.double().abs()
    found = basis.parts(layer, largest[None])
    q, k, v = (found[name][0].flatten(1).amax(1) for name in "qkv")  # [Hk] each
    eye = torch.eye(layer.value_size, dtype=torch.float64)
    if layer.norm:  # q and k have norms of their own; V is brought to their size, sqrt(D) of a normed row at most
        target = torch.full_like(v, float(v.mean()))
        return Change(value=(target / v)[:, None, None] * eye)
    target = (q * k).sqrt().mean()
    return Change(key=target / k, value=(target / v)[:, None, None] * eye)
