"""Text to token ids and back, as the reference's tokenizer does it. Needs the packages tokenizers and, for a chat
template, jinja2. Python 3.9.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvgate.serving.plain import Plain
from kvgate.serving.today import strftime_now

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
_PENDING = 3  # bytes of a character that may still be to come: its length less one
_SPACE = "\u2581"  # how some vocabularies write a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>$")


class Unavailable(Exception):
    """Text cannot be handled here. One line: what is missing and what works without it."""

    def __init__(self, reason: str) -> None:
        super().__init__("text: {}; token ids work: generate.py --ids".format(reason))


class Text:
    def __init__(self, folder: Path, special: Mapping[str, Any]) -> None:
        """folder: has tokenizer.json and, if the model has one, chat_template.jinja.

        special: the template's variables, bos_token and so on. Raises Unavailable.
        """
        if not (folder / "tokenizer.json").is_file():
            raise Unavailable("this model's tokenizer has no tokenizer.json")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise Unavailable("needs the Python package tokenizers (pip install tokenizers)") from None
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()
            self.plain = Plain(self.tokenizer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the package's own panics are no Exception
            line = " ".join(str(error).split()) or type(error).__name__
            raise Unavailable("tokenizer.json is damaged: {}".format(line)) from None
        self.special = special
        self.template = _template(folder / "chat_template.jinja")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a chat, up to where the answer begins. messages: dicts with `role` and `content`.

        As stages/trace makes a prompt: the template applied once; without one, a single message's plain text. What
        contents spell is plain text, special tokens too. Raises ValueError on what the template refuses, and on
        several messages where there is no template.
        """
        contents = [m["content"] for m in messages]
        if any("\ud800" <= c <= "\udfff" for content in contents for c in content):
            raise ValueError("messages: got half a surrogate pair, allowed: Unicode text")
        if self.template is None:
            if len(messages) != 1 or messages[0]["role"] != "user":
                raise ValueError("messages: this model has no chat template, allowed: one message of the user")
            return self.plain.content(contents[0])

        def render(contents: Sequence[str]) -> str:
            return self._rendered([{**m, "content": x} for m, x in zip(messages, contents)])

        return self.plain.chat(render, contents)

    def encode(self, text: str, start: bool = True) -> list[int]:
        """The ids of a raw text, in which special tokens may be spelled. start: with the tokenizer's own start token.

        Raises ValueError on half a surrogate pair.
        """
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=start).ids)
        except (TypeError, UnicodeEncodeError):
            raise ValueError("text: got half a surrogate pair, allowed: Unicode text") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, token: int) -> tuple[str, bytes]:
        """A token's text, special ones too, and its bytes, which may be a part of a character."""
        name = self.tokenizer.id_to_token(token)
        if name is None:  # a model's vocabulary may be padded
            return "", b""
        if token in self.plain.spelled:
            return name, name.encode("utf-8")
        text = str(self.tokenizer.decode([token], skip_special_tokens=False))
        single = _BYTE.match(name)
        if single:
            data = bytes([int(single.group(1), 16)])
        elif BROKEN in text and all(c in _BYTES for c in name):
            data = bytes(_BYTES[c] for c in name)
        else:
            if _SPACE in name:  # a decoder takes the space from a sequence's first word
                text = name.replace(_SPACE, " ")
            return text, text.encode("utf-8")
        return data.decode("utf-8", "replace"), data

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        variables = {"messages": messages, "tools": None, "documents": None}
        try:
            return str(self.template.render(add_generation_prompt=True, **variables, **self.special))
        except Exception as error:  # whatever a template does with an unusual chat
            line = " ".join(str(error).split()) or type(error).__name__
            raise ValueError("messages: the model's chat template refuses them: {}".format(line)) from None


class Stream:
    """Ids in, text out as soon as it is certain: never a part of a character. The pieces together are the whole text.

    Only the tokens since the last whole character are decoded again, after one earlier token of plain text: decoders
    treat the first token of a sequence in their own way, and some spoil a whole run of bytes for its last one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self.window: list[int] = []
        self.shown = 0  # characters of the window's text that were given out
        self.pending = 0  # tokens since the text was whole
        self.anchor: tuple[list[int], int] | None = None  # the token of plain text, and its length

    def push(self, token: int) -> str:
        self.window.append(token)
        self.pending += 1
        text = self.decode(self.window)
        certain = len(text.rstrip(BROKEN))
        if self.pending > _PENDING:  # what is broken for so long stays broken
            certain = max(certain, len(text) - _PENDING)
        piece = text[self.shown : certain]
        self.shown = max(self.shown, certain)
        if not text.endswith(BROKEN):
            self._whole(token)
        return piece

    def _whole(self, token: int) -> None:
        self.pending = 0
        alone = self.decode([token])
        if alone and BROKEN not in alone:
            self.anchor = [token], len(alone)
        if self.anchor:
            self.window, self.shown = list(self.anchor[0]), self.anchor[1]

    def finish(self) -> str:
        """What was held back."""
        return self.decode(self.window)[self.shown :]


class Stops:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held = stops, ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is certain, and whether a stop string came (the text ends before it)."""
        self.held += piece
        places = [place for place in (self.held.find(stop) for stop in self.stops) if place >= 0]
        if places:
            text, self.held = self.held[: min(places)], ""
            return text, True
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        begins = (n for n in range(min(longest, len(self.held)), 0, -1) if self._may_stop(self.held[-n:]))
        keep = next(begins, 0)
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text, False

    def _may_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self.stops)


def _alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes: the visible ones of Latin-1 stand for themselves."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [n for n in range(256) if n not in shown]
    return {**{chr(n): n for n in shown}, **{chr(256 + i): n for i, n in enumerate(others)}}


def _template(path: Path) -> Any:
    """None where there is none."""
    try:
        return _compile(path.read_text(encoding="utf-8")) if path.is_file() else None
    except UnicodeDecodeError as error:
        raise Unavailable("{} is damaged: {}".format(path.name, error)) from None


def _compile(template: str) -> Any:
    """The template in an environment like transformers': sandboxed, blocks trimmed, its helpers."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise Unavailable("needs the Python package jinja2 (pip install jinja2)") from None

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it does nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(text: str) -> None:
        raise TemplateError(text)

    def as_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise Unavailable("chat_template.jinja: {}".format(error)) from None


_BYTES = _alphabet()
