"""An entry of weights.yaml. Standard library only."""

from typing import TypedDict


class Options(TypedDict, total=False):
    """Keyword arguments of a module's hooks, those that the schema knows; a module may have more."""

    by: float
    group: int  # input channels that share a scale; 0: a column does
    megabytes: float
    megacycles: float
    share: float
    signs: int | list[int]
    only: list[str]  # patterns of matrices' names
    skip: list[str]


class Step(TypedDict):
    name: str  # a module of weights/
    options: Options


class Weights(TypedDict):
    steps: list[Step]
    calibrate: bool
