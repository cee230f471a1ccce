"""OpenAI's chat completions as data: a request held to what this server can do, and its answers. Python 3.9."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgate.board.context import Options, Run

ROLES = ("system", "user", "assistant")
_STOPS = 4  # strings, the most that OpenAI takes
# Fields that change nothing here, and those that are taken only with the value that asks for nothing.
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logprobs": False,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}


class Bad(Exception):
    """A request that is not answered. status: HTTP's; param: the field; code: OpenAI's short word, if it has one."""

    def __init__(
        self, text: str, param: str | None = None, code: str | None = None, status: int = 400, retry: int = 0
    ) -> None:
        super().__init__(text)
        self.text, self.param, self.code, self.status, self.retry = text, param, code, status, retry

    def body(self) -> dict[str, Any]:
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.text, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Request:
    messages: list[dict[str, str]]
    options: Options
    stops: list[str]
    stream: bool
    usage: bool  # a last chunk with the usage


def parse(body: bytes, model: str) -> Request:
    """Raises Bad on everything that would be answered otherwise than it asks."""
    try:
        read = json.loads(body.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Bad("body: got no JSON ({}), allowed: a JSON object".format(text)) from None
    if not isinstance(read, dict):
        raise Bad("body: got {}, allowed: a JSON object".format(_kind(read)))
    given = {name: value for name, value in read.items() if value is not None}
    for name, neutral in _NEUTRAL.items():
        value = given.pop(name, neutral)
        if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
            raise Bad(
                "{}: got {}, allowed: {}".format(name, _short(value), json.dumps(neutral)), name, "unsupported_value"
            )
    asked = given.pop("model", model)
    if asked != model:
        raise Bad("model: got {}, allowed: {}".format(_short(asked), model), "model", "model_not_found", 404)
    stream = _typed(given.pop("stream", False), bool, "stream")
    found = Request(
        _messages(given.pop("messages", [])),
        Options(
            _max_tokens(given),
            _number(given.pop("temperature", 0), "temperature", 0, 2),
            _number(given.pop("top_p", 1), "top_p", 0, 1),
            _seed(given.pop("seed", None)),
        ),
        _stops(given.pop("stop", [])),
        stream,
        _usage(given.pop("stream_options", {}), stream),
    )
    unknown = [name for name in given if name not in _IGNORED]
    if unknown:
        raise Bad(
            "{}: this server does not know the field".format(_short(unknown[0])), unknown[0][:64], "unknown_parameter"
        )
    return found


def answer(run: Run, text: str, head: Mapping[str, Any]) -> dict[str, Any]:
    """The whole answer. head: id, created, model, system_fingerprint."""
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": run.finish}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage(run)}


def chunk(head: Mapping[str, Any], delta: Mapping[str, str], finish: str | None = None) -> dict[str, Any]:
    """A piece of a streamed answer."""
    choice = {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def usage(run: Run) -> dict[str, Any]:
    """An end-of-text token is counted."""
    return {
        "prompt_tokens": run.prompt,
        "completion_tokens": len(run.tokens),
        "total_tokens": run.prompt + len(run.tokens),
        "prompt_tokens_details": {"cached_tokens": run.reused},
    }


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise Bad("messages: got {}, allowed: a list of at least one message".format(_short(value)), "messages")
    return [_message(m, "messages[{}]".format(n)) for n, m in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Bad("{}: got {}, allowed: an object".format(where, _kind(value)), where)
    role = value.get("role")
    if role not in ROLES:
        raise Bad("{}.role: got {}, allowed: {}".format(where, _short(role), ", ".join(ROLES)), where + ".role")
    for name, more in value.items():
        if name not in ("role", "content", "name") and more not in (None, [], {}):
            raise Bad("{}.{}: not supported here".format(where, name[:64]), where, "unsupported_value")
    return {"role": role, "content": _content(value.get("content"), where + ".content")}


def _content(value: Any, where: str) -> str:
    """A text, or parts of type `text`, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise Bad("{}: got {}, allowed: a text".format(where, _short(value)), where)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Bad("{}: got {}, allowed: parts of type text".format(where, _short(part)), where)
    return "".join(part["text"] for part in value)


def _max_tokens(given: dict[str, Any]) -> int | None:
    old, new = given.pop("max_tokens", None), given.pop("max_completion_tokens", None)
    value = old if new is None else new
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise Bad("max_tokens: got {}, allowed: a whole number of 1 or more".format(_short(value)), "max_tokens")
    return value


def _number(value: Any, name: str, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high:
        raise Bad("{}: got {}, allowed: {} to {}".format(name, _short(value), low, high), name)
    return float(value)


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise Bad("seed: got {}, allowed: a whole number".format(_short(value)), "seed")
    return value % 2**64


def _stops(value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > _STOPS or not all(isinstance(x, str) and x for x in found):
        raise Bad("stop: got {}, allowed: up to {} texts that are not empty".format(_short(value), _STOPS), "stop")
    return found


def _usage(value: Any, stream: bool) -> bool:
    options = _typed(value, dict, "stream_options")
    if options and not stream:
        raise Bad("stream_options: got one without stream, allowed: with stream", "stream_options")
    return _typed(options.get("include_usage") or False, bool, "stream_options.include_usage")


def _typed(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise Bad("{}: got {}, allowed: {}".format(name, _short(value), _kind(kind())), name)
    return value


def _kind(value: Any) -> str:
    names: Mapping[type, str] = {
        dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number",
    }  # fmt: skip
    return names.get(type(value), "null")


def _short(value: Any) -> str:
    """At most 60 characters of a client's value, as JSON, on one line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(name: str) -> Any:
    raise ValueError("{} is no JSON".format(name))
