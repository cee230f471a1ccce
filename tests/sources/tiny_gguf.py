"""Write a tiny llama or gemma 3 as a GGUF file: an own small writer on top of the gguf package. Not a test itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from kvgate.sources.random import END, START, TEMPLATE, UNKNOWN

BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA = BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The file format's order of rotary channels: pairs side by side instead of halves. [heads * D, ...]"""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path, model: Any, architecture: str = "llama", edit: Callable[[Any], Any] = id, without: str = "nothing"
) -> None:
    """A model (transformers' llama or gemma3_text, float32) with a byte-level tokenizer; Q8_0 for the FFN matrices.

    `edit` gets the writer, to add to the file; tensors and keys that have `without` in their name are left out.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_license("mit")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gemma3":
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _tokenizer(writer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        _tensor(writer, name, tensor.float().numpy(), config)
    edit(writer)
    for entries in (*writer.kv_data, *writer.tensors):
        for name in [x for x in entries if without in x]:
            del entries[name]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensor(writer: Any, name: str, weight: np.ndarray, config: Any) -> None:
    bare, kind_of = name.rsplit(".", 1)
    gemma = config.model_type == "gemma3_text"
    if gemma and bare == "lm_head":  # tied
        return
    if gemma and bare.endswith("norm"):
        weight = weight + np.float32(1)
    if bare in TOP:
        writer.add_tensor(f"{TOP[bare]}.weight", weight)
        return
    _, _, layer, part = bare.split(".", 3)
    if part == "self_attn.q_proj" and not gemma:
        weight = interleaved(weight, config.num_attention_heads)
    if part == "self_attn.k_proj" and not gemma:
        weight = interleaved(weight, config.num_key_value_heads)
    target = f"blk.{layer}.{(GEMMA if gemma else BLOCK)[part]}.{kind_of}"
    if part.startswith("mlp.") and kind_of == "weight":
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(target, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    else:
        writer.add_tensor(target, weight)


def _tokenizer(writer: Any, size: int) -> None:
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [START, END, UNKNOWN]
    filler = ["ab"] + [f"<filler{i}>" for i in range(size - len(tokens) - len(special) - 1)]  # `ab`: the one merge
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens + special + filler)
    writer.add_token_types([1] * len(tokens) + [3] * (len(special) + len(filler)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    writer.add_unk_token_id(len(tokens) + 2)
    writer.add_chat_template(TEMPLATE)
