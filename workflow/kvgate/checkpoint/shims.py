"""Modules that pass the seams by: a forward that goes through them.

Attention that calls the cache but not the attention function, positions that are added where no module shows them,
masks that a model works on. Each is the module's own arithmetic up to the scores; the equality with the untouched
model is checked on every model.
"""

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvgate.checkpoint import seams


def apply(model: nn.Module) -> None:
    """Replace the forward of the known modules, on the instances."""
    for module in list(model.modules()):
        kind = type(module).__name__
        if kind in FORWARDS:
            module.forward = types.MethodType(FORWARDS[kind], module)
        if kind == "CTRLModel":
            module.positions = _Positional(module.pos_encoding / module.d_model_size**0.5)
            del module.pos_encoding


def _call(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, cache: Any, scale: float, **kwargs: Any
) -> Tensor:
    """The heads side by side, [1, T, Hq * D]. kwargs: what our attention functions are told besides."""
    if cache is not None:
        index = module.layer_id if hasattr(module, "layer_id") else module.layer_idx
        key, value = cache.update(key, value, index)
    attend = AttentionInterface().get_interface(seams.NAME, None)
    return attend(module, query, key, value, mask, scaling=scale, **kwargs)[0].flatten(2)


def _heads(module: Any, joint: Tensor) -> Tensor:
    """[1, T, H * D] -> [1, H, T, D]."""
    return joint.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)


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
    """FalconAttention; its own code repeats the KV heads before it caches them.

    Its distance bias is left to the attention function: slope * position in bfloat16, scaled as the scores are.
    """
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    if self.new_decoder_architecture:
        groups = self.num_heads // self.num_kv_heads
        key, value = key[:, ::groups], value[:, ::groups]
    scale = self.head_dim**-0.5
    more: dict[str, Any] = {}
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        attention_mask = None  # the bias is in it; without alibi and padding it is the causal one
        more = {"slopes": _get_alibi_slopes(self.num_heads, "cpu"), "bfloat16": scale}
    return self.dense(_call(self, query, key, value, attention_mask, layer_past, scale, **more)), None


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
    scale = self.head_dim**-0.5
    out = _call(self, query, key, value, attention_mask, layer_past, scale, slopes=slopes, residual=True)
    return self.dense(out) + residual, None


def _mpt(self: Any, hidden_states: Tensor, position_bias: Any, cache: Any = None, **kwargs: Any) -> tuple:
    """MptAttention; the distance bias is left to the attention function."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes = -build_mpt_alibi_tensor(self.n_heads, 2, device="cpu")[:, 0, 0]  # of distance -1
    joint = self.Wqkv(hidden_states)
    if self.clip_qkv:
        joint = joint.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (_heads(self, x) for x in joint.chunk(3, dim=2))
    return self.out_proj(_call(self, query, key, value, None, cache, self.softmax_scale, slopes=slopes)), None


def _mpt_model(
    self: Any, input_ids: Any = None, inputs_embeds: Any = None, cache: Any = None, **kwargs: Any
) -> BaseModelOutputWithPast:
    """MptModel without the mask and the bias that it makes: both come in at the attention function."""
    for block in self.blocks:
        inputs_embeds = block(inputs_embeds, position_bias=None, attention_mask=None, layer_past=cache)[0]
    return BaseModelOutputWithPast(last_hidden_state=self.norm_f(inputs_embeds))


def _xglm(self: Any, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None, **kwargs: Any) -> tuple:
    """XGLMAttention without its cross attention."""
    query, key, value = (_heads(self, x(hidden_states)) for x in (self.q_proj, self.k_proj, self.v_proj))
    return self.out_proj(_call(self, query, key, value, attention_mask, cache, self.scaling)), None


def _gpt_neo(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, layer_past: Any = None, **kwargs: Any
) -> tuple:
    """GPTNeoSelfAttention: unscaled scores, the window of a local layer is the module's own."""
    more = {"window": self.config.window_size} if self.attention_type == "local" else {}
    query, key, value = (_heads(self, x(hidden_states)) for x in (self.q_proj, self.k_proj, self.v_proj))
    return self.out_proj(_call(self, query, key, value, attention_mask, layer_past, 1.0, **more)), None


class _Positional(nn.Module):
    """A table of positions as a module, so that it is found and left to the host as learned ones are."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Buffer(rows)

    def forward(self, position_ids: Tensor) -> Tensor:
        return self.rows[position_ids]


def _ctrl_model(
    self: Any,
    input_ids: Any = None,
    inputs_embeds: Any = None,
    position_ids: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> BaseModelOutputWithPast:
    """CTRLModel; the positions are added before the embedding is scaled, which is the same."""
    hidden = (inputs_embeds + self.positions(position_ids)) * self.d_model_size**0.5
    for block in self.h:
        hidden = block(hidden, layer_past=cache)
    return BaseModelOutputWithPast(last_hidden_state=self.layernorm(hidden))


FORWARDS: dict[str, Callable[..., Any]] = {
    "FalconAttention": _falcon,
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "MptModel": _mpt_model,
    "XGLMAttention": _xglm,
    "GPTNeoSelfAttention": _gpt_neo,
    "CTRLModel": _ctrl_model,
}
