"""Answers in OpenAI's forms: whole ones and pieces of streamed ones, of chats and of completions. Python 3.9."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgate.serving.context import Run
from kvgate.serving.sampling import Logprob
from kvgate.serving.text import BROKEN

Head = Mapping[str, Any]  # id, created, model, system_fingerprint
Name = Callable[[int], "tuple[str, bytes]"]  # a token's text and its bytes (text.Text.token)


@dataclass(frozen=True)
class Choice:
    """One finished answer. logprobs: as `chat_logprobs` or `completion_logprobs` gives them."""

    run: Run
    text: str
    logprobs: Mapping[str, Any] | None = None


def chat(choices: Sequence[Choice], head: Head) -> dict[str, Any]:
    found = []
    for index, choice in enumerate(choices):
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        more = {"logprobs": choice.logprobs, "finish_reason": choice.run.finish}
        found.append({"index": index, "message": message, **more})
    return {**head, "object": "chat.completion", "choices": found, "usage": usage([x.run for x in choices])}


def chunk(
    head: Head,
    delta: Mapping[str, str],
    finish: str | None = None,
    index: int = 0,
    logprobs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A piece of a streamed chat. The last one has the reason of the end and no text."""
    choice = {"index": index, "delta": dict(delta), "logprobs": logprobs, "finish_reason": finish}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def completion(choices: Sequence[Choice], head: Head) -> dict[str, Any]:
    """Of the completions route."""
    found = [_plain(x.text, n, x.run.finish, x.logprobs) for n, x in enumerate(choices)]
    return {**head, "object": "text_completion", "choices": found, "usage": usage([x.run for x in choices])}


def completion_chunk(
    head: Head, text: str, finish: str | None = None, index: int = 0, logprobs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {**head, "object": "text_completion", "choices": [_plain(text, index, finish, logprobs)]}


def usage(runs: Sequence[Run]) -> dict[str, Any]:
    """Of all answers to one prompt, which counts once. An end-of-text token is counted."""
    answered = sum(len(run.tokens) for run in runs)
    return {
        "prompt_tokens": runs[0].prompt,
        "completion_tokens": answered,
        "total_tokens": runs[0].prompt + answered,
        "prompt_tokens_details": {"cached_tokens": runs[0].reused},
    }


def chat_logprobs(tokens: Sequence[Logprob], name: Name) -> dict[str, Any]:
    """Log probabilities of the answer's tokens, each with its bytes: a token may be a part of a character."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = name(token)
        return {"token": text, "logprob": value, "bytes": list(data)}

    found = [{**entry(x.token, x.value), "top_logprobs": [entry(*best) for best in x.best]} for x in tokens]
    return {"content": found, "refusal": None}


def completion_logprobs(tokens: Sequence[Logprob], name: Name, offset: int = 0) -> dict[str, Any]:
    """The older form of the completions route. offset: characters of the answer before these tokens."""
    places = []
    for x in tokens:
        places.append(offset)
        offset += len(name(x.token)[0])
    return {
        "tokens": [_label(x.token, name) for x in tokens],
        "token_logprobs": [x.value for x in tokens],
        "top_logprobs": [{_label(token, name): value for token, value in x.best} for x in tokens],
        "text_offset": places,
    }


def _label(token: int, name: Name) -> str:
    """As OpenAI does it: parts of characters have no text of their own, and would all be one key."""
    text, data = name(token)
    return "bytes:" + "".join("\\x{:02x}".format(x) for x in data) if BROKEN in text else text


def _plain(text: str, index: int, finish: str | None, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}
