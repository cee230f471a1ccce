"""Contents of messages as plain text, whatever they spell: only a chat template makes tokens that steer the model.

A tokenizer finds `<|im_end|>` wherever it stands. So the chat is rendered with its contents hidden, too: that shows
which such tokens are the template's. Where the contents as they are give the same ones, nothing is spelled in them,
and the ids are those of the whole text. Else a second tokenizer is taken, in which each of these tokens has a secret
name, and which knows none of their spellings. Standard library only (a tokenizer is given), Python 3.9.
"""

from __future__ import annotations

import json
import secrets
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from kvgate.serving.control import steers

_PRIVATE = 0xF0000, 0x100000  # the first code points of two planes without characters: names, hidden characters
_PLANE = 0xFFFE


class Plain:
    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: of the package tokenizers."""
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.spelled = {token: x.content for token, x in added.items() if steers(x.content, x.special)}
        self.names = {token: _name(token) for token in self.spelled}
        self._others: dict[Callable[[], Any], tuple[Any, dict[int, int]]] = {}

    def chat(self, render: Callable[[Sequence[str]], str], contents: Sequence[str]) -> list[int]:
        """The ids of the text that `render` makes of the contents. Raises what it raises, ValueError."""
        text = render(contents)
        ids, found = self._found(text)
        if not self.spelled:
            return ids
        try:
            everything = _Hidden(contents, lambda content: range(len(content)))
            masked = render(everything.contents)
        except Exception:  # a template that wants to see certain words
            everything = _Hidden(contents, self._places)
            masked = render(everything.contents)
        wanted = self._found(masked)[1]
        if _tokens(found) == _tokens(wanted):
            return ids
        some = _Hidden(contents, self._places)  # as a template may look for what is in a content
        text = render(some.contents)
        found = self._found(text)[1]
        if _tokens(found) == _tokens(wanted):
            return self._named(text, found, some)
        return self._named(masked, wanted, everything)

    def content(self, text: str) -> list[int]:
        """The ids of a text without a template, after the tokenizer's own start token."""
        return self._encoded(text, True) if self._found(text)[1] else list(self.tokenizer.encode(text).ids)

    def _found(self, text: str) -> tuple[list[int], list[tuple[int, int, int]]]:
        """The ids of a text, and of those that steer: token, begin, end. The unknown word's token may be mere text."""
        made = self.tokenizer.encode(text, add_special_tokens=False)
        pairs = ((x, made.offsets[n]) for n, x in enumerate(made.ids) if x in self.spelled)
        return list(made.ids), [(x, *at) for x, at in pairs if _folded(text[slice(*at)]) == _folded(self.spelled[x])]

    def _places(self, content: str) -> list[int]:
        """The first characters of what a content spells."""
        found = []
        for spelled in self.spelled.values():
            at = content.find(spelled)
            while at >= 0:
                found.append(at + len(spelled) - len(spelled.lstrip()))
                at = content.find(spelled, at + 1)
        return found

    def _named(self, text: str, found: Sequence[tuple[int, int, int]], hidden: _Hidden) -> list[int]:
        """The ids of a text whose steering tokens are `found`."""
        parts, last = [], 0
        for token, begin, end in found:
            parts += [hidden.shown(text[last:begin]), self.names[token]]
            last = end
        return self._encoded("".join(parts) + hidden.shown(text[last:]), False)

    def _encoded(self, text: str, start: bool) -> list[int]:
        """The ids of a text in which steering tokens stand by their names. start: after the tokenizer's start token."""
        tokenizer, ids = self._other(self._sharing)
        if self.spelled.keys() & tokenizer.encode(text, add_special_tokens=False).ids:
            tokenizer, ids = self._other(self._rebuilt)  # the vocabulary itself has them, as pieces of any text
        return [ids.get(x, x) for x in tokenizer.encode(text, add_special_tokens=start).ids]

    def _other(self, make: Callable[[], Any]) -> tuple[Any, dict[int, int]]:
        """A second tokenizer, made once, and its ids of added tokens -> the first one's."""
        if make not in self._others:
            try:
                made = make()
            except Exception as error:
                text = "messages: got a special token in a text, which this tokenizer cannot take as plain text: {}"
                raise ValueError(text.format(" ".join(str(error).split()))) from None
            added = self.tokenizer.get_added_tokens_decoder()
            ids = {made.token_to_id(self.names.get(token, x.content)): token for token, x in added.items()}
            self._others[make] = made, ids
        return self._others[make]

    def _sharing(self) -> Any:
        """Over the same model: quick, and without a copy of a large vocabulary."""
        made = type(self.tokenizer)(self.tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(self.tokenizer, part) is not None:
                setattr(made, part, getattr(self.tokenizer, part))
        added = sorted(self.tokenizer.get_added_tokens_decoder().items())
        for token, x in added:
            x.content = self.names.get(token, x.content)
        made.add_tokens([x for _, x in added])
        return made

    def _rebuilt(self) -> Any:
        """Over a model whose vocabulary has the names, too: it spells none of them."""
        renamed = {self.spelled[token]: name for token, name in self.names.items()}
        return type(self.tokenizer).from_str(_renamed(json.loads(self.tokenizer.to_str()), renamed))


class _Hidden:
    """Contents in which some characters stand for others, of the same number."""

    def __init__(self, contents: Sequence[str], places: Callable[[str], Sequence[int]]) -> None:
        used = set("".join(contents))
        free = (chr(_PRIVATE[1] + n) for n in range(_PLANE) if chr(_PRIVATE[1] + n) not in used)
        stand: dict[str, str] = {}
        self.contents = []
        for content in contents:
            letters = list(content)
            for place in places(content):
                letter = content[place]
                if not letter.isspace():
                    if letter not in stand:
                        stand[letter] = next(free, "")
                    letters[place] = stand[letter]
            self.contents.append("".join(letters))
        if "" in stand.values():
            raise ValueError("messages: got too many different characters")
        self._back = {ord(new): old for old, new in stand.items()}

    def shown(self, text: str) -> str:
        return text.translate(self._back)


def _renamed(tokenizer: dict[str, Any], names: dict[str, str]) -> str:
    """A tokenizer.json with other names of its added tokens, which its model does not spell either."""
    for added in tokenizer["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(x, x): n for x, n in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(x, x), score] for x, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        pairs = (x.split(" ") if isinstance(x, str) else x for x in model["merges"])
        model["merges"] = [x for x in pairs if names.keys().isdisjoint((*x, "".join(x)))]
    return json.dumps(tokenizer)


def _name(token: int) -> str:
    """Nobody can spell it."""
    return "".join(chr(_PRIVATE[0] + int(digit, 16)) for digit in "{}{:08x}".format(secrets.token_hex(16), token))


def _tokens(found: Sequence[tuple[int, int, int]]) -> list[int]:
    return [x[0] for x in found]


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().strip()
