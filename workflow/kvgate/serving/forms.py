"""The forms in which a generation is answered, whole or in pieces: a chat's and a completion's. Python 3.9."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvgate.serving import answers
from kvgate.serving.answers import Choice, Head, Name
from kvgate.serving.context import Run
from kvgate.serving.measures import timings
from kvgate.serving.pieces import Piece
from kvgate.serving.sampling import Logprob


class Form:
    """Of a chat. All answers of one request and all pieces of a stream have the same head."""

    chunk_kind, letters = "chat.completion.chunk", "chatcmpl-"

    def __init__(self, model: str, fingerprint: str, name: Name | None) -> None:
        """name: of a token, None where no log probabilities were asked for."""
        self.name = name
        self.head: Head = {
            "id": self.letters + os.urandom(12).hex(),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, runs: Sequence[Run], pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """pieces: of each answer."""
        choices = []
        for index, (run, parts) in enumerate(zip(runs, pieces)):
            told = [x for part in parts for x in part.logprobs]
            choices.append(Choice(run, "".join(x.text for x in parts), self._logprobs(told, index)))
        return {**self._answer(choices), "timings": timings(runs)}

    def first(self, index: int) -> list[dict[str, Any]]:
        """What an answer begins with."""
        return [answers.chunk(self.head, {"role": "assistant", "content": ""}, index=index)]

    def piece(self, piece: Piece, index: int) -> dict[str, Any]:
        logprobs = self._logprobs(piece.logprobs, index)
        return answers.chunk(self.head, {"content": piece.text}, index=index, logprobs=logprobs)

    def last(self, run: Run, index: int) -> dict[str, Any]:
        """What an answer ends with: its text is whole."""
        return {**answers.chunk(self.head, {}, run.finish, index), "timings": timings([run])}

    def usage(self, runs: Sequence[Run]) -> dict[str, Any]:
        return {**self.head, "object": self.chunk_kind, "choices": [], "usage": answers.usage(runs)}

    def _answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return answers.chat(choices, self.head)

    def _logprobs(self, told: Sequence[Logprob], index: int) -> Mapping[str, Any] | None:
        return None if self.name is None else answers.chat_logprobs(told, self.name)


class Completion(Form):
    chunk_kind = "text_completion"
    letters = "cmpl-"

    def __init__(self, model: str, fingerprint: str, name: Name | None) -> None:
        super().__init__(model, fingerprint, name)
        self._offsets: dict[int, int] = {}  # characters of an answer's tokens so far

    def first(self, index: int) -> list[dict[str, Any]]:
        return []

    def piece(self, piece: Piece, index: int) -> dict[str, Any]:
        return answers.completion_chunk(
            self.head, piece.text, index=index, logprobs=self._logprobs(piece.logprobs, index)
        )

    def last(self, run: Run, index: int) -> dict[str, Any]:
        return {**answers.completion_chunk(self.head, "", run.finish, index), "timings": timings([run])}

    def _answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return answers.completion(choices, self.head)

    def _logprobs(self, told: Sequence[Logprob], index: int) -> Mapping[str, Any] | None:
        if self.name is None:
            return None
        found = answers.completion_logprobs(told, self.name, self._offsets.get(index, 0))
        self._offsets[index] = self._offsets.get(index, 0) + sum(len(self.name(x.token)[0]) for x in told)
        return found
