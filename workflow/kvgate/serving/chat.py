"""Requests of OpenAI's chat and completion routes, held to what this server can do. Python 3.9.

What asks for nothing is taken, what asks for something that is not done here is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgate.serving.fields import Bad, decoded, kind, neutral, number, short, typed, whole
from kvgate.serving.sampling import Options

ROLES = ("system", "developer", "user", "assistant")
_STOPS = 32  # strings; OpenAI takes 4, editors that complete code send a dozen
_ANSWERS = 16  # to one request
_BEST = 20  # log probabilities a token, the most that OpenAI takes
_COMPLETION_TOKENS = 16  # OpenAI's default on its completions route

# Fields that change nothing here; those of llama.cpp's below belong to methods that are refused unless they are off.
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction",
    "cache_prompt", "id_slot", "keep_alive", "timings_per_token", "return_progress", "reasoning_format",
    "mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip
# Fields that are taken with these values only, each of which asks for nothing.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "min_keep": (0,),
    "n_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "lora": ([],),
    "penalize_nl": (False,),
    "return_tokens": (False,),
    "post_sampling_probs": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "dry_multiplier": (0,),
    "grammar": ("",),
    "json_schema": ({},),
}
_NEUTRAL_CHAT: Mapping[str, Sequence[Any]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "add_special_tokens": (False,),
    "echo": (False,),
}
_NEUTRAL_COMPLETION: Mapping[str, Sequence[Any]] = {
    "add_special_tokens": (True,),
    "echo": (False,),
    "suffix": ("",),
}


@dataclass(frozen=True)
class Request:
    """options: of the first answer; `option(n)` those of the others."""

    messages: list[dict[str, str]]
    options: Options
    stops: list[str]
    stream: bool
    usage: bool  # a last chunk with the usage
    model: str = ""  # the name that was asked for
    answers: int = 1
    prompt: str | list[int] | None = None  # of the completions route: a text or its ids; None: a chat

    def option(self, index: int) -> Options:
        """Of one of the answers: each is drawn with a seed of its own."""
        seed = self.options.seed
        return self.options if seed is None else replace(self.options, seed=(seed + index) % 2**64)


def parse(body: bytes, models: Sequence[str], usual: Options = Options()) -> Request:  # noqa: B008
    """A chat. models: the names that are taken, the first for who names none; usual: where a request says nothing.

    Raises Bad on everything that would be answered otherwise than it asks.
    """
    given = decoded(body)
    neutral(given, _NEUTRAL_CHAT)
    messages = _messages(given.pop("messages", []))
    count = whole(given, "top_logprobs", None, 0, _BEST)
    told = typed(given.pop("logprobs", False), bool, "logprobs")
    if count and not told:
        raise Bad("top_logprobs: got {} without logprobs, allowed: with logprobs".format(count), "top_logprobs")
    limit = _limit(
        given, "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens", usual.max_tokens
    )
    given.pop("max_tokens", None)
    return _request(given, models, usual, limit, (count or 0) if told else None, messages=messages)


def parse_completion(body: bytes, models: Sequence[str], usual: Options = Options()) -> Request:  # noqa: B008
    """A plain text to go on with, as `parse`. Special tokens that it spells are tokens: nothing else makes any."""
    given = decoded(body)
    neutral(given, _NEUTRAL_COMPLETION)
    answers = given.get("n", 1)
    if "best_of" in given and given["best_of"] == answers:  # all of them are given
        del given["best_of"]
    prompt = _prompt(given.pop("prompt", None))
    limit = _limit(given, "max_tokens", usual.max_tokens or _COMPLETION_TOKENS)
    return _request(given, models, usual, limit, whole(given, "logprobs", None, 0, _BEST), prompt=prompt)


def _request(
    given: dict[str, Any],
    models: Sequence[str],
    usual: Options,
    limit: int | None,
    logprobs: int | None,
    messages: Sequence[dict[str, str]] = (),
    prompt: str | list[int] | None = None,
) -> Request:
    """The fields that both routes have. Raises Bad on those that neither knows."""
    neutral(given, _NEUTRAL)
    asked = given.pop("model", None) or models[0]
    if asked not in models:
        text = "model: got {}, allowed: {}".format(short(asked), ", ".join(models))
        raise Bad(text, "model", "model_not_found", 404)
    options = Options(
        limit,
        number(given, "temperature", usual.temperature, 0, 2),
        number(given, "top_p", usual.top_p, 0, 1),
        _seed(given.pop("seed", None), usual.seed),
        max(whole(given, "top_k", usual.top_k, -1), 0),
        number(given, "min_p", usual.min_p, 0, 1),
        _repetition(given, usual.repetition),
        number(given, "presence_penalty", usual.presence, -2, 2),
        number(given, "frequency_penalty", usual.frequency, -2, 2),
        _bias(given.pop("logit_bias", {})) or usual.bias,
        logprobs,
    )
    stream = typed(given.pop("stream", False), bool, "stream")
    found = Request(
        list(messages),
        options,
        _stops(given.pop("stop", [])),
        stream,
        _usage(given.pop("stream_options", {}), stream),
        asked,
        whole(given, "n", 1, 1, _ANSWERS),
        prompt,
    )
    unknown = [name for name in given if name not in _IGNORED]
    if unknown:
        text = "{}: this server does not know the field".format(short(unknown[0]))
        raise Bad(text, unknown[0][:64], "unknown_parameter")
    return found


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise Bad("messages: got {}, allowed: a list of at least one message".format(short(value)), "messages")
    return [_message(m, "messages[{}]".format(n)) for n, m in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Bad("{}: got {}, allowed: an object".format(where, kind(value)), where)
    role = value.get("role")
    if role not in ROLES:
        raise Bad("{}.role: got {}, allowed: {}".format(where, short(role), ", ".join(ROLES)), where + ".role")
    for name, more in value.items():
        if name not in ("role", "content", "name") and more not in (None, [], {}, ""):
            raise Bad("{}.{}: not supported here".format(where, name[:64]), where, "unsupported_value")
    content = value.get("content")
    if role == "assistant" and content in (None, []):  # as a turn that only called tools has it
        content = ""
    return {"role": "system" if role == "developer" else role, "content": _content(content, where + ".content")}


def _content(value: Any, where: str) -> str:
    """A text, or parts of type `text`, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise Bad("{}: got {}, allowed: a text".format(where, short(value)), where)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Bad("{}: got {}, allowed: parts of type text".format(where, short(part)), where)
    return "".join(part["text"] for part in value)


def _prompt(value: Any) -> str | list[int]:
    """A text or token ids; a list of one such prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and type(value[0]) is not int:
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(x) is int for x in value):
        return value
    raise Bad("prompt: got {}, allowed: one text or one list of token ids".format(short(value)), "prompt")


def _limit(given: dict[str, Any], name: str, usual: int | None) -> int | None:
    """Tokens of the answer. -1 is llama.cpp's word for no limit; 0 would be no answer, which OpenAI refuses."""
    if name in given and given[name] == -1 and type(given[name]) is int:
        del given[name]
        return None
    found: int | None = whole(given, name, usual, 1)
    return found


def _repetition(given: dict[str, Any], usual: float) -> float:
    """llama.cpp's name and vLLM's for the same; it sees all of prompt and answer."""
    name = "repetition_penalty" if "repetition_penalty" in given else "repeat_penalty"
    found = number(given, name, usual, 0.01, 10)
    given.pop("repeat_penalty", None)
    window = given.pop("repeat_last_n", -1)
    if found != 1 and window != -1:
        raise Bad("repeat_last_n: got {}, allowed: -1, all tokens".format(short(window)), "repeat_last_n")
    return found


def _bias(value: Any) -> dict[int, float]:
    found = {}
    for name, more in typed(value, dict, "logit_bias").items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise Bad("logit_bias: got {}, allowed: token ids".format(short(name)), "logit_bias")
        found[int(name)] = number({"logit_bias": more}, "logit_bias", 0, -100, 100)
    return found


def _seed(value: Any, usual: int | None) -> int | None:
    if value is None:
        return usual
    if type(value) is not int:
        raise Bad("seed: got {}, allowed: a whole number".format(short(value)), "seed")
    return value % 2**64


def _stops(value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > _STOPS or not all(isinstance(x, str) and x for x in found):
        raise Bad("stop: got {}, allowed: up to {} texts that are not empty".format(short(value), _STOPS), "stop")
    return found


def _usage(value: Any, stream: bool) -> bool:
    options = {name: x for name, x in typed(value, dict, "stream_options").items() if x is not None}
    found = typed(options.pop("include_usage", False), bool, "stream_options.include_usage")
    neutral(options, {"include_obfuscation": (False,), "continuous_usage_stats": (False,)})
    if options:
        name = "stream_options.{}".format(next(iter(options))[:64])
        raise Bad("{}: this server does not know the field".format(name), "stream_options", "unknown_parameter")
    if found and not stream:
        raise Bad("stream_options: got one without stream, allowed: with stream", "stream_options")
    return bool(found)
