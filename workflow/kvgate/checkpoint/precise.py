"""float64 where a model's own code names float32: norms, softmax and angles too, which `.double()` leaves in float32.

MKL and ATen pick kernels by the CPU, which differ in the last digits: in float32 artifacts would be the PC's. Those of
float64 are rounded away, once, to what float32 arithmetic leaves right. Measured on SmolLM2-135M with two sets of
kernels: float64 differs by 2.5e-15 (L2). With all bits of float32 one logit of 6.3 million differs; with 20 bits of the
row's largest a value differs with a probability of 5e-10, and the rounding is at most 4e-6 of a row (L2).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvgate.checkpoint import mapped

BITS = 20  # of a row's largest value


def rounded(rows: Tensor) -> Tensor:
    """[..., N], each row in steps of 2 ** -BITS of its largest value: float32 holds it exactly. `rows` is used up."""
    largest = torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))
    step = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - BITS)
    return rows.div_(step).round_().mul_(step)


def single(tensor: Tensor) -> np.ndarray:
    """As float32, also where float32 would become float64; the tensor's own memory if it is that already."""
    held = mapped.held(tensor)
    if held.dtype == torch.bfloat16:  # numpy has none
        held = held.to(torch.float64)
    found = held.numpy().astype(np.float32, copy=False)
    return np.asarray(found, order="C") if tensor.is_contiguous() else found


def settle(model: nn.Module) -> None:
    """Buffers as the float32 model has them: the frequencies of its angles, a factor of its embedding."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.from_numpy(single(buffer)))


@contextmanager
def float64() -> Iterator[None]:
    """Whatever runs here and asks for float32, by name or by default, gets float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():
            yield
    finally:
        torch.set_default_dtype(default)


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in float64."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with float64():
            return function(*args, **kwargs)

    return run


class _Widening(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        return function(*map(_wide, args), **{name: _wide(x) for name, x in (kwargs or {}).items()})


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
