"""The model as one step of a part: tensors of the contract in, tensors of the contract out."""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvgate import contract as c
from kvgate import strategies
from kvgate.checkpoint import seams
from kvgate.export import cache_layout
from kvgate.prepare import alibi, recipe, surgery, survey
from kvgate.prepare.spec import Spec

OUT = ".out"  # how the names of state outputs end


class GraphHalf(Protocol):
    """What a strategy's graph.py gives, of steps of `tokens` tokens."""

    def columns(self, capacity: int, tokens: int) -> int:
        """How many columns attention sees."""

    def returned(self, capacity: int, tokens: int) -> int:
        """How many slots every returned cache tensor has."""

    def extras(self, cache: c.Cache, tokens: int) -> list[c.Tensor]:
        """What the graph reads besides the embedding, masks, rotations and the cache."""

    def write(self, history: Tensor, new: Tensor, axis: int, extra: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """What attention sees and what is returned; `axis` is that of the slots, `new` has one a token.

        extra: the graph's inputs by name; what a strategy works out once for all layers it may keep in there.
        """


def strategy(name: str) -> GraphHalf:
    """The graph half of a strategy. Raises ValueError naming those known."""
    known = sorted(x.parent.name for folder in strategies.__path__ for x in Path(folder).glob("*/graph.py"))
    if name not in known:
        raise ValueError(f"strategy module: got {name!r}, known: {', '.join(known)}")
    return importlib.import_module(f"kvgate.strategies.{name}.graph")  # type: ignore[return-value]


class Decoder(nn.Module):
    """forward(*inputs in the contract's order) -> outputs in the contract's order."""

    def __init__(
        self,
        model: nn.Module,
        spec: Spec,
        contract: c.Contract,
        tensors: Mapping[str, Tensor],
        turned: Mapping[int, Tensor] | None = None,
    ) -> None:
        """model: untouched but for attached seams (load.attach); it is changed. tensors: the recipe's.

        turned: by rotation [D(in), D(out)], what a preparation of the weights does after it (`turned.i` of tables.npz);
        only a prefill part reads it, as the host's matrix of a decode part has it inside.
        """
        super().__init__()
        self.spec, self.contract = spec, contract
        self.turned = dict(turned or {})
        self.step = seams.Step()
        self.scales = {x.module: x for x in spec.layers}
        surgery.operate(model, spec, self.step, tensors)
        self.model = model
        self.half = strategy(contract.strategy)
        self.names = {m: n for n, m in model.named_modules()}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip([t.name for t in self.contract.inputs], inputs, strict=True))
        cache = self.contract.cache
        unread = {t.name: torch.zeros(t.shape) for t in self.contract.unread()}
        history = cache_layout.unpack(unread | given, self.contract)
        returned: dict[int, tuple[Tensor, ...]] = {}
        extra: dict[str, Any] = dict(given)

        def update(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            form = self.spec.form
            axis_d = 1 if form == "recipe" else 3
            new = cache_layout.join(
                cache_layout.to_boundary(key, cache, form), cache_layout.to_boundary(value, cache, form), cache
            )
            axis = cache_layout.slot_axis(cache)
            pairs = [self.half.write(old, x, axis, extra) for old, x in zip(history[layer], new, strict=True)]
            returned[layer] = tuple(kept for _, kept in pairs)
            seen = cache_layout.part([x for x, _ in pairs], cache, [key.shape[axis_d], value.shape[axis_d]])
            k, v = (cache_layout.from_boundary(x, cache, form) for x in seen)
            return k, v

        self.step.masks = self._masks(given)
        self.step.rotations = [self._rotation(given, i) for i in range(len(self.spec.rotations))]
        replaced: dict[str, Tensor] = {}
        self.step.update = update
        self.step.before = lambda layer, kind: given[f"{kind}.{layer}"]
        self.step.after = lambda layer, kind, state: replaced.update({f"{kind}.{layer}": state})
        with seams.using(self._attend):
            logits = survey.run(self.model, given["embedding"], self.spec.depth, update).logits
        kept = replaced | cache_layout.pack(returned, cache)
        states = tuple(kept[t.name.removesuffix(OUT)] for t in self.contract.cache_outputs())
        return states if self.contract.part == "prefill" else (logits, *states)

    def _masks(self, given: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """By layer; one that several layers share is one value of the graph."""
        if self.contract.part == "prefill":
            return self._chunk_masks(given)
        made: dict[tuple, Tensor] = {}
        masks = {}
        for known in sorted(self.spec.layers, key=lambda x: x.index):
            layer = self.contract.layers[known.index]
            mask, kind = given[f"mask.{layer.mask}"], (layer.mask, known.slopes)
            if known.slopes and kind not in made:
                sizes = mask.shape[1], self.contract.cache.capacity
                made[kind] = mask + alibi.bias(known, *sizes, given["position"], self.spec.form)
            masks[known.index] = made.get(kind, mask)
        return masks

    def _chunk_masks(self, given: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """By layer, of the plain form [T, columns], of the recipe [g * T, columns], a query's tokens side by side."""
        capacity, tokens = self.contract.cache.capacity, self.contract.tokens
        recipe_form = self.spec.form == "recipe"
        made: dict[tuple, Tensor] = {}
        masks = {}
        for known in sorted(self.spec.layers, key=lambda x: x.index):
            layer = self.contract.layers[known.index]
            groups = known.heads // known.kv_heads if recipe_form else 1
            kind = (layer.mask, known.slopes, groups)
            if layer.mask is None:  # its attention is dropped from the graph
                made[kind] = torch.zeros(groups * tokens, 1)
            if kind not in made:
                mask = given[f"mask.{layer.mask}"]
                columns = mask.shape[1]
                mask = torch.cat([mask] * groups) if groups > 1 else mask
                if known.slopes:
                    mask = mask + alibi.chunk(known, columns, capacity, given["position"], self.spec.form)
                made[kind] = mask
            masks[known.index] = made[kind]
        return masks

    def _rotation(self, given: Mapping[str, Tensor], index: int) -> Any:
        if self.spec.form == "recipe" and self.contract.part == "prefill":
            return self._angles(given, index)
        if self.spec.form == "recipe":
            return given.get(f"rotation.{index}")
        return given.get(f"cosine.{index}"), given.get(f"sine.{index}")

    def _angles(self, given: Mapping[str, Tensor], index: int) -> recipe.Angles | None:
        if f"cosine.{index}" not in given:
            return None
        rotation, after = self.spec.rotations[index], self.turned.get(index)
        size = len(rotation.turn)
        turn = torch.zeros(size, size)
        turn[torch.arange(size), torch.tensor(rotation.turn)] = torch.tensor(rotation.sign, dtype=torch.float32)
        cosine, sine = (given[f"{name}.{index}"].permute(0, 2, 1)[:, :, None] for name in ("cosine", "sine"))
        return recipe.Angles(cosine, sine, turn, None if after is None else after.t().contiguous())

    def _attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        """The plain form's attention function."""
        layer = self.scales[self.names[module]]
        return seams.attend(q, k, v, self.step.masks[layer.index], layer.scale, layer.softcap)


def example(contract: c.Contract) -> tuple[Tensor, ...]:
    """Zeros of the contract's inputs, in order."""
    return tuple(torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in contract.inputs)


def contract(
    spec: Spec, strategy_name: str, cache: c.Cache, host_sha256: str = "", part: str = "decode", tokens: int = 1
) -> c.Contract:
    """The contract of a model's graph. Masks whose window the capacity never reaches are one.

    A prefill part takes `tokens` tokens and returns states alone; it has the inputs of a decode part that these need.

    Raises ValueError where the cache cannot be packed as asked, and where a prefill part has not 2 to capacity tokens.
    """
    half = strategy(strategy_name)
    prefill = part == "prefill"
    if prefill and not 2 <= tokens <= cache.capacity:
        raise ValueError(f"prefill tokens: got {tokens}, allowed: 2 to the capacity of {cache.capacity}")
    if prefill and spec.mixers:
        first = spec.mixers[0].states()[0].name
        raise ValueError(f"prefill: got {first}, which a step of one token replaces, allowed: attention in every layer")
    effective = [None if w is None or w >= cache.capacity else w for w in spec.windows]
    used = sorted({effective[x.mask] for x in spec.layers}, key=lambda w: (w is not None, w))
    layers, states = [c.Layer(None, None)] * spec.depth, {x.index: x.states() for x in spec.mixers}
    for x in spec.layers:
        layers[x.index] = c.Layer(used.index(effective[x.mask]), x.rotation)
        states[x.index] = c.key_value(x.index, x.kv_heads, x.key_size, x.value_size, cache.capacity)
    if prefill:  # nobody needs what its attention gives
        layers[-1] = replace(layers[-1], mask=None)
    attention = sorted(spec.layers, key=lambda x: x.index)
    kept = tuple(x for index in sorted(states) for x in states[index])
    inputs = [c.Tensor("embedding", c.EMBEDDING, (1, tokens, spec.hidden))]
    mask = (tokens, half.columns(cache.capacity, tokens))
    read = sorted({x.mask for x in layers if x.mask is not None})
    inputs += [c.Tensor(f"mask.{i}", c.MASK, mask, index=i) for i in read]
    rotating = {x.rotation for x in spec.layers}
    for i, rotation in enumerate(spec.rotations):
        if i not in rotating:
            continue
        size = len(rotation.turn) or rotation.width
        if spec.form == "recipe" and not prefill:
            inputs.append(c.Tensor(f"rotation.{i}", c.ROTATION, (1, size, 1, size), index=i))
        else:
            inputs.append(c.Tensor(f"cosine.{i}", c.COSINE, (1, tokens, size), index=i))
            inputs.append(c.Tensor(f"sine.{i}", c.SINE, (1, tokens, size), index=i))
    if any(x.slopes for x in (attention[:-1] if prefill else attention)):
        inputs.append(c.Tensor("position", c.POSITION, (1, tokens), "float32"))
    inputs += half.extras(cache, tokens)
    history = c.cache_tensors(cache, kept, cache.capacity)
    if prefill and not half.returned(cache.capacity, 0):  # only attention reads a history that is not given back
        last = {x.name for x in states[max(states)]}
        history = [t for t in history if not set(t.states) <= last]
    inputs += history
    outputs = [] if prefill else [c.Tensor("logits", c.LOGITS, (1, 1, spec.vocabulary))]
    outputs += c.cache_tensors(cache, kept, half.returned(cache.capacity, tokens), OUT)
    return c.Contract(
        strategy=strategy_name,
        part=part,
        form=spec.form,
        reason=spec.reason,
        vocabulary=spec.vocabulary,
        hidden=spec.hidden,
        cache=cache,
        states=kept,
        layers=tuple(layers),
        windows=tuple(used),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        host_sha256=host_sha256,
        tokens=tokens,
    )
