"""Measure a model and change it into the one that is exported: the recipe where it holds, the plain form where not."""

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from kvgate.checkpoint import load, precise
from kvgate.checkpoint.seams import Step
from kvgate.jobs.record import blocked
from kvgate.prepare import equality, measure_attention, mixers, norms, surgery, survey
from kvgate.prepare.spec import DeltaRule, Layer, Mixer, Rotation, ShortConvolution, Spec

_ROWS = 4096  # of an embedding at once


@dataclass(frozen=True)
class Prepared:
    spec: Spec
    model: nn.Module  # operated on; its state is what the graph reads
    error: float  # of the self-check
    embedding: "Rows"  # of tokens, as the model embeds them
    positions: Tensor | None  # [P, C]


class Rows:
    """The effective embedding [V, C]: some models scale it in their embedding module. Made as it is asked for."""

    def __init__(self, table: nn.Module) -> None:
        self.table = table

    def __len__(self) -> int:
        return int(self.table.num_embeddings)  # type: ignore[arg-type]

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self.table(ids)  # type: ignore[no-any-return]

    def single(self) -> np.ndarray:
        """All of them in float32."""
        found = np.empty((len(self), self[torch.zeros(1, dtype=torch.int64)].shape[1]), np.float32)
        for ids in torch.arange(len(self)).split(_ROWS):
            found[int(ids[0]) : int(ids[-1]) + 1] = precise.single(self[ids])
        return found


def prepare(model: nn.Module, form: str) -> Prepared:
    """model: untouched (load.model); it is changed. form: `recipe` or `plain`, what is asked for.

    Raises record.Blocked where neither form is the model.
    """
    try:
        found = survey.survey(load.attach(_copy(model)))
        mixing = mixers.measure(model, found)
        known = equality.reference(model, found.position_table)
    except Exception as why:  # foreign code called in a way that it may not know: data, not a bug of ours
        text = f"the model does not fit the seams: {_line(why)}"
        raise blocked("seams", text) from why
    embedding = Rows(model.get_input_embeddings())  # type: ignore[operator]
    load.attach(model)
    reason = "plain was asked for"
    if form == "recipe":
        try:
            spec, tensors = _recipe(model, found, *mixing)
            changed, step = _copy(model), Step()
            surgery.operate(changed, spec, step, tensors)
            errors = equality.errors(changed, spec, step, known)
            error = max(errors.values())
            print(f"recipe: error {error:.1e} against the untouched model", file=sys.stderr)
            if error <= equality.TOLERANCE:
                return Prepared(replace(spec, top=known.top), changed, error, embedding, found.position_table)
            reason = f"the recipe differs from the model by {equality.difference(errors)}"
        except Exception as why:
            reason = _line(why)
        print(f"plain form: {reason}", file=sys.stderr)
    spec, tensors = _plain(found, model, reason, *mixing)
    step = Step()
    surgery.operate(model, spec, step, tensors)
    errors = equality.errors(model, spec, step, known)
    error = max(errors.values())
    print(f"plain: error {error:.1e} against the untouched model", file=sys.stderr)
    if not error <= equality.TOLERANCE:
        difference, allowed = equality.difference(errors), f"{equality.TOLERANCE:.0e}"
        text = f"the exported form differs from the model by {difference}, allowed: {allowed}"
        raise blocked("differs", text)
    return Prepared(replace(spec, top=known.top), model, error, embedding, found.position_table)


def _line(why: Exception) -> str:
    text = str(why) if isinstance(why, survey.Unsupported) else f"{type(why).__name__}: {why}"
    return text.strip().splitlines()[0]


def _copy(model: nn.Module) -> nn.Module:
    """The same parameters in modules of their own: replacing a module in one leaves the other alone."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _recipe(
    model: nn.Module, found: survey.Survey, mixing: Sequence[Mixer] = (), mixed: Mapping[str, Tensor] | None = None
) -> tuple[Spec, dict[str, Tensor]]:
    """mixing, mixed: the layers without K and V, and their tensors."""
    layers: list[Layer] = []
    tensors: dict[str, Tensor] = dict(mixed or {})
    rotations: list[Rotation] = []
    for site in found.sites:
        plain = None
        if site.rotation is not None:
            path, arguments = found.rotations[site.rotation]
            plain = Rotation(path, arguments, found.widths[site.rotation])
        try:
            layer, own, turning = measure_attention.layer(model.get_submodule(site.module), site, plain)
        except survey.Unsupported:
            raise
        except Exception as why:  # foreign code, called with what it may not know
            raise survey.Unsupported(f"{site.module}: {_line(why)}") from why
        if turning is not None:
            if turning not in rotations:
                rotations.append(turning)
            layer = replace(layer, rotation=rotations.index(turning))
        layers.append(layer)
        tensors |= {f"{site.module}.{name}": tensor for name, tensor in own.items()}
    inside = tuple(f"{site.module}." for site in found.sites)  # those of q and k are the recipe's own
    replaced, weights = norms.measure(model, _inside(mixing))
    kept = [n for n in replaced if not n.module.startswith(inside)]
    spec = _spec(model, found, "recipe", "", layers, rotations, mixing)
    tensors |= {name: tensor for name, tensor in weights.items() if not name.startswith(inside)}
    return replace(spec, norms=tuple(kept)), tensors


def _plain(
    found: survey.Survey, model: nn.Module, reason: str, mixing: Sequence[Mixer], mixed: Mapping[str, Tensor]
) -> tuple[Spec, dict[str, Tensor]]:
    rotations = [Rotation(p, a, w) for (p, a), w in zip(found.rotations, found.widths, strict=True)]
    layers = []
    for site in found.sites:
        scale = float(site.options.get("scaling") or site.key_size**-0.5)
        cap = site.options.get("softcap")
        sizes = (site.heads, site.kv_heads, site.key_size, site.value_size, site.outputs)
        plain = Layer(site.module, site.index, *sizes, site.mask, site.rotation, scale, cap)
        layers.append(replace(plain, **measure_attention.distances(site)))
        if site.options.get("s_aux") is not None:
            text = f"{site.module}: attention sinks, allowed: scale, mask, soft cap, alibi"
            raise blocked("attention", text)
    replaced, weights = norms.measure(model, _inside(mixing))
    spec = _spec(model, found, "plain", reason, layers, rotations, mixing)
    return replace(spec, norms=tuple(replaced)), {**mixed, **weights}


def _inside(mixing: Sequence[Mixer]) -> tuple[str, ...]:
    """How the names of their own modules begin."""
    return tuple(f"{x.module}." for x in mixing)


def _spec(
    model: nn.Module,
    found: survey.Survey,
    form: str,
    reason: str,
    layers: list[Layer],
    rotations: list[Rotation],
    mixing: Sequence[Mixer],
) -> Spec:
    return Spec(
        form=form,
        reason=reason,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        hidden=survey.width(model),
        positions=found.positions,
        windows=tuple(found.windows),
        rotations=tuple(rotations),
        layers=tuple(layers),
        convolutions=tuple(x for x in mixing if isinstance(x, ShortConvolution)),
        delta_rules=tuple(x for x in mixing if isinstance(x, DeltaRule)),
    )
