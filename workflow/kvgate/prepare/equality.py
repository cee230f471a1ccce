"""Is the changed model the model? Token by token with a growing cache, against the untouched one in a single call."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvgate.checkpoint import seams
from kvgate.checkpoint.seams import Step
from kvgate.prepare import alibi, rotary, survey
from kvgate.prepare.spec import Layer, Spec

TOKENS = 12
TOLERANCE = 1e-5  # normalized L2 in float32; recipes and plain forms were measured at 3e-7 to 1.4e-6


@dataclass(frozen=True)
class Reference:
    embedded: Tensor  # [T, C] as the model embeds the tokens
    positions: Tensor | None  # [T, C] learned positions
    logits: Tensor  # [T, V]
    keys: dict[int, Tensor]  # by layer [T, Hk or Hq, D]
    values: dict[int, Tensor]
    states: dict[tuple[int, str], Tensor]  # by layer and kind those that are replaced, after the last token

    @property
    def top(self) -> int:
        """About how large the largest logit is. Of random tokens it is what it is of texts, within a few units."""
        return round(self.logits.max(-1).values.mean().item())


def reference(model: nn.Module, positions: Tensor | None) -> Reference:
    """Run the untouched model on random tokens in one call, its own masks and angles."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (1, TOKENS), generator=generator)
    layers = model.config.get_text_config().num_hidden_layers
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    states: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kept[layer] = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        return key, value

    def after(layer: int, kind: str, state: Tensor) -> None:
        states[layer, kind] = state

    embedded = model.get_input_embeddings()(ids)
    logits = survey.run(model, embedded.clone(), layers, keep, after=after).logits[0]  # CTRL scales it in place
    keys, values = ({i: both[n] for i, both in kept.items()} for n in (0, 1))
    return Reference(embedded[0], None if positions is None else positions[:TOKENS], logits, keys, values, states)


def error(model: nn.Module, spec: Spec, step: Step, known: Reference) -> float:
    """Worst normalized L2 of logits and every layer's states. `model` has been operated on and reads `step`."""
    return max(errors(model, spec, step, known).values())


def errors(model: nn.Module, spec: Spec, step: Step, known: Reference) -> dict[str, float]:
    """Normalized L2 by place, in the order in which they are computed: each layer's states, the logits."""
    rows = known.embedded if known.positions is None else known.embedded + known.positions
    logits, keys, values, states = decode(model, spec, step, rows)
    found = {}
    for layer in sorted((*spec.layers, *spec.mixers), key=lambda x: x.index):
        if not isinstance(layer, Layer):
            for state in layer.states():
                at = layer.index, state.kind
                found[f"the {state.kind} state of {layer.module}"] = _distance(states[at], known.states[at])
            continue
        for name, got, wanted in (("keys", keys, known.keys), ("values", values, known.values)):
            mine, theirs = got[layer.index], wanted[layer.index]
            groups = theirs.shape[1] // mine.shape[1]  # falcon caches its KV heads repeated
            found[f"the {name} of {layer.module}"] = _distance(mine, theirs[:, ::groups])
    return found | {"the logits": _distance(logits, known.logits)}


def difference(found: dict[str, float]) -> str:
    """Of `errors`: the worst one, and the first place over the tolerance."""
    place = next((place for place, error in found.items() if not error <= TOLERANCE), "nothing")
    return f"{max(found.values()):.1e}, first in {place}"


Kept = dict[int, Tensor]


def decode(
    model: nn.Module, spec: Spec, step: Step, rows: Tensor
) -> tuple[Tensor, Kept, Kept, dict[tuple[int, str], Tensor]]:
    """Token by token with a growing cache: logits [T, V], by layer K and V [T, Hk, D] as cached, by layer and kind the
    replaced states after the last token.

    rows: [T, C], embedded tokens with their learned positions added.
    """
    kept: list[dict[int, list[Tensor]]] = [{x.index: [] for x in spec.layers} for _ in "kv"]
    states = {(x.layer, x.kind): torch.zeros(x.shape) for mixer in spec.mixers for x in mixer.states()}
    axis = 3 if spec.form == "recipe" else 2

    def update(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        for of, new in zip(kept, (key, value), strict=True):
            of[layer].append(new)
        return torch.cat(kept[0][layer], axis), torch.cat(kept[1][layer], axis)

    def after(layer: int, kind: str, state: Tensor) -> None:
        states[layer, kind] = state

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **options: object) -> Tensor:
        layer = by_module[module]
        return seams.attend(q, k, v, step.masks[layer.index], layer.scale, layer.softcap)

    by_module = {m: x for n, m in model.named_modules() for x in spec.layers if x.module == n}
    angles = [rotary.tables(model.get_submodule(r.module), r, len(rows)) for r in spec.rotations]  # type: ignore[arg-type]
    step.update, step.before, step.after = update, lambda layer, kind: states[layer, kind], after
    logits = []
    for position, row in enumerate(rows):
        ordered = sorted(spec.layers, key=lambda x: x.index)
        step.masks = {x.index: _mask(position, spec.windows[x.mask]) + _bias(position, spec.form, x) for x in ordered}
        step.rotations = [rotary.at(table, position) for table in angles]
        with seams.using(attend):
            logits.append(survey.run(model, row.view(1, 1, -1), spec.depth, update).logits[0, 0])
    keys, values = ({i: _rows(torch.cat(new, axis), axis) for i, new in of.items()} for of in kept)
    return torch.stack(logits), keys, values, states


def _rows(cached: Tensor, axis: int) -> Tensor:
    """[T, Hk, D] of [Hk, D, 1, T] (axis 3) or [1, Hk, T, D]."""
    return cached[:, :, 0].permute(2, 0, 1) if axis == 3 else cached[0].transpose(0, 1)


def _mask(position: int, window: int | None) -> Tensor:
    columns = torch.arange(position + 1)
    seen = columns > position - window if window else columns >= 0
    return torch.where(seen, 0.0, -1e4)[None]


def _bias(position: int, form: str, layer: Layer) -> Tensor:
    if not layer.slopes:
        return torch.zeros(1)
    return alibi.bias(layer, position + 1, position + 1, float(position), form)


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
