"""A prepared model over a whole text in one call: its attention sees all tokens at once instead of a growing cache.

For statistics of long texts. Only the recipe's attention knows the trick.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kvgate.checkpoint import seams
from kvgate.checkpoint.seams import Step
from kvgate.prepare import alibi, recipe, rotary, survey
from kvgate.prepare.spec import Spec


def run(model: nn.Module, spec: Spec, step: Step, rows: Tensor) -> Tensor:
    """Logits [T, V] of rows [T, C], embedded tokens with their learned positions added. spec.form: `recipe`."""
    angles = [rotary.tables(model.get_submodule(r.module), r, len(rows)) for r in spec.rotations]  # type: ignore[arg-type]
    turns = [torch.stack([rotary.at(table, t) for t in range(len(rows))]) for table in angles]
    step.rotations = [each[0] for each in turns]  # the model hands them on; the recipe's own are `turns`
    with _attending(model, spec, step, turns), seams.using(seams.attend):  # which no module calls: see _Whole
        return survey.run(model, rows[None], spec.depth, lambda i, key, value: (key, value)).logits[0]


@contextmanager
def _attending(model: nn.Module, spec: Spec, step: Step, turns: list[Tensor]) -> Iterator[None]:
    modules = [model.get_submodule(layer.module) for layer in spec.layers]
    for layer, module in zip(spec.layers, modules, strict=True):
        parent, _, name = layer.module.rpartition(".")
        setattr(model.get_submodule(parent), name, _Whole(module, spec.windows[layer.mask], step, turns))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for layer, module in zip(spec.layers, modules, strict=True):
            parent, _, name = layer.module.rpartition(".")
            setattr(model.get_submodule(parent), name, module)


class _Whole(nn.Module):
    """In the place of the recipe's attention, with its tensors; T positions where that has one."""

    def __init__(self, one: recipe.Attention, window: int | None, step: Step, turns: list[Tensor]) -> None:
        """turns: per rotation [T, 1, D, 1, D]."""
        super().__init__()
        self.one, self.window, self.step, self.turns = one, window, step, turns

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        one, layer = self.one, self.one.layer
        joint = hidden_states @ one.qkv  # [1, T, Hk * D * (g + 2)]
        if one.bias is not None:
            joint = joint + one.bias

        def columns(row: Tensor, *turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.step.rotations = list(turns)
            return one.columns(row[None, None])

        before = self.step.rotations
        q, k, v = torch.vmap(columns)(joint[0], *self.turns)  # [T, Hk, D, 1, g], [T, Hk, D, 1, 1] twice
        self.step.rotations = before
        keys, values = (x[..., 0].permute(1, 2, 3, 0) for x in (k, v))  # [Hk, D, 1, T]
        out = one.project(one.gated(hidden_states, self._attend(q, keys, values)))
        if layer.residual:
            out = out + args[0]  # type: ignore[operator]
        return (out, *[None] * (layer.outputs - 1)) if layer.outputs else out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[T, Hk, D, 1, g] of q [T, Hk, D, 1, g] over keys and values [Hk, D, 1, T]."""
        one, tokens, groups = self.one, len(q), q.shape[-1]
        masks = self._masks(tokens)
        if one.layer.softcap is not None:  # that form takes one mask for all queries
            return torch.vmap(lambda row, mask: one.attend(row, keys, values, mask))(q, masks)
        # As T * g queries of one step: a map over T would repeat the keys T times.
        masks = masks.expand(tokens, -1, -1, groups, -1).permute(1, 2, 0, 3, 4).flatten(2, 3)  # [1 or Hk, 1, T g, T]
        wide = one.attend(q.permute(1, 2, 3, 0, 4).flatten(3), keys, values, masks)
        return wide.unflatten(3, (tokens, groups)).permute(3, 0, 1, 2, 4)

    def _masks(self, tokens: int) -> Tensor:
        """Additive, a query a row: [T, 1, 1, 1, T], with alibi [T, Hk, 1, g, T]."""
        row, column = torch.arange(tokens)[:, None], torch.arange(tokens)
        seen = (column <= row) & (column > row - (self.window or tokens))
        mask = torch.where(seen, 0.0, -1e4)[:, None, None, None]
        layer = self.one.layer
        if not layer.slopes:
            return mask
        biases = [alibi.bias(layer, tokens, tokens, float(t), "recipe") for t in range(tokens)]
        return mask + torch.stack(biases)
