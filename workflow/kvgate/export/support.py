"""What a config.json alone tells: which architectures cannot work, and how the others are asked to compute.

Standard library only: planning calls it.
"""

from collections.abc import Mapping
from typing import Any

# Model types whose layers keep a state that is not K and V of every token.
_HYBRIDS = ("jamba", "bamba", "zamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "qwen3_next", "kimi_linear")
_STATES = ("mamba", "falcon_mamba", "rwkv", "lfm2", "recurrent", "xlstm", *_HYBRIDS)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_VISION = ("vision_config", "audio_config", "vision_tower")


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be exported, in one line; None: nothing in the config forbids it."""
    kind = str(config.get("model_type", ""))
    text = config.get("text_config")
    name = f"model type {kind!r}"
    if not kind:
        return "config.json: got no model_type, allowed: a Hugging Face decoder's config"
    if config.get("is_encoder_decoder"):
        return f"{name}: an encoder-decoder model, allowed: decoders"
    if any(key in config for key in _VISION) or isinstance(text, Mapping):
        return f"{name}: a model of several kinds of input, allowed: text decoders (its text part saved alone)"
    if kind.startswith(_STATES) or any(key in config for key in ("ssm_state_size", "mamba_d_state", "conv_L_cache")):
        return f"{name}: layers with a recurrent state, allowed: attention layers that cache K and V"
    if config.get("kv_lora_rank"):
        return f"{name}: latent attention (kv_lora_rank), allowed: attention that caches K and V per head"
    if config.get("is_moe") is not False and any((config.get(k) or 0) > 1 for k in _EXPERTS):
        return f"{name}: mixture of experts, allowed: dense decoders (an NPU graph cannot choose experts)"
    if kind == "opt" and config.get("word_embed_proj_dim", config.get("hidden_size")) != config.get("hidden_size"):
        return f"{name}: embeddings of {config['word_embed_proj_dim']} channels projected inside, allowed: hidden_size"
    if (config.get("num_kv_shared_layers") or 0) > 0:
        return f"{name}: layers that share K and V, allowed: layers with a cache of their own"
    return None


def attention(config: Mapping[str, Any]) -> str:
    """transformers' attention that computes the model. FalconAttention's eager one adds its distance bias twice."""
    return "sdpa" if config.get("model_type") == "falcon" and config.get("alibi") else "eager"
