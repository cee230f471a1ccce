"""Which tokens steer a model, and must come from the chat template alone. Standard library only, Python 3.9."""

_MARKS = frozenset("<>[]{}|")


def steers(content: str, special: bool) -> bool:
    """Of a token that was added to a vocabulary, spelled `content`.

    Special ones do; of the others those that look like markup (`<tool_call>`, `[IMG]`). The rest are words, line ends
    and runs of spaces, which are text like any other.
    """
    return special or not _MARKS.isdisjoint(content)
