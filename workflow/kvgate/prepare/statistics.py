"""What the final matrices read on calibration texts, measured on the operated model itself: no module is named."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvgate.checkpoint.seams import Step
from kvgate.prepare import equality, surgery, whole
from kvgate.prepare.spec import Spec

T = TypeVar("T", np.ndarray, Tensor)


def matrix(weight: T) -> T:
    """[in, out] as it is; of a convolution over all of its input [out, C, 1, g] the matrix [C * g, out] that it is."""
    return weight.reshape(len(weight), -1).T if weight.ndim == 4 else weight


def tensor(found: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of that shape that a matrix [in, out] is stored as."""
    return np.ascontiguousarray(found.T).reshape(shape) if len(shape) == 4 else found


class Statistics:
    """Of every matrix [in, out] by name: `gram` [in, in], the sum of x^T x, and `peak` [out], the largest |x W|."""

    def __init__(self) -> None:
        self.gram: dict[str, Tensor] = {}
        self.peak: dict[str, Tensor] = {}


def collect(model: nn.Module, spec: Spec, step: Step, texts: Iterable[Tensor]) -> Statistics:
    """Run texts, each the rows [T, C] of its tokens, from an empty cache."""
    found = Statistics()
    for rows in texts:
        read: dict[str, list[Tensor]] = {}
        peaks: dict[str, Tensor] = {}

        def note(name: str, x: Tensor, out: Tensor, read: Any = read, peaks: Any = peaks) -> None:
            read.setdefault(name, []).append(x.clone())
            peak = out.abs().amax(0)
            peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak

        with torch.no_grad(), _Watch(model, note):
            run(model, spec, step, rows)
        for name, peak in peaks.items():
            x = torch.cat(read[name])
            gram = x.T @ x  # of a whole text at once: a row at a time costs more than the model itself
            known = name in found.gram
            found.gram[name] = found.gram[name] + gram if known else gram
            found.peak[name] = torch.maximum(found.peak[name], peak) if known else peak
    return found


def loss(
    model: nn.Module, spec: Spec, step: Step, texts: Iterable[Tensor], changes: Mapping[str, Tensor]
) -> dict[str, float]:
    """What each matrix, changed alone by `changes` [in, out], does to the model's own words, in nats a token.

    The second order of the divergence from the unchanged model, 1/2 E[(g . x dW)^2], g the gradient of the log
    likelihood of a token that the model itself draws: the Fisher information, as in optimal brain damage.
    """
    total, tokens = dict.fromkeys(changes, 0.0), 0
    for n, rows in enumerate(texts):
        seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

        def note(name: str, x: Tensor, out: Tensor, seen: Any = seen) -> None:
            seen.setdefault(name, []).append((x.detach(), out))
            out.retain_grad()

        with torch.enable_grad():
            with _Watch(model, note):
                logits = run(model, spec, step, rows.detach().clone().requires_grad_())
            drawn = torch.multinomial(logits.detach().softmax(1), 1, generator=torch.Generator().manual_seed(n))
            (-logits.log_softmax(1).gather(1, drawn).sum()).backward()
        for name, change in changes.items():
            for x, out in seen.get(name, ()):
                if out.grad is not None:  # None: it does not reach the logits
                    total[name] += 0.5 * float(((x @ change.to(x.dtype) * out.grad).sum(1) ** 2).sum())
        tokens += len(rows)
    return {name: value / tokens for name, value in total.items()}


def run(model: nn.Module, spec: Spec, step: Step, rows: Tensor) -> Tensor:
    """Logits [T, V] of a text's rows [T, C], from an empty cache."""
    return whole.run(model, spec, step, rows) if spec.form == "recipe" else equality.decode(model, spec, step, rows)[0]


class _Watch(TorchFunctionMode):
    """Calls `note(name, x [rows, in], out [rows, out])` at every product with one of the model's matrices."""

    def __init__(self, model: nn.Module, note: Callable[[str, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.names = {id(t): name for name, t in surgery.state(model).items() if t.dim() in (2, 4)}
        self.note = note

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in (*_PRODUCTS, torch.conv2d) and (name := self.names.get(id(args[1]))):
            x, width = args[0], out.shape[1 if function is torch.conv2d else -1]
            flat = out.reshape(-1, width)  # a convolution's input is all of its kernel: [T, C, 1, g] to [T, out, 1, 1]
            self.note(name, x.reshape(len(flat), -1), flat)
            return flat.reshape(out.shape)  # what was noted is on the way of the gradient
        return out


_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
