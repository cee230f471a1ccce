"""A column of the table: where its value is in a verdict, and how people read it. Standard library only."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvgate.judging.records import Verdict

Get = Callable[[Verdict], Any]


class Column(NamedTuple):
    name: str  # in the .tsv, which has raw values
    get: Get  # of a verdict; None: the cell is empty
    form: Callable[[Any], str]  # of the value, in the .md


def get(*path: str) -> Get:
    """What lies at a path in a verdict; None where there is no such place."""

    def found(verdict: Verdict) -> Any:
        value: Any = verdict
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    return found


def figure(*path: str) -> Get:
    """A figure of a row."""
    return get("figures", *path)


def text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
