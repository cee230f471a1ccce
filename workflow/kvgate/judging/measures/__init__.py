"""Every measure that there is: one module each, found by itself. Adding one is a file in this folder.

jobs/digest.py knows that whoever imports this package uses all modules in it.
"""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # who only wants to know of this package needs no numpy
    from kvgate.judging.measure import Measure

T = TypeVar("T")


@cache
def every() -> "tuple[Measure, ...]":
    """In the order in which a step computes. Raises ValueError where two have one name or one place."""
    names = sorted(x.name for x in pkgutil.iter_modules(__path__))
    found = sorted((import_module(f"{__name__}.{name}").MEASURE for name in names), key=lambda x: x.order)
    for a, b in pairwise(found):
        if a.order == b.order:
            raise ValueError(f"measures: {a.name} and {b.name} have the order {a.order}, allowed: one measure each")
    if len({x.name for x in found}) < len(found):
        raise ValueError(f"measures: got the names {', '.join(x.name for x in found)}, allowed: each once")
    return tuple(found)


def listed() -> "list[Measure]":
    """In the order of their gates in verdict.json."""
    return sorted(every(), key=lambda x: x.order if x.listed is None else x.listed)


def add(found: dict[str, T], of: "Measure", more: Mapping[str, T]) -> None:
    """Put what a measure gives to what there is. Raises ValueError where something of that name is there already."""
    for name in more:
        if name in found:
            raise ValueError(f"measure {of.name}: got {name!r}, allowed: a name that nothing else has")
    found.update(more)
