"""A GGUF file read with the gguf package alone: what it holds, and a config that says so too.

transformers' loader takes the keys that it knows and drops the others without a word. Here every key of the model is
put into the config, known to change nothing, or refused by name.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvgate.checkpoint import stored
from kvgate.checkpoint.stored import Content
from kvgate.jobs.record import blocked

FREQUENCIES = "rope_freqs.weight"
# A key after the architecture's name to the keys of transformers' configs that say the same.
_MEANINGS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
}
_REQUIRED = ("block_count", "embedding_length", "attention.head_count")  # else it is a default model's
# Keys that change nothing where they have this value; None: whatever it is.
_NOTHING: dict[str, tuple[Any, ...] | None] = {
    "tensor_data_layout": None,
    "rope.scaling.finetuned": None,
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "pooling_type": (0,),
    "nextn_predict_layers": (0,),
}
_SCALING = "rope.scaling."
_LINEAR = "rope.scale_linear"  # an older name of a linear scaling's factor
_YARN = {"original_context_length": "original_max_position_embeddings"} | {
    f"yarn_{x}": x for x in ("beta_fast", "beta_slow")
}
_CENTRED = ("gemma2", "gemma3", "nemotron")  # norms are stored as weight + 1
_ENDS = ("eos", "eot", "eom")


class File:
    """One opened file; `name` opens the error lines."""

    def __init__(self, reader: Any, name: str) -> None:
        self.reader, self.name = reader, name
        self.tensors = {x.name: x for x in reader.tensors}
        self.architecture = str(self.value("general.architecture"))
        self.prefix = f"{self.architecture}."

    def value(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def refuse(self, text: str, kind: str = "weights") -> Exception:
        return blocked(kind, f"{self.name}: {text}")

    def own(self) -> dict[str, Any]:
        """The architecture's keys, without its name."""
        return {x.removeprefix(self.prefix): self.value(x) for x in self.reader.fields if x.startswith(self.prefix)}

    def check(self) -> None:
        """Raises Blocked where the file is not one whole model."""
        if "general.architecture" not in self.reader.fields:
            raise self.refuse("lacks the key general.architecture", "architecture")
        kind = self.value("general.type", "model")
        if kind == "adapter":
            raise self.refuse("an adapter: merge it first", "adapter")
        if kind != "model":
            raise self.refuse(f"general.type: got {kind!r}, allowed: 'model'")
        parts = int(self.value("split.count", 1))
        if parts > 1:
            part = int(self.value("split.no", 0)) + 1
            raise self.refuse(f"split GGUF, part {part} of {parts}, allowed: one file (llama-gguf-split --merge)")
        end = max((int(x.data_offset + x.n_bytes) for x in self.reader.tensors), default=0)
        over = self.reader.data.size - math.ceil(end / self.reader.alignment) * self.reader.alignment
        if over > 0:
            raise self.refuse(f"got {over} bytes after the last tensor, allowed: one GGUF file", "corrupt")
        for key in (self.prefix + x for x in _REQUIRED):
            if key not in self.reader.fields:
                raise self.refuse(f"lacks the key {key}")
            if not isinstance(self.value(key), int):
                raise self.refuse(f"key {key}: got {self.value(key)!r}, allowed: one number for all blocks")
        self._blocks(int(self.value(f"{self.prefix}block_count")))

    def _blocks(self, count: int) -> None:
        found = {int(x.split(".")[1]) for x in self.tensors if x.startswith("blk.")}
        for n in sorted(set(range(count)) - found):
            raise self.refuse(f"got no tensor of blk.{n}, allowed: {count} blocks, as block_count says")
        for n in sorted(found - set(range(count))):
            raise self.refuse(f"got tensors of blk.{n}, allowed: {count} blocks, as block_count says")

    def contents(self) -> dict[str, Content]:
        """The weights as the model has them, but for the order of their values. rope_freqs are the config's."""
        return {x: stored.of_array(self.weight(x)) for x in self.tensors if x != FREQUENCIES}

    def weight(self, name: str) -> np.ndarray:
        """float32, dequantized."""
        import gguf

        tensor = self.tensors[name]
        found = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        return found - np.float32(1) if self.architecture in _CENTRED and name.endswith("norm.weight") else found

    def end_ids(self) -> list[int]:
        found = {self.value(f"tokenizer.ggml.{x}_token_id") for x in _ENDS}
        return sorted(int(x) for x in found if x is not None)

    def left_out(self, read: set[str]) -> dict[str, str]:
        """Keys that nothing reads, to why; `read` are those of `tokenizer.` that the loader reads."""
        known = (self.prefix, "general.", "tokenizer.", "GGUF.", "split.")
        read = read | {f"tokenizer.ggml.{x}_token_id" for x in _ENDS}
        out = {}
        for key in self.reader.fields:
            if not key.startswith(known):
                out[key] = "no key of the model"
            elif key.startswith("general.sampling."):
                out[key] = "advice for sampling"
            elif key.startswith("tokenizer.") and key not in read:
                out[key] = "the loader's tokenizers do not read it"
        return out


def configure(config: Any, file: File) -> None:
    """Put what the file says into transformers' config. Raises Blocked with the key or tensor that has no place."""
    own = file.own()
    own.setdefault("attention.head_count_kv", own["attention.head_count"])  # llama.cpp's defaults
    own.setdefault("attention.key_length", own["embedding_length"] // own["attention.head_count"])
    scaling = {x: own.pop(x) for x in list(own) if x.startswith(_SCALING) or x == _LINEAR}
    positions = {x: own.pop(x) for x in list(own) if x.startswith("rope.")}
    window = {x: own.pop(x) for x in list(own) if x.startswith("attention.sliding_window")}
    for key, value in own.items():
        if not _nothing(key, value) and not _set(config, key, value):
            raise file.refuse(f"key {file.prefix}{key}: got {value!r}, which {config.model_type} has no place for")
    _window(config, file, window)
    rotary = _rotary(config)
    if rotary is not None:
        _bases(config, file, rotary, positions)
        _scale(file, rotary, scaling)
        _frequencies(file, rotary)
    elif positions or scaling or FREQUENCIES in file.tensors:
        raise file.refuse(f"rotary positions, which {config.model_type} has no place for")
    for key, parts in (
        ("attention_bias", ("attn_q", "attn_k", "attn_v", "attn_output")),
        ("mlp_bias", ("ffn_gate", "ffn_up", "ffn_down")),
    ):
        if _declared(config, key) and all(f"blk.0.{x}.bias" in file.tensors for x in parts):
            setattr(config, key, True)


def _nothing(key: str, value: Any) -> bool:
    return key in _NOTHING and (_NOTHING[key] is None or value in (_NOTHING[key] or ()))


def _declared(config: Any, name: str) -> bool:
    """Whether the config's class knows the key; it takes any other too, and no model reads that."""
    fields = {x.name for x in dataclasses.fields(config)}
    return name in fields or config.attribute_map.get(name) in fields


def _set(config: Any, key: str, value: Any) -> bool:
    """Whether the config says the same now."""
    if isinstance(value, list):
        return False
    names = [x for x in _MEANINGS.get(key, ()) if _declared(config, x)]
    if names:
        setattr(config, names[0], value)
        return True
    derived = {  # of configs without the key
        "context_length": value,  # positions without an end
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": _head(config),
        "attention.value_length": _head(config),
    }
    return key in derived and value == derived[key]


def _head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotary(config: Any) -> dict[str, Any] | None:
    """The config's rotary parameters: of its full attention, where it has several."""
    found = getattr(config, "rope_parameters", None)
    return found.get("full_attention", found) if isinstance(found, dict) else None


def _window(config: Any, file: File, keys: dict[str, Any]) -> None:
    key = "attention.sliding_window"
    size = keys.pop(key, 0)
    kinds = getattr(config, "layer_types", None)
    if not size and kinds and "sliding_attention" in kinds:
        raise file.refuse(f"lacks the key {file.prefix}{key}, which {config.model_type} needs")
    if _declared(config, "sliding_window") and (not kinds or "sliding_attention" in kinds):
        config.sliding_window = size or None
    elif 0 < size < config.max_position_embeddings:
        raise file.refuse(f"key {file.prefix}{key}: got {size}, which {config.model_type} has no place for")
    for key, value in keys.items():  # its pattern: every so many layers, or a list
        n = len(kinds or ())
        sliding = value if isinstance(value, list) else [bool((i + 1) % value) if value else True for i in range(n)]
        if [x == "sliding_attention" for x in kinds or ()] != [bool(x) for x in sliding[:n]]:
            raise file.refuse(f"key {file.prefix}{key}: got {value!r}, allowed: that of {config.model_type}")


def _bases(config: Any, file: File, rotary: dict[str, Any], keys: dict[str, Any]) -> None:
    rotary["rope_theta"] = float(keys.pop("rope.freq_base", 10000.0))  # llama.cpp's default
    local = keys.pop("rope.freq_base_swa", None)
    if local is not None and "sliding_attention" in config.rope_parameters:
        config.rope_parameters["sliding_attention"]["rope_theta"] = float(local)
    width = keys.pop("rope.dimension_count", None)
    if width is not None and width != _head(config):
        if "partial_rotary_factor" not in rotary and not _declared(config, "partial_rotary_factor"):
            raise file.refuse(f"key {file.prefix}rope.dimension_count: got {width}, allowed: {_head(config)}")
        rotary["partial_rotary_factor"] = width / _head(config)
    for key, value in keys.items():
        raise file.refuse(f"key {file.prefix}{key}: got {value!r}, which {config.model_type} has no place for")


def _scale(file: File, rotary: dict[str, Any], keys: dict[str, Any]) -> None:
    keys.pop(f"{_SCALING}finetuned", None)
    linear = keys.pop(_LINEAR, None)
    kind = keys.pop(f"{_SCALING}type", "linear" if linear else "none")
    factor = float(keys.pop(f"{_SCALING}factor", linear or 1.0))
    if kind == "linear" and factor not in (0.0, 1.0):
        rotary |= {"rope_type": "linear", "factor": factor}
        keys.pop(f"{_SCALING}original_context_length", None)  # it needs none
    elif kind == "yarn":
        given = {name: keys.pop(_SCALING + key) for key, name in _YARN.items() if _SCALING + key in keys}
        if "original_max_position_embeddings" not in given:
            raise file.refuse(f"lacks the key {file.prefix}{_SCALING}original_context_length, which yarn needs")
        rotary |= {"rope_type": "yarn", "factor": factor} | given
    elif kind not in ("none", "linear"):
        raise file.refuse(f"key {file.prefix}{_SCALING}type: got {kind!r}, allowed: none, linear, yarn")
    for key, value in keys.items():
        if not (kind == "none" or value in (0, 1)):
            raise file.refuse(f"key {file.prefix}{key}: got {value!r}, allowed: none beside {kind}")


def _frequencies(file: File, rotary: dict[str, Any]) -> None:
    """rope_freqs.weight, what every frequency is divided by: Llama 3's rule, found again, or refused."""
    if FREQUENCIES not in file.tensors:
        return
    wanted = file.weight(FREQUENCIES).astype(np.float64)
    if (wanted == 1).all():
        return
    for rule in _rules(float(wanted.max())):
        got = _divisors(rule, rotary["rope_theta"], 2 * wanted.size)
        if rotary.get("rope_type", "default") == "default" and np.allclose(got, wanted, rtol=1e-5):
            rotary |= rule
            return
    raise file.refuse(f"tensor {FREQUENCIES}: got divisors up to {wanted.max():g}, allowed: those of Llama 3's rule")


def _rules(factor: float) -> Iterator[dict[str, Any]]:
    for original in (1 << n for n in range(10, 18)):
        yield {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }


def _divisors(rule: dict[str, Any], theta: float, width: int) -> np.ndarray:
    """[width / 2]. Long waves are divided by the factor, short ones are not, those between in part."""
    waves = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    share = np.clip((rule["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / rule["factor"] + share)
