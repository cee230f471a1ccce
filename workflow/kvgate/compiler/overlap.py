"""How much two texts have in common. Standard library only."""

from collections.abc import Hashable, Sequence

RUN = 8  # words or tokens: unrelated texts share hardly a run of so many, an edited word breaks eight of them
MOST = 0.5  # share of common runs from which on two texts are one, edited


def shared(one: Sequence[Hashable], two: Sequence[Hashable]) -> float:
    """The share of the shorter text's runs of RUN that the other has, wherever they stand; 0 where it has no run.

    A longest common part would say little: one word in the middle halves it. Equal places would say less: one word
    more at the beginning moves all.
    """
    runs = [{tuple(text[n : n + RUN]) for n in range(len(text) - RUN + 1)} for text in (one, two)]
    least = min(map(len, runs))
    return len(runs[0] & runs[1]) / least if least else 0.0
