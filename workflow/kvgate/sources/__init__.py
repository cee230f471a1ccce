"""Where a checkpoint comes from. A module a kind, with `fetch(source, into)` and the constants that planning reads."""

from typing import NotRequired, TypedDict


class Fetched(TypedDict):
    """What `fetch` tells of the checkpoint that it has put into its folder."""

    revision: str  # what pins it: a commit, a sha256, a seed
    licence: str | None
    left_out: NotRequired[dict[str, str]]  # files and tensors that are no part of the checkpoint, to why
    wheels: NotRequired[dict[str, str]]  # by name, their sha256
