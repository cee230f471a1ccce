"""The whole config as types: what config.load gives. The entries of its files beside config.yaml: jobs.entries."""

from typing import Literal, TypedDict

from kvgate.jobs.entries.board import Board, Timing
from kvgate.jobs.entries.board import Limits as BoardLimits
from kvgate.jobs.entries.model import Model
from kvgate.jobs.entries.program import Programs
from kvgate.jobs.entries.quant import Quant
from kvgate.jobs.entries.strategy import Strategy
from kvgate.jobs.entries.weights import Weights


class Pattern(TypedDict, total=False):
    """A column of a row to the value or values that fit."""

    model: str | list[str]
    weights: str | list[str]
    strategy: str | list[str]
    platform: str | list[str]
    quant: str | list[str]
    backend: str | list[str]


class Block(TypedDict):
    """The cross product of its lists, without what is excluded."""

    models: list[str]
    weights: list[str]
    strategies: list[str]
    platforms: list[str]
    quants: list[str]
    exclude: list[Pattern]


class Sweep(TypedDict):
    name: str
    programs: list[str]
    backends: list[str]
    isolated: int  # positions
    blocks: list[Block]
    bundle: list[Literal["pass", "warn", "behaves"]]
    require: list[Pattern]


class Calibration(TypedDict):
    texts: list[str]
    samples: int


class Limits(BoardLimits):
    build_seconds: int
    memory_mb: int
    store_gb: float


class Config(TypedDict):
    sweep: Sweep
    calibration: Calibration
    limits: Limits
    models: dict[str, Model]
    weights: dict[str, Weights]
    strategies: dict[str, Strategy]
    quants: dict[str, Quant]
    boards: dict[str, Board]
    timing: Timing
    programs: Programs
    thresholds: dict[str, object]  # judging's own
