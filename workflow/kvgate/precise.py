"""float64 where a model's own code names float32: norms, softmax and angles too, which `.double()` leaves in float32.

MKL and ATen pick float32 kernels by the CPU, and their last digits differ: artifacts would be the PC's. What float64
gives, rounded once to float32, is the same on every PC but for one value in millions.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(_wide, args), **{name: _wide(x) for name, x in (kwargs or {}).items()})


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
