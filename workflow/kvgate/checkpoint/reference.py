"""The reference: whole-prefix recomputation with transformers alone, without any of our cache code.

In float64, rounded once to float32: every PC gives the same.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvgate.checkpoint import mapped, precise, refusals
from kvgate.contract import CONVOLUTION, KEY, RECURRENT, VALUE
from kvgate.observe import Trace, spread
from kvgate.serving import today

# Settings of generation_config.json that change greedy tokens, and their values that do not. Sampling is another thing.
OTHERWISE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens", "penalty_alpha"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("sequence_bias", "constraints", "stop_strings"), ([], {})),
    **dict.fromkeys(("token_healing", "dola_layers", "watermarking_config"), (False,)),
}
TEMPERATURE, TOP_K = 1.0, 50  # of drawn tokens: the model's own distribution, without its tail
_EVERY = 64  # tokens of a text after each of which replaced states are known; of a longer one they are after some
_POSITIONS = 16  # of a longer one, each with the position before it: such a step can be fed and compared


def load(folder: Path) -> Any:
    """A checkpoint folder's model: float64 throughout, attention written out, nothing from the network.

    Its matrices stay in their files (kvgate.checkpoint.mapped).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    attention = refusals.attention(config.to_dict())
    with precise.float64(), mapped.loading():  # its angles' frequencies are worked out here
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), config=config, dtype=torch.float64, attn_implementation=attention, local_files_only=True
        ).eval()
    precise.settle(model)
    model.forward = precise.widened(model.forward)
    return model


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def template(tokenizer: Any) -> str | None:
    """The chat template; None where there is none. Raises ValueError where there are only named ones."""
    given = tokenizer.chat_template
    if isinstance(given, dict) and "default" not in given:
        raise ValueError(f"chat template: got only named ones ({', '.join(sorted(given))}), allowed: one, or `default`")
    return str(tokenizer.get_chat_template()) if given else None


def chat(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> Any:
    """transformers' own apply_chat_template, on the day of kvgate.serving.today. Raises whatever the template does."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # kept, so this is what is rendered

    compiled: Any = _compile_jinja_template(template(tokenizer))
    compiled.globals["strftime_now"] = today.strftime_now  # a variable of this name could be no function
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)


def context_limit(config: Any) -> int | None:
    """The most tokens that the model was made for; None where positions are unbounded (alibi)."""
    text = config.get_text_config()
    found = (getattr(text, "max_position_embeddings", None), refusals.limit(text.to_dict()))
    return min((int(x) for x in found if x), default=None)


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a text: the generation config's and the tokenizer's."""
    given = model.generation_config.eos_token_id
    found = {int(x) for x in (given if isinstance(given, list) else [given]) if x is not None}
    return tuple(sorted(found | ({tokenizer.eos_token_id} - {None})))


def unheeded(model: Any) -> dict[str, Any]:
    """What the checkpoint's generation config has that gives `generate` other tokens than the best one each step."""
    given = model.generation_config
    found = {name: getattr(given, name, None) for name in OTHERWISE}
    return {name: x for name, x in found.items() if x is not None and x not in OTHERWISE[name]}


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
    tokens gives the K/V and the logits, and one over each kept position's prefix the states that are replaced (none of
    a calibration text, without logits). Raises ValueError where a layer caches neither K and V nor a known state.
    """
    ids = [int(x) for x in prompt]
    ended = False
    while len(ids) < len(prompt) + new and not ended:
        with torch.inference_mode():
            scores = model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
            ids.append(int(precise.rounded(scores[0, -1]).argmax()))
        ended = ids[-1] in ends
        progress(f"token {len(ids) - len(prompt)}/{new}")
    scores, states = whole(model, ids, logits)
    made = Trace(np.array(ids, np.int64), len(prompt), ended, tuple(ends), states, scores)
    if not (logits and refusals.REPLACED.get(model.config.get_text_config().model_type)):
        return made
    at = kept_positions(len(ids))
    rows = []
    for n, position in enumerate(at):
        rows.append(replaced(model, ids[: position + 1]))
        progress(f"states {n + 1}/{len(at)}")
    return replace(made, replaced={x: np.stack([row[x] for row in rows]) for x in rows[0]}, at=np.array(at, np.int64))


def kept_positions(tokens: int) -> list[int]:
    """Those of a text after which its trace has the replaced states."""
    chosen = spread(tokens if tokens <= _EVERY else _POSITIONS, tokens)
    return sorted({p for each in chosen for p in (each - 1, each) if p >= 0})


def replaced(model: Any, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """The states that a next step would replace after `ids`, by name: from one pass over all of them, nothing cached.

    Of a convolution the inputs that the next step reads: one less than its kernel.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    states: dict[str, np.ndarray] = {}
    with torch.inference_mode():
        model(torch.tensor([list(ids)]), cache=cache, use_cache=True, logits_to_keep=1)
        for i, layer in enumerate(cache.layers):
            if not cache.is_linear[i]:
                continue
            if layer.number_of_states != 1:
                raise ValueError(f"layer {i}: got {layer.number_of_states} states of a kind, allowed: 1")
            for kind, found in ((CONVOLUTION, layer.conv_states[0]), (RECURRENT, layer.recurrent_states[0])):
                if found is not None:
                    own = found[..., 1:] if kind == CONVOLUTION else found
                    states[f"layers.{i}.{kind}"] = precise.single(precise.rounded(own.clone()))
    return states


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


def whole(model: Any, ids: Sequence[int], logits: bool = True) -> tuple[Any, dict[str, np.ndarray]]:
    """One forward pass over `ids`: logits [T, V] (None if not wanted), every layer's K and V [T, Hk, D] as cached, by
    the states' names.

    The cache object only collects here: it starts empty and nothing is read from it. Without a config it does not
    cut sliding layers to their window; layers that keep other states need one.
    """
    from transformers import DynamicCache

    refuse_other_caches(model.config)
    text = model.config.get_text_config()
    cache = DynamicCache(config=model.config) if text.model_type in refusals.REPLACED else DynamicCache()
    states: dict[str, np.ndarray] = {}
    with torch.inference_mode():
        keep = 0 if logits else 1  # 0: all
        scores = model(torch.tensor([list(ids)]), cache=cache, use_cache=True, logits_to_keep=keep).logits
        for i, layer in enumerate(cache.layers):
            if cache.is_linear[i]:
                continue
            key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
            if key is None or value is None or key.dim() != 4 or key.shape[2] != len(ids):
                raise ValueError(f"layer {i}: got no K and V of every token, allowed: attention layers")
            for kind, found in ((KEY, key), (VALUE, value)):
                heads = distinct_heads(found, model.config)[0].transpose(0, 1)
                states[f"layers.{i}.{kind}"] = precise.single(precise.rounded(heads.contiguous()))
        if not states:
            raise ValueError(f"{model.config.model_type}: got no cached layer, allowed: attention layers")
        return (precise.single(precise.rounded(scores[0])) if logits else None), states


def refuse_other_caches(config: Any) -> None:
    """Raises ValueError where a layer keeps something else than K and V of every token, or a state that is known."""
    text = config.get_text_config()
    if not getattr(text, "num_attention_heads", None):
        raise ValueError(f"{text.model_type}: got no attention heads, allowed: attention in every layer")
    known = refusals.layers(text.model_type)
    for i, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in known:
            raise ValueError(f"{text.model_type}: layer {i}: got {kind!r}, allowed: {', '.join(known)}")


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
