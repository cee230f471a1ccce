"""Tiny random models of every decoder family: configs, checkpoint folders, reference traces. Not a test itself.

Weights are scaled so that what a wrong export would leave out is seen: scores of some units (a soft cap, a window, a
mask matter), norm weights and biases away from one and zero.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from kvgate.checkpoint import reference, refusals
from kvgate.jobs import record
from kvgate.observe import Trace


@dataclass(frozen=True)
class Size:
    """Sizes of a random model; window: what sliding layers see, below the context so that it matters."""

    head: int  # D
    heads: int  # Hq
    kv_heads: int  # Hk of grouped models
    vocabulary: int
    context: int
    window: int


TINY = Size(head=16, heads=6, kv_heads=2, vocabulary=97, context=32, window=5)
TOOLKIT = Size(head=64, heads=6, kv_heads=2, vocabulary=512, context=128, window=32)  # those of the measured tables
SIZES = {"tiny": TINY, "toolkit": TOOLKIT}


@dataclass(frozen=True)
class Family:
    """One architecture. `config` overrides and adds to the common keys; `g` query heads share a KV head."""

    name: str
    model_type: str
    g: int = 3
    kv_heads: int | None = None  # None: what follows from g
    sliding: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # common keys that its config class does not take


# Those that every test of the export runs on.
FAMILIES = {
    f.name: f
    for f in (
        Family("llama", "llama"),
        Family("llama_g1", "llama", g=1),
        Family("llama_g8", "llama", g=8, kv_heads=1),
        Family("mistral", "mistral", sliding=True),
        Family("qwen2", "qwen2"),
        Family("qwen3", "qwen3"),
        Family("smollm3", "smollm3", config={"no_rope_layer_interval": 2}),
        Family("gpt2", "gpt2", g=1),
        Family("opt", "opt", g=1),
        Family("phi", "phi", g=1, config={"partial_rotary_factor": 0.5}),
        Family("phi3", "phi3", sliding=True),
        Family("gemma2", "gemma2", sliding=True),
        Family("gemma3_text", "gemma3_text", g=4, kv_heads=1, sliding=True),
        Family("granite", "granite"),
        Family("olmo2", "olmo2"),
        Family("cohere", "cohere"),
        Family("gpt_neox", "gpt_neox", g=1),
        Family("falcon", "falcon", without=("head_dim", "num_key_value_heads")),
        Family("starcoder2", "starcoder2", sliding=True),
        Family("glm4", "glm4"),
        Family("exaone4", "exaone4", sliding=True),
        Family("bloom", "bloom", g=1),
        Family("mpt", "mpt", g=1),
        Family("falcon_alibi", "falcon", g=1, without=("head_dim", "num_key_value_heads")),
        Family("xglm", "xglm", g=1),
        Family("gpt_neo", "gpt_neo", g=1),
        Family("ctrl", "ctrl", g=1),
        Family("apertus", "apertus"),
        Family("hunyuan_v1_dense", "hunyuan_v1_dense"),
    )
}
# Those whose first layers keep replaced states, and whose last one K and V: tests/prepare/test_replaced.py.
REPLACED = {f.name: f for f in (Family("lfm2", "lfm2", without=("head_dim",)), Family("qwen3_5_text", "qwen3_5_text"))}
_MIXED = ("gemma2", "gemma3_text", "exaone4", "cohere2", "olmo3", "cwm", "vaultgemma", "gemma4_text", "granite_swa")


# Encoders that are decoders by an option.
_ENCODERS = ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert")
_ENCODERS += ("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta")
_ENCODERS += ("xlm-roberta-xl", "xmod")


def named(name: str) -> Family:
    """One of FAMILIES, else a model type with the common keys (tests/census.py).

    A window only where the family has one: transformers' cache cuts to it, also where the model's masks do not.
    """
    if name in FAMILIES | REPLACED:
        return (FAMILIES | REPLACED)[name]
    known = transformers.CONFIG_MAPPING[name].__dataclass_fields__
    return Family(
        name, name, sliding="sliding_window" in known, config={"is_decoder": True} if name in _ENCODERS else {}
    )


def config(family: str, size: Size = TINY, layers: int = 2) -> transformers.PretrainedConfig:
    """The random model's config; float32, no dropout, sliding and full layers in turn where the family has both."""
    f = named(family)
    kv_heads = f.kv_heads or size.heads // f.g
    heads = f.g * kv_heads
    head = size.head * 4 if f.model_type == "gemma3_text" and size is TOOLKIT else size.head
    hidden = heads * head if f.model_type != "gemma3_text" else size.heads * size.head
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": 2 * hidden,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.context,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if f.sliding:
        common["sliding_window"] = size.window
    if f.model_type in _MIXED:
        common["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    common |= _special(f.name, size, head, hidden, heads, layers) | f.config
    common = {k: v for k, v in common.items() if k not in f.without}
    made = transformers.AutoConfig.for_model(f.model_type, **common)
    made.dtype = "float32"
    return made


def _special(kind: str, size: Size, head: int, hidden: int, heads: int, layers: int) -> dict[str, Any]:
    """Keys that only this family knows, or knows by another name."""
    off = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return {
        "gpt2": {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": size.context}
        | {"n_inner": 4 * hidden, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "opt": {"ffn_dim": 2 * hidden, "word_embed_proj_dim": hidden, "dropout": 0.0},
        "gemma2": {"query_pre_attn_scalar": head, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "gemma3_text": {"query_pre_attn_scalar": 2 * head},
        "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}
        | {"logits_scaling": 2.0},
        "cohere": {"logit_scale": 0.25},
        "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "ffn_hidden_size": 4 * hidden},
        "falcon_alibi": {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "bias": True}
        | {"alibi": True},
        "mpt": {"max_seq_len": size.context},
        "gptj": {"rotary_dim": head // 2},
        "codegen": {"rotary_dim": head // 2},
        "gemma4_text": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": size.vocabulary},
        "gemma4_unified_text": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": size.vocabulary},
        "xglm": {"ffn_dim": 2 * hidden},
        "gpt_neo": {"attention_types": [[["global", "local"], layers // 2]], "window_size": size.window},
        "ctrl": {"n_positions": size.context, "dff": 2 * hidden, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0, "use_bias": True},
        "bloom": {"n_layer": layers, "n_head": heads} | off,
        "gpt_neox": off,
        "lfm2": {"layer_types": ["conv"] * (layers - 1) + ["full_attention"], "block_auto_adjust_ff_dim": False},
        "qwen3_5_text": {"layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": head}
        | {"linear_value_head_dim": 2 * head},
    }.get(kind, {})


def model(family: str, size: Size = TINY, layers: int = 2, seed: int = 0) -> transformers.PreTrainedModel:
    """The random model in float32, attention as the reference has it, eval."""
    torch.manual_seed(seed)
    chosen = config(family, size, layers)
    attention = refusals.attention(chosen.to_dict())
    made = transformers.AutoModelForCausalLM.from_config(chosen, attn_implementation=attention)
    made = made.float().eval()
    generator = torch.Generator().manual_seed(seed)
    tables = {id(m.weight) for m in made.modules() if isinstance(m, torch.nn.Embedding)}
    conv1d = {id(m.weight) for m in made.modules() if type(m).__name__ == "Conv1D"}
    with torch.no_grad():
        for p in made.parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim < 2:
                p.add_(0.2 * noise)
            elif id(p) in tables:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise * p.shape[0 if id(p) in conv1d else 1] ** -0.5)
    return made


def checkpoint(folder: Path, family: str, size: Size = TINY, layers: int = 2, seed: int = 0) -> Path:
    """Save the random model as a checkpoint folder; returns its manifest.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model(family, size, layers, seed).save_pretrained(folder)
    files = {p.name: record.sha256(p) for p in sorted(folder.iterdir()) if p.name != "manifest.json"}
    manifest = {"status": "ok", "source": {"kind": "random"}, "files": files, "licence": "none", "revision": ""}
    record.write(folder / "manifest.json", manifest)
    return folder / "manifest.json"


def trace(folder: Path, tokens: np.ndarray) -> Trace:
    """The reference of a text `tokens` [T]: the untouched model over the whole sequence, its own masks and angles."""
    return reference.trace(reference.load(folder), tokens.tolist())


def generation(folder: Path, prompt: list[int], new: int) -> Trace:
    """The reference of a greedy generation of `new` tokens; nothing ends it."""
    return reference.trace(reference.load(folder), prompt, new)


def random_tokens(count: int, size: Size = TINY, seed: int = 1) -> np.ndarray:
    """[count] ids without the special ones."""
    return np.random.default_rng(seed).integers(3, size.vocabulary, count)
