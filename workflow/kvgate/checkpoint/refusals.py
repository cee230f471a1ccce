"""What a config.json alone tells: which architectures cannot work, and how the others are asked to compute.

Standard library only: planning calls it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")  # transformers' names of layer types
_LAYERS = ("layer_types", "layers_block_type")  # the key, and an older name
# Model types whose layers keep a state that is not K and V of every token, and the layers' types.
REPLACED = {"lfm2": ("conv",), "qwen3_5_text": ("linear_attention",)}
# Others, whose states nothing here keeps.
_HYBRIDS = ("jamba", "bamba", "zamba", "falcon_h1", "nemotron_h", "qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid")
_STATES = ("mamba", "falcon_mamba", "rwkv", "lfm2", "recurrent", "xlstm", *_HYBRIDS)
_CHOOSING = ("granitemoehybrid",)  # where the list of layers does not say otherwise
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PARTS = ("vision_config", "audio_config", "vision_tower", "encoder_config", "decoder_config")
_POSITIONS = ("max_position_embeddings", "n_positions")
_ORIGINAL = "original_max_position_embeddings"
_NUMBERS = (*_EXPERTS, *_POSITIONS, _ORIGINAL, "num_kv_shared_layers")


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be exported, in one line; None: nothing in the config forbids it."""
    kind = str(config.get("model_type", ""))
    text = config.get("text_config")
    name = f"model type {kind!r}"
    if not kind:
        return "config.json: got no model_type, allowed: a Hugging Face decoder's config"
    wrong = next((key for key in _NUMBERS if not isinstance(config.get(key), int | float | None)), None)
    if wrong:
        return f"config.json: {wrong}: got {config[wrong]!r}, allowed: a number"
    if config.get("is_encoder_decoder"):
        return f"{name}: an encoder-decoder model, allowed: decoders"
    if any(key in config for key in _PARTS) or isinstance(text, Mapping):
        return f"{name}: a model of several kinds of input, allowed: text decoders (its text part saved alone)"
    if _recurrent(kind, config):
        known = " and ".join(REPLACED)
        return f"{name}: layers with a recurrent state, allowed: attention layers that cache K and V, those of {known}"
    if config.get("kv_lora_rank"):
        return f"{name}: latent attention (kv_lora_rank), allowed: attention that caches K and V per head"
    if config.get("is_moe") is not False and any((config.get(k) or 0) > 1 for k in _EXPERTS):
        return f"{name}: mixture of experts, allowed: dense decoders (an NPU graph cannot choose experts)"
    known_layers = layers(kind)
    other = next((x for x in _layers(config) if x not in known_layers), None)
    if other:
        return f"{name}: layers of type {other!r}, allowed: {', '.join(known_layers)}"
    if kind == "opt" and config.get("word_embed_proj_dim", config.get("hidden_size")) != config.get("hidden_size"):
        return f"{name}: embeddings of {config['word_embed_proj_dim']} channels projected inside, allowed: hidden_size"
    if (config.get("num_kv_shared_layers") or 0) > 0:
        return f"{name}: layers that share K and V, allowed: layers with a cache of their own"
    return None


def layers(kind: str) -> tuple[str, ...]:
    """The types of layers that are known of a model type."""
    return (*ATTENTION, *REPLACED.get(kind, ()))


def attention(config: Mapping[str, Any]) -> str:
    """transformers' attention that computes the model. FalconAttention's eager one adds its distance bias twice."""
    return "sdpa" if config.get("model_type") == "falcon" and config.get("alibi") else "eager"


def limit(config: Mapping[str, Any]) -> int | None:
    """The most tokens that a model with this config.json takes; None where it does not say."""
    found = [int(config[key]) for key in _POSITIONS if config.get(key)]
    return min([*found, *_originals(config)], default=None)


def changes(config: Mapping[str, Any]) -> bool:
    """Whether it takes no more because its rotary embedding turns all positions otherwise in a longer text (longrope).

    What a cache holds was turned as in a short one: no strategy can change it when the text grows. Dynamic NTK does the
    same beyond the positions that the model has anyway.
    """
    return any(original == limit(config) for original in _originals(config))


def _originals(config: Mapping[str, Any]) -> Iterator[int]:
    """The lengths beyond which a rotary embedding takes its `long_factor`; one a kind of layer where they differ."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for rotary in (given, *given.values()) if isinstance(given, Mapping) else ():
        if isinstance(rotary, Mapping) and rotary.get("long_factor"):
            original = config.get(_ORIGINAL) or rotary.get(_ORIGINAL)
            if original:
                yield int(original)


def _recurrent(kind: str, config: Mapping[str, Any]) -> bool:
    layers = _layers(config)
    if kind in REPLACED:
        return False
    if layers and kind in _CHOOSING:
        return not set(layers) <= set(ATTENTION)
    state = any(key in config for key in ("ssm_state_size", "mamba_d_state", "conv_L_cache"))
    return state or "linear_attention" in layers or kind.startswith((*_STATES, *_CHOOSING))


def _layers(config: Mapping[str, Any]) -> list[str]:
    """The layers' types, older names as transformers reads them; empty where the config does not say."""
    older = {"attention": "full_attention", "mamba": "linear_attention"}
    given: list[Any] = next((config[key] for key in _LAYERS if isinstance(config.get(key), list)), [])
    return [older.get(str(x), str(x)) for x in given]
