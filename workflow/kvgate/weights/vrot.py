"""Values in a Hadamard basis of each head: no channel of V is an outlier there. V is cached in it."""

from torch import Tensor

from kvgate.prepare import orthogonal
from kvgate.prepare.heads import Change
from kvgate.prepare.spec import Layer


def heads(layer: Layer, tensors: dict[str, Tensor], peak: Tensor | None) -> Change:
    turn = orthogonal.rotation(layer.value_size)
    return Change(value=turn.expand(layer.kv_heads, -1, -1))
