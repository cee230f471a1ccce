"""Layers that keep a replaced state instead of K and V, one token at a time, in the form that the compiler takes.

Each equals the library's own code over whole texts, which the self-check holds it to. What is spelled for the compiler:
an outer product as a product of elements (a MatMul over one channel loses the Add behind it), S * exp(-x) as
S + S * elu(-x) (no exponential on the CPU, and slow decays keep their precision in float16), the l2 norm as an RMS norm
with a constant weight, and no division.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvgate.checkpoint.seams import Step
from kvgate.contract import CONVOLUTION, RECURRENT
from kvgate.prepare.spec import DeltaRule, Mixer, ShortConvolution
from kvgate.prepare.survey import Survey, Unsupported

L2_EPSILON = 1e-6  # the library's, in its norm of queries and keys: beside a sum of squares


class Convolution(nn.Module):
    """A gated short convolution (LFM2): out = (c * conv(b * x)) W."""

    TENSORS = ("joint", "joint_bias", "kernel", "kernel_bias", "out", "out_bias")

    def __init__(self, layer: ShortConvolution, step: Step, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layer, self.step = layer, step
        _register(self, tensors)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        joint = hidden_states @ self.joint  # [1, 1, 3 C]
        if self.joint_bias is not None:
            joint = joint + self.joint_bias
        b, c, x = joint.split(self.layer.channels, dim=2)
        y = c * _convolved(self, b * x)
        out = y @ self.out
        return out if self.out_bias is None else out + self.out_bias


class Delta(nn.Module):
    """A gated delta rule (Qwen3.5), of each head S' = g S + k^T (beta (v - k g S)), out = q S'."""

    TENSORS = ("qkv", "gate", "rates", "kernel", "kernel_bias", "decay", "rate_bias", "l2", "norm", "out")

    def __init__(self, layer: DeltaRule, step: Step, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layer, self.step = layer, step
        _register(self, tensors)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        layer, step = self.layer, self.step
        heads = (1, layer.heads, 1, layer.value_size)
        mixed = nn.functional.silu(_convolved(self, hidden_states @ self.qkv))
        keys = layer.key_heads * layer.key_size
        q, k, v = mixed.split([keys, keys, layer.heads * layer.value_size], dim=2)
        q, k = self._normed(q) * layer.key_size**-0.5, self._normed(k)
        each = (1, layer.heads, 1, 1)
        beta, rate = (x.reshape(each) for x in (hidden_states @ self.rates).split(layer.heads, dim=2))
        kept = nn.functional.elu(self.decay * nn.functional.softplus(rate + self.rate_bias))  # exp(-x) - 1
        state = step.before(layer.index, RECURRENT)
        state = state + state * kept
        delta = (v.reshape(heads) - k @ state) * torch.sigmoid(beta)
        state = _written(state, k, delta)
        step.after(layer.index, RECURRENT, state)
        out = q @ state
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + layer.epsilon) * self.norm
        out = out * nn.functional.silu((hidden_states @ self.gate).reshape(heads))
        return out.reshape(1, 1, -1) @ self.out

    def _normed(self, x: Tensor) -> Tensor:
        """[1, heads, 1, D] of [1, 1, key heads * D]: x / sqrt(sum of squares + epsilon)."""
        layer = self.layer
        x = x.reshape(1, layer.key_heads, 1, layer.key_size)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + L2_EPSILON / layer.key_size) * self.l2
        groups = layer.heads // layer.key_heads
        if groups == 1:
            return x
        return x.expand(-1, -1, groups, -1).reshape(1, layer.heads, 1, layer.key_size)


MODULES: dict[type, type[nn.Module]] = {ShortConvolution: Convolution, DeltaRule: Delta}


def made(layer: Mixer, step: Step, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The module of a layer. tensors: at least its own, by their full names."""
    kind: Any = MODULES[type(layer)]
    own = {name: tensors[key] for name in kind.TENSORS if (key := f"{layer.module}.{name}") in tensors}
    return kind(layer, step, own)


def measure(model: nn.Module, found: Survey) -> tuple[list[Mixer], dict[str, Tensor]]:
    """The layers without K and V of a surveyed model, and their tensors by full name. Raises Unsupported."""
    layers: list[Mixer] = []
    tensors: dict[str, Tensor] = {}
    for index, path in found.mixers:
        module = model.get_submodule(path)
        read = _READ.get(type(module).__name__)
        if read is None:
            got = f"{path}: a state kept by {type(module).__name__}"
            raise Unsupported(f"{got}, allowed: {', '.join(_READ)}")
        layer, own = read(module, path, index)
        layers.append(layer)
        tensors |= {f"{path}.{name}": x.detach().contiguous() for name, x in own.items() if x is not None}
    return layers, tensors


def _short_convolution(module: Any, path: str, index: int) -> tuple[Mixer, dict[str, Tensor]]:
    kernel, bias = _kernel(module.conv, path)
    layer = ShortConvolution(path, index, kernel.shape[0], kernel.shape[1])
    tensors = {"joint": module.in_proj.weight.t(), "joint_bias": module.in_proj.bias, "kernel": kernel}
    tensors |= {"kernel_bias": bias, "out": module.out_proj.weight.t(), "out_bias": module.out_proj.bias}
    return layer, tensors


def _delta_rule(module: Any, path: str, index: int) -> tuple[Mixer, dict[str, Tensor]]:
    if module.activation != "silu":
        raise Unsupported(f"{path}: got the activation {module.activation!r}, allowed: 'silu'")
    kernel, bias = _kernel(module.conv1d, path)
    layer = DeltaRule(
        path,
        index,
        channels=kernel.shape[0],
        window=kernel.shape[1],
        key_heads=module.num_k_heads,
        heads=module.num_v_heads,
        key_size=module.head_k_dim,
        value_size=module.head_v_dim,
        epsilon=float(module.norm.variance_epsilon),
    )
    return layer, {
        "qkv": module.in_proj_qkv.weight.t(),
        "gate": module.in_proj_z.weight.t(),
        "rates": torch.cat([module.in_proj_b.weight, module.in_proj_a.weight]).t(),
        "kernel": kernel,
        "kernel_bias": bias,
        "decay": -module.A_log.exp().reshape(1, -1, 1, 1),
        "rate_bias": module.dt_bias.reshape(1, -1, 1, 1),
        "l2": torch.full((layer.key_size,), layer.key_size**-0.5, dtype=kernel.dtype),
        "norm": module.norm.weight,
        "out": module.out_proj.weight.t(),
    }


_READ: dict[str, Callable[[Any, str, int], tuple[Mixer, dict[str, Tensor]]]] = {
    "Lfm2ShortConv": _short_convolution,
    "Qwen3_5GatedDeltaNet": _delta_rule,
}


def _kernel(convolution: nn.Conv1d, path: str) -> tuple[Tensor, Tensor]:
    """[C, inputs] and the bias (None: none) of a convolution of each channel alone."""
    weight = convolution.weight
    if convolution.groups != weight.shape[0] or weight.shape[1] != 1 or weight.shape[2] < 2:
        got = f"{path}: a convolution {list(weight.shape)} in {convolution.groups} groups"
        raise Unsupported(f"{got}, allowed: one of at least 2 inputs in each channel")
    return weight[:, 0], convolution.bias


def _convolved(module: Any, new: Tensor) -> Tensor:
    """[1, 1, C] of a step's input [1, 1, C]; its window is [1, C, inputs], the newest last."""
    layer, step = module.layer, module.step
    past = step.before(layer.index, CONVOLUTION)
    window = torch.cat([past, new.reshape(1, -1, 1)], dim=2)
    step.after(layer.index, CONVOLUTION, window[:, :, 1:])
    out = (window * module.kernel).sum(2).reshape(1, 1, -1)
    return out if module.kernel_bias is None else out + module.kernel_bias


def _written(state: Tensor, key: Tensor, delta: Tensor) -> Tensor:
    """[1, H, D, Dv], of a key [1, H, 1, D] and what it is to map to besides [1, H, 1, Dv]."""
    return state + key.transpose(2, 3) * delta


def _register(module: Any, tensors: Mapping[str, Tensor]) -> None:
    for name in module.TENSORS:
        found = tensors.get(name)
        module.register_parameter(name, None if found is None else nn.Parameter(found, requires_grad=False))
