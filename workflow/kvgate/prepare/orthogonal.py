"""Orthogonal matrices that spread outliers over all channels: Hadamard where the width factors, else a seeded one."""

import numpy as np
import torch
from torch import Tensor

# Prime factors of a width, each with the Hadamard matrix that holds it: 4 p rows by Paley's construction (4 p - 1 is
# prime); 576 = 12 x 12 x 4, 640 = 20 x 32, 960 = 12 x 20 x 4.
_PALEY = (3, 5)


def rotation(width: int, seed: int = 0) -> Tensor:
    """[width, width] float64, orthogonal: a Hadamard matrix with random signs of its rows, divided by sqrt(width).

    A seeded random orthogonal matrix where no Hadamard matrix of this width can be put together.
    """
    generator = np.random.default_rng(seed)
    made = hadamard(width)
    if made is None:
        q, r = np.linalg.qr(generator.standard_normal((width, width)))
        return torch.from_numpy(q * np.sign(np.diag(r)))
    return torch.from_numpy(generator.choice([-1.0, 1.0], (width, 1)) * made / np.sqrt(width))


def hadamard(width: int) -> np.ndarray | None:
    """[width, width] of +-1 with orthogonal rows, a Kronecker product of known ones; None where they do not fit."""
    made, left = np.ones((1, 1)), width
    for prime in _PALEY:
        while left % prime == 0:
            if left % (4 * prime):
                return None
            made, left = np.kron(made, _paley(4 * prime - 1)), left // (4 * prime)
    if left & (left - 1):
        return None
    while left > 1:
        made, left = np.kron(made, np.array([[1.0, 1.0], [1.0, -1.0]])), left // 2
    return made


def _paley(prime: int) -> np.ndarray:
    """Of prime + 1 rows, for a prime that is 3 modulo 4 (R. E. A. C. Paley, 1933)."""
    squares = {n * n % prime for n in range(1, prime)}
    residue = np.array([0] + [1 if n in squares else -1 for n in range(1, prime)])
    jacobsthal = residue[(np.arange(prime)[:, None] - np.arange(prime)) % prime]
    skew = np.block([[np.zeros((1, 1)), np.ones((1, prime))], [-np.ones((prime, 1)), jacobsthal]])
    return skew + np.eye(prime + 1)
