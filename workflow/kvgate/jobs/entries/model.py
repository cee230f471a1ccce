"""An entry of models.yaml. Standard library only."""

from typing import NotRequired, TypedDict


class Source(TypedDict):
    """The other keys are its kind's: each module of sources/ has a type of its own."""

    kind: str  # a module of sources/


class Model(TypedDict):
    source: Source
    context: NotRequired[int]  # tokens
    build_mb: int
