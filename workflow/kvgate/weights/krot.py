"""Queries and keys in a Hadamard basis after their rotation. The rotary input takes it in; K is cached in it."""

from torch import Tensor

from kvgate.prepare import orthogonal


def turn(size: int) -> Tensor:
    """[D, D] that follows the rotary embedding: scores stay what they are."""
    return orthogonal.rotation(size)
