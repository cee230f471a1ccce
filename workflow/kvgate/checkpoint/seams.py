"""The library's two seams: a cache of our layers and an attention function registered by name, and what they share.

A `Step` travels beside the model's own arguments: the masks, rotations and histories of one decoding step go in, what
is kept of the cache comes out. The model's own masks and angles are then dead code and the exporter drops them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from kvgate.contract import CONVOLUTION, RECURRENT

NAME = "kvgate"

# update(layer, key, value) -> what attention sees of K and V
Update = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
# before(layer, kind) -> a replaced state as the step found it; after(layer, kind, state): as it leaves it
Before = Callable[[int, str], Tensor]
After = Callable[[int, str, Tensor], None]


def _no_state(layer: int, kind: str, *state: Tensor) -> Tensor:
    raise AssertionError(f"layer {layer}: nobody keeps its {kind} state")


@dataclass
class Step:
    """One decoding step: what modules of the model need that the model does not hand them."""

    masks: Mapping[int, Tensor] = field(default_factory=dict)  # by layer, additive: [T, columns], alibi: one per head
    # Per rotation [1, D, 1, D], or (cos, sin) of [1, T, D], or recipe.Angles.
    rotations: list[Any] = field(default_factory=list)
    update: Update = lambda layer, key, value: (key, value)
    before: Before = _no_state
    after: After = _no_state  # type: ignore[assignment]


class _Layer(CacheLayerMixin):
    """A layer that holds nothing: it hands the new rows to `update` and attention what comes back."""

    is_sliding = False

    def __init__(self, index: int, update: Update) -> None:
        super().__init__()
        self.index, self._update = index, update

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._update(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _Cache(Cache):
    """Beside K and V the library's own methods for states that each call replaces: it starts empty and hands them on.

    Of a convolution the states are its inputs [1, C, T]; what is kept of them are the last ones before a next token.
    """

    def __init__(self, layers: list[CacheLayerMixin], after: After) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self._after = after

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        kept = kwargs.get("conv_kernel_size", conv_states.shape[-1]) - 1
        self._after(layer_idx, CONVOLUTION, torch.nn.functional.pad(conv_states, (kept, 0))[..., -kept:])
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._after(layer_idx, RECURRENT, recurrent_states)
        return recurrent_states


def cache(layers: int, update: Update, after: After = _no_state) -> Cache:  # type: ignore[assignment]
    """A Cache of `layers` layers, each of which calls `update`, or `after` where it keeps replaced states."""
    return _Cache([_Layer(i, update) for i in range(layers)], after)


def attend(
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hk, S, D]
    value: Tensor,  # [1, Hk, S, Dv]
    mask: Tensor,  # additive, broadcast to [1, Hq, T, S]
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Plain attention, [1, T, Hq, Dv]: KV heads repeated, scale on q (on the scores it is not fused at 1,024 slots)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (key, value))
    scores = (query * scale) @ key.transpose(2, 3)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + mask, dim=-1)
    return (weights @ value).transpose(1, 2)


# The attention function and the mask function that the model calls. `handlers` is set by `using` only.
_handlers: list[tuple[Callable[..., Tensor], Callable[..., Any]]] = []


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple:
    return _handlers[-1][0](module, query, key, value, attention_mask, **kwargs), None


def _mask(**kwargs: Any) -> Any:
    return _handlers[-1][1](**kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


class using:
    """`with using(attention, mask):` the functions that models with attention implementation `kvgate` call."""

    def __init__(self, attention: Callable[..., Tensor], mask: Callable[..., Any] = lambda **kwargs: None) -> None:
        self.handlers = (attention, mask)

    def __enter__(self) -> None:
        _handlers.append(self.handlers)

    def __exit__(self, *error: object) -> None:
        _handlers.pop()
