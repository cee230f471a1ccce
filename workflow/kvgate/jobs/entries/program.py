"""An entry of programs.yaml. Standard library only."""

from typing import Literal, TypedDict

History = Literal["isolated", "forced", "free"]


class Text(TypedDict):
    """What is traced, whatever runs it then."""

    kind: Literal["chat", "text", "calibration"]
    text: str  # a file, relative to the repository
    tokens: int
    generated: int  # of them, drawn by the model


class Program(Text):
    histories: list[History]


Programs = dict[str, Program]  # by name
