"""Attention modules that call the cache but not the attention function: a forward that calls both.

Each is the module's own arithmetic up to the scores; the equality with the untouched model is checked on every model.
"""

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from kvgate.export import seams


def apply(model: nn.Module) -> None:
    """Replace the forward of the known modules, on the instances."""
    for module in model.modules():
        forward = FORWARDS.get(type(module).__name__)
        if forward:
            module.forward = types.MethodType(forward, module)


def _call(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, cache: Any, **kwargs: Any) -> Tensor:
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    attend = AttentionInterface().get_interface(seams.NAME, None)
    return attend(module, query, key, value, mask, scaling=module.head_dim**-0.5, **kwargs)[0].flatten(2)


def _falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Any,
    attention_mask: Any,
    position_ids: Any = None,
    layer_past: Any = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> tuple:
    """FalconAttention with rotary embedding; its own code repeats the KV heads before it caches them."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    if self.new_decoder_architecture:
        groups = self.num_heads // self.num_kv_heads
        key, value = key[:, ::groups], value[:, ::groups]
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    return self.dense(_call(self, query, key, value, attention_mask, layer_past)), None


def _bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Any,
    attention_mask: Any,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple:
    """BloomAttention; the distance bias that it adds to its scores is left to the attention function."""
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    slopes = _get_alibi_slopes(self.num_heads, "cpu")
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    out = _call(self, query, key, value, attention_mask, layer_past, slopes=slopes, residual=True)
    return self.dense(out) + residual, None


FORWARDS: dict[str, Callable[..., tuple]] = {"FalconAttention": _falcon, "BloomAttention": _bloom}
