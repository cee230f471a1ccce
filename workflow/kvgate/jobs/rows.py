"""A row: a tuple on a backend; and the names of what is no chip and no board. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvgate.contract import DECODE, PREFILL
from kvgate.jobs.entries.strategy import Strategy

HOST_PLATFORM, HOST_QUANT = "host", "fp32"  # the graph in ONNX Runtime, never compiled
HOST_MASK = -1e4  # the additive mask there; a quant has its own
SIMULATOR, ONNXRUNTIME = "simulator", "onnxruntime"  # backends that are no boards
ROW = ("model", "weights", "strategy", "platform", "quant", "backend")


def parts(strategy: Strategy) -> tuple[str, ...]:
    """The parts of a row, each a graph and an artifact of its own."""
    return (DECODE, PREFILL) if strategy["prefill"] else (DECODE,)


@dataclass(frozen=True, order=True)
class Row:
    """A tuple on a backend."""

    model: str
    weights: str
    strategy: str
    platform: str
    quant: str
    backend: str

    def wildcards(self) -> dict[str, str]:
        return dict(vars(self))

    def matches(self, pattern: Mapping[str, object]) -> bool:
        """Whether every column of the pattern has this row's value, or it is among the pattern's values."""
        return all(
            getattr(self, column) in (wanted if isinstance(wanted, list) else [wanted])
            for column, wanted in pattern.items()
        )
