"""Random numbers that are the same on every PC: torch's own differ with the instruction set that its kernels use."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_BLOCK = 1 << 20  # numbers


class Drawn(TorchDispatchMode):
    """Tensors that are filled with random numbers get numpy's, in the order they are asked for.

    Raises ValueError on another kind of random numbers than the normal and the uniform.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = np.random.Generator(np.random.PCG64(seed))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.normal_.default:
            return self._normal(*args)
        if function is torch.ops.aten.uniform_.default:
            return self._uniform(*args)
        if function is torch.ops.aten.rand.default:
            return self._uniform(torch.empty(*args, **(kwargs or {})))
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise ValueError(f"random numbers: got {function}, allowed: normal_, uniform_ and rand")
        return function(*args, **(kwargs or {}))

    def _normal(self, tensor: Tensor, mean: float = 0.0, deviation: float = 1.0) -> Tensor:
        return _filled(tensor, lambda count: mean + deviation * self.generator.standard_normal(count))

    def _uniform(self, tensor: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        return _filled(tensor, lambda count: low + (high - low) * self.generator.random(count))


def _filled(tensor: Tensor, draw: Callable[[int], np.ndarray]) -> Tensor:
    """A block after the other, which are the numbers of one draw: an embedding may be the largest tensor of all."""
    values = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
    flat = values.view(-1)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK]
        block.copy_(torch.from_numpy(draw(len(block))))
    return tensor if values is tensor else tensor.copy_(values)
