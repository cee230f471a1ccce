"""Conversations that a context was taken from: their tokens with the states of each, for when they go on.

numpy only, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MOST = 16  # conversations: a prompt is compared with all of them, token by token (10 ms where each has 8,192)
Slots = Mapping[str, np.ndarray]  # by state [S, Hk, D]; slot n is token n's


@dataclass(frozen=True, eq=False)
class Conversation:
    tokens: list[int]
    slots: Slots  # as many as tokens
    size: int  # bytes


class Kept:
    """The ones used last, as many as the memory allows, at most MOST."""

    def __init__(self, limit: int) -> None:
        """limit: bytes of K and V; 0: none are kept."""
        self.limit = limit
        self.conversations: list[Conversation] = []  # the one used last is the last one

    @property
    def size(self) -> int:
        return sum(x.size for x in self.conversations)

    def best(self, ids: Sequence[int]) -> tuple[Conversation | None, int]:
        """The one with the most tokens in common with the begin of `ids`, and how many; None, 0 where there is none."""
        found = [(common(x.tokens, ids), x) for x in reversed(self.conversations)]
        length, conversation = max(found, key=lambda x: x[0], default=(0, None))
        return (conversation, length) if length else (None, 0)

    def save(self, tokens: Sequence[int], views: Slots) -> None:
        """Keep a copy of the first slots of `views`, in place of those that it goes on from, and of the oldest ones."""
        count = len(tokens)
        size = sum(x[:count].nbytes for x in views.values())
        if size > self.limit:
            return
        self.conversations = [x for x in self.conversations if common(x.tokens, tokens) < len(x.tokens)]
        while len(self.conversations) >= MOST or size + self.size > self.limit:
            del self.conversations[0]
        slots = {name: x[:count].copy() for name, x in views.items()}
        self.conversations.append(Conversation(list(tokens), slots, size))

    def load(self, conversation: Conversation, count: int, views: Slots) -> None:
        """Write its first `count` slots into `views`; it counts as used, where it is still kept."""
        if conversation in self.conversations:
            self.conversations.remove(conversation)
            self.conversations.append(conversation)
        for name, kept in conversation.slots.items():
            views[name][:count] = kept[:count]


def common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    count = 0
    for a, b in zip(one, two):
        if a != b:
            break
        count += 1
    return count
