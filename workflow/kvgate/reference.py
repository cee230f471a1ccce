"""The reference: whole-prefix recomputation in float32 with transformers alone, without any of our cache code."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvgate.export import support
from kvgate.observe import Trace

TEMPERATURE, TOP_K = 1.0, 50  # of drawn tokens: the model's own distribution, without its tail
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")  # transformers' names of layer types


def load(folder: Path) -> Any:
    """A checkpoint folder's model: float32, attention written out, nothing from the network."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    attention = support.attention(config.to_dict())
    return AutoModelForCausalLM.from_pretrained(
        str(folder), config=config, dtype=torch.float32, attn_implementation=attention, local_files_only=True
    ).eval()


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def context_limit(config: Any) -> int | None:
    """The most tokens that the model was made for; None where positions are unbounded (alibi)."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a text: the generation config's and the tokenizer's."""
    given = model.generation_config.eos_token_id
    found = {int(x) for x in (given if isinstance(given, list) else [given]) if x is not None}
    return tuple(sorted(found | ({tokenizer.eos_token_id} - {None})))


def trace(
    model: Any,
    prompt: Sequence[int],
    new: int = 0,
    ends: Sequence[int] = (),
    logits: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Trace:
    """The trace of `prompt` (ids), after up to `new` greedy tokens; a token in `ends` is kept and ends it.

    Every generated token comes from a forward pass over its whole prefix with the cache off; one more pass over all
    tokens gives the K/V and the logits. Raises ValueError where a layer caches no K and V.
    """
    ids = [int(x) for x in prompt]
    ended = False
    while len(ids) < len(prompt) + new and not ended:
        with torch.inference_mode():
            scores = model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
        ids.append(int(scores[0, -1].argmax()))
        ended = ids[-1] in ends
        progress(f"token {len(ids) - len(prompt)}/{new}")
    scores, keys, values = whole(model, ids, logits)
    return Trace(np.array(ids, np.int64), len(prompt), ended, tuple(ends), keys, values, scores)


def seed(prompt: Sequence[int]) -> int:
    """What tokens after `prompt` are drawn with: the same ids give the same tokens in every process."""
    return int.from_bytes(hashlib.sha256(np.array(prompt, np.int64).tobytes()).digest()[:4])


def draw(model: Any, prompt: Sequence[int], count: int, ends: Sequence[int] = ()) -> list[int]:
    """`count` ids that the model draws after `prompt`, by transformers' own sampling over its cache; none of `ends`.

    Data, not a reference: what they give is worked out as for any other ids. Nothing of the checkpoint's generation
    config counts. Raises FloatingPointError where the model gives no distribution (NaN, infinity).
    """
    from transformers import GenerationConfig

    refuse_other_caches(model.config)
    ids = torch.tensor([list(prompt)])
    wanted = GenerationConfig(
        max_new_tokens=count,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        suppress_tokens=list(ends) or None,  # so that the length is exact
    )
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            torch.manual_seed(seed(prompt))
            found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=wanted)
    except RuntimeError as error:
        if "probability tensor" not in str(error):  # torch.multinomial's words
            raise
        raise FloatingPointError("drawn tokens: got NaN or infinite logits, allowed: finite ones") from None
    finally:
        model.generation_config = kept
    return [int(x) for x in found[0, len(prompt) :]]


def whole(model: Any, ids: Sequence[int], logits: bool = True) -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """One forward pass over `ids`: logits [T, V] (None if not wanted), every layer's K and V [T, Hk, D] as cached.

    The cache object only collects here: it starts empty and nothing is read from it. Without a config it does not
    cut sliding layers to their window.
    """
    from transformers import DynamicCache

    refuse_other_caches(model.config)
    cache = DynamicCache()
    with torch.inference_mode():
        keep = 0 if logits else 1  # 0: all
        scores = model(torch.tensor([list(ids)]), cache=cache, use_cache=True, logits_to_keep=keep).logits
    keys, values = [], []
    for i, layer in enumerate(cache.layers):
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
        if key is None or value is None or key.dim() != 4 or key.shape[2] != len(ids):
            raise ValueError(f"layer {i}: got no K and V of every token, allowed: attention layers")
        keys.append(distinct_heads(key, model.config)[0].transpose(0, 1).numpy().copy())
        values.append(distinct_heads(value, model.config)[0].transpose(0, 1).numpy().copy())
    if not keys:
        raise ValueError(f"{model.config.model_type}: got no cached layer, allowed: attention layers")
    return (scores[0].float().numpy().copy() if logits else None), keys, values


def refuse_other_caches(config: Any) -> None:
    """Raises ValueError where a layer keeps something else than K and V of every token (a state, a convolution)."""
    text = config.get_text_config()
    if not getattr(text, "num_attention_heads", None):
        raise ValueError(f"{text.model_type}: got no attention heads, allowed: attention in every layer")
    for i, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in ATTENTION:
            raise ValueError(f"{text.model_type}: layer {i}: got {kind!r}, allowed: {', '.join(ATTENTION)}")


def distinct_heads(cached: torch.Tensor, config: Any) -> torch.Tensor:
    """[B, H, T, D] -> [B, Hk, T, D]: falcon caches its KV heads repeated; one of each is enough.

    Unchanged where the heads are not plain repeats.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_kv_heads", None) or getattr(text, "num_key_value_heads", None)
    if not heads or cached.shape[1] == heads or cached.shape[1] % heads:
        return cached
    group = cached.shape[1] // heads
    chosen = cached[:, ::group]
    return chosen if torch.equal(chosen.repeat_interleave(group, dim=1), cached) else cached


def perplexity(tokens: np.ndarray, logits: np.ndarray) -> float:
    """exp of the mean negative log likelihood of tokens 1..T-1 given those before; tokens [T], logits [T, V]."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chosen = rows[np.arange(len(rows)), tokens[1:]] - np.log(np.exp(rows).sum(axis=1))
    return float(np.exp(-chosen.mean()))
