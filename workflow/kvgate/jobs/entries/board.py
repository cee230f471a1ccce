"""An entry of boards.yaml, and what its stages read of the config beside it. Standard library only."""

from typing import Literal, TypedDict


class Board(TypedDict):
    platform: str
    driver: str  # a module of remote/drivers/
    address: str
    user: str
    port: int
    adb_port: int
    work: str  # a folder on the board
    python: str
    engine: Literal["lite", "native", "onnxruntime"]
    core_mask: Literal["auto", "0", "1", "2", "0_1", "0_1_2", "all"]
    clocks: Literal["record", "pin"]


class Limits(TypedDict):
    run_seconds: int
    step_seconds: int


class Timing(TypedDict):
    warmup: int  # steps that are not counted
    steps: int
