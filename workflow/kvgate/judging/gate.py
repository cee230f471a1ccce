"""A gate of a row: what a measure was held to, and where it broke. Standard library only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgate.judging.records import GateRecord, Place

LEVELS = ("pass", "warn", "fail")
FREE = "free"
HISTORIES = ("isolated", "forced", FREE)


@dataclass(frozen=True)
class Gate:
    name: str  # of a measure, of a strange output, or one of gates.OF_BOARD and gates.OF_SWEEP
    verdict: str
    text: str  # one line: what was got, what is allowed
    program: str = ""
    history: str = ""
    value: float | None = None  # the worst; null where it is NaN or infinite
    first: Place = field(default_factory=Place)  # where it broke first
    steps: tuple[int, ...] = ()  # all steps of the history that broke it as badly as the verdict says

    def to_json(self) -> GateRecord:
        """All but the steps: metrics.npz has them."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "text": self.text,
            "program": self.program,
            "history": self.history,
            "value": self.value,
            "first": self.first,
        }


def level(value: float | None, limits: Mapping[str, float]) -> str:
    """NaN, infinite and null fail."""
    if value is None or not math.isfinite(value) or value > limits["warn"]:
        return "fail"
    return "pass" if value <= limits["pass"] else "warn"


def worst(verdicts: list[str]) -> str:
    """The worst of several verdicts. Raises ValueError on none: a comparison of nothing is no pass."""
    return max(verdicts, key=LEVELS.index)
