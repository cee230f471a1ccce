"""Turn the library's model into the one that is exported: attention, matrices, positions and angles replaced."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvgate.checkpoint.seams import Step
from kvgate.prepare import mixers, norms, recipe
from kvgate.prepare.rotary import Stub
from kvgate.prepare.spec import Spec


class MatMul(nn.Module):
    """x @ weight + bias with weight [in, out]: as the graph stores it, so that nothing is transposed later."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out if self.bias is None else out + self.bias


class Zero(nn.Module):
    """In the place of learned positions: the host adds their row to the embedding."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return torch.zeros(1)


def operate(model: nn.Module, spec: Spec, step: Step, tensors: Mapping[str, Tensor]) -> None:
    """Replace modules in place. tensors: at least the recipe's, the mixers' and the norms', by their full names."""
    if spec.form == "recipe":
        for layer in spec.layers:
            own = {n: tensors[key] for n in recipe.TENSORS if (key := f"{layer.module}.{n}") in tensors}
            model.set_submodule(layer.module, recipe.Attention(layer, step, own))
    for mixer in spec.mixers:
        model.set_submodule(mixer.module, mixers.made(mixer, step, tensors))
    for norm in spec.norms:
        weight, bias = tensors[f"{norm.module}.weight"], tensors.get(f"{norm.module}.bias")
        model.set_submodule(norm.module, norms.Exact(norm.kind, norm.epsilon, weight, bias))
    numbers: dict[str, dict[tuple, int]] = {}
    for i, rotation in enumerate(spec.rotations):
        numbers.setdefault(rotation.module, {})[rotation.arguments] = i
    for path, known in numbers.items():
        model.set_submodule(path, Stub(model.get_submodule(path), known, step))
    if spec.positions:
        model.set_submodule(spec.positions, Zero())
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, Conv1D)):
            weight = module.weight.t() if isinstance(module, nn.Linear) else module.weight
            model.set_submodule(name, MatMul(weight.detach().contiguous(), module.bias))


def state(model: nn.Module) -> dict[str, Tensor]:
    """All float tensors but the embedding (the host looks that up), by name, in the model's order."""
    skip = {id(p) for p in model.get_input_embeddings().parameters()}
    found = [*model.named_parameters(), *model.named_buffers()]
    return {n: t for n, t in found if id(t) not in skip and t.is_floating_point()}


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a shell its tensors. Raises KeyError where one is missing."""
    for name in state(model):
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(tensors[name], requires_grad=False)
        else:
            owner._buffers[leaf] = tensors[name]
