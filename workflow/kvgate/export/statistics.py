"""What the final matrices read on calibration texts, measured on the operated model itself: no module is named."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvgate.export import equality, surgery, whole
from kvgate.export.seams import Step
from kvgate.export.spec import Spec


class Statistics:
    """Of every matrix [in, out] by name: `gram` [in, in], the sum of x^T x, and `peak` [out], the largest |x W|."""

    def __init__(self) -> None:
        self.gram: dict[str, Tensor] = {}
        self.peak: dict[str, Tensor] = {}


def collect(model: nn.Module, spec: Spec, step: Step, texts: Iterable[Tensor]) -> Statistics:
    """Run texts, each the rows [T, C] of its tokens, from an empty cache."""
    found = Statistics()
    with torch.no_grad():
        for rows in texts:
            with _Watch(model) as watch:
                (whole.run if spec.form == "recipe" else equality.decode)(model, spec, step, rows)
            for name, read in watch.read.items():
                x, peak = torch.cat(read), watch.peak[name]
                gram = x.T @ x  # of a whole text at once: a row at a time costs more than the model itself
                known = name in found.gram
                found.gram[name] = found.gram[name] + gram if known else gram
                found.peak[name] = torch.maximum(found.peak[name], peak) if known else peak
    return found


class _Watch(TorchFunctionMode):
    """Sees every product with one of the model's matrices on its right."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(t): name for name, t in surgery.state(model).items() if t.dim() == 2}
        self.read: dict[str, list[Tensor]] = {}  # rows [.., in]
        self.peak: dict[str, Tensor] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if len(args) == 2 and function in _PRODUCTS and (name := self.names.get(id(args[1]))):
            self.read.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]).clone())
            peak = out.reshape(-1, out.shape[-1]).abs().amax(0)
            self.peak[name] = torch.maximum(self.peak[name], peak) if name in self.peak else peak
        return out


_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
