"""Fields of a client's JSON, each held to its type and its limits, and the one error that says what is wrong.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


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


def decoded(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object that are not null. Raises Bad where the body is none."""
    try:
        read = json.loads(body.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Bad("body: got no JSON ({}), allowed: a JSON object".format(text)) from None
    if not isinstance(read, dict):
        raise Bad("body: got {}, allowed: a JSON object".format(kind(read)))
    return {name: value for name, value in read.items() if value is not None}


def neutral(given: dict[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    """Take out the fields that are allowed with some values only. Raises Bad on another value."""
    for name, values in allowed.items():
        value = given.pop(name, values[0])
        if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in values):
            text = "{}: got {}, allowed: {}".format(name, short(value), " or ".join(json.dumps(x) for x in values))
            raise Bad(text, name, "unsupported_value")


def number(given: dict[str, Any], name: str, usual: float, low: float, high: float) -> float:
    value = given.pop(name, usual)
    if type(value) not in (int, float) or not low <= value <= high:
        raise Bad("{}: got {}, allowed: {} to {}".format(name, short(value), low, high), name)
    return float(value)


def whole(given: dict[str, Any], name: str, usual: Any, low: int, high: int | None = None) -> Any:
    """A whole number, or `usual` where there is none."""
    if name not in given:
        return usual
    value = given.pop(name)
    if type(value) is not int or value < low or (high is not None and value > high):
        limits = "{} or more".format(low) if high is None else "{} to {}".format(low, high)
        raise Bad("{}: got {}, allowed: a whole number, {}".format(name, short(value), limits), name)
    return value


def typed(value: Any, wanted: type, name: str) -> Any:
    if type(value) is not wanted:
        raise Bad("{}: got {}, allowed: {}".format(name, short(value), kind(wanted())), name)
    return value


def kind(value: Any) -> str:
    names: Mapping[type, str] = {
        dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number",
    }  # fmt: skip
    return names.get(type(value), "null")


def short(value: Any) -> str:
    """At most 60 characters of a client's value, as JSON, on one line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(name: str) -> Any:
    raise ValueError("{} is no JSON".format(name))
