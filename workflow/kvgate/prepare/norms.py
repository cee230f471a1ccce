"""Norm modules, told by what they compute: each becomes one RMS norm or LayerNorm with its effective weight.

Gemma's and Nemotron's 1 + weight is then stored as such, and Cohere's written-out LayerNorm is the one operator that
the compiler fuses (3 rows a layer less).
"""

import torch
from torch import Tensor, nn

from kvgate.prepare.spec import Norm


class Exact(nn.Module):
    """y = weight * (x or x - mean(x)) / rms(..) + bias over the last axis."""

    def __init__(self, kind: str, epsilon: float, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.kind, self.epsilon = kind, epsilon
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight
        if self.weight.dim() == 1:
            return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        return nn.functional.layer_norm(x, x.shape[-1:], None, None, self.epsilon) * self.weight


def measure(model: nn.Module, skip: tuple[str, ...] = ()) -> tuple[list[Norm], dict[str, Tensor]]:
    """The norms of a model that `Exact` can stand for, and their effective weights by name. Others stay as they are.

    skip: how the names of those begin that are left alone.
    """
    norms, tensors = [], {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" not in type(module).__name__ or type(module) is nn.LayerNorm or weight is None:
            continue
        if path.startswith(skip):
            continue
        bias = getattr(module, "bias", None)
        if len(list(module.parameters())) != 1 + (bias is not None):
            continue
        epsilon = float(getattr(module, "eps", getattr(module, "variance_epsilon", 0.0)) or 0.0)
        found = _kind(module, weight, bias, epsilon)
        if found:
            norms.append(Norm(path, found[0], epsilon))
            tensors[f"{path}.weight"] = found[1]
            if bias is not None:
                tensors[f"{path}.bias"] = bias
    return norms, tensors


def _kind(module: nn.Module, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[str, Tensor] | None:
    generator = torch.Generator().manual_seed(0)
    # The second sample is small enough for epsilon to matter.
    samples = [s * (torch.randn(1, 3, *weight.shape, generator=generator) + 0.5) for s in (1.0, epsilon**0.5 or 1.0)]
    for kind in ("rms", "layer") if bias is None else ("layer",):
        for effective in (weight, 1 + weight):
            exact = Exact(kind, epsilon, effective, bias)
            if all(torch.allclose(exact(x), module(x), rtol=1e-5, atol=1e-6) for x in samples):
                return kind, effective
    return None
