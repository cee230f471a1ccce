"""What a measure is: all that the pipeline asks of one, and what it is given. numpy only.

A measure is a module in `measures/`, found by itself: its `MEASURE` says how it is worked out of an observation, what
is written of it, how it is gated, and how the table and the bundle's README show it. What one has not, it leaves out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvgate.contract import LOGITS, Contract
from kvgate.judging.column import Column
from kvgate.judging.gate import Gate
from kvgate.judging.records import Figures, Finding, Record, Thresholds, Worst
from kvgate.observe import Trace

Array = np.ndarray
STEPPED = ("isolated", "forced")  # histories compared step by step: after a divergence a free run cannot be

# Places in `Measure.order` of gates and tensors that are no measure's. A measure's own lies between.
STATES, STRANGE, MOVED = 0, 40, 1000


@dataclass(frozen=True)
class History:
    """A history of a program as it was observed, beside its reference."""

    name: str
    contract: Contract
    trace: Trace
    seen: Mapping[str, Array]  # as `observe.observe` returned it

    def get(self, name: str) -> Array:
        return self.seen[f"{self.name}/{name}"]

    @property
    def positions(self) -> Array:
        return self.get("positions")

    def check(self) -> None:
        """Raises ValueError where there is nothing to compare, or not as many logits as steps."""
        if self.trace.logits is None:
            raise ValueError("trace: got no logits, allowed: the trace of a chat or a text")
        speaks = any(t.role == LOGITS for t in self.contract.outputs)
        count = len(self.get("logits")) if speaks else 0
        if not len(self.positions) or (speaks and count != len(self.positions)):
            text = f"got {count} logits for {len(self.positions)} steps, allowed: equal, at least 1"
            raise ValueError(f"{self.name}: {text}")

    def logits(self) -> Iterator[tuple[Array, Array]]:
        """Logits [V] of each step and the reference's, in float64: a whole history so wide may not fit. None where the
        part returns none."""
        if any(t.role == LOGITS for t in self.contract.outputs):
            assert self.trace.logits is not None
            for row, position in zip(self.get("logits"), self.positions, strict=True):
                yield np.asarray(row, np.float64), np.asarray(self.trace.logits[position], np.float64)


@dataclass(frozen=True)
class Measured:
    """A history in numbers: every measure's arrays, a value a step."""

    arrays: Mapping[str, Array]  # also `positions`
    states: Mapping[str, list[str]]  # `states`, `replaced`: names along the arrays' second axis, as in metrics.json

    @property
    def positions(self) -> Array:
        return self.arrays["positions"]


@dataclass(frozen=True)
class Whole:
    """A program with all its histories, measured."""

    trace: Trace
    seen: Mapping[str, Array]
    measured: Mapping[str, Measured]  # by history
    figures: Mapping[str, Figures]  # by history


@dataclass(frozen=True)
class Run:
    """A history of a program, to be judged."""

    program: str
    history: str
    figures: Figures  # of the history
    metrics: Record  # metrics.json
    arrays: Mapping[str, Array]  # metrics.npz

    def get(self, field: str) -> Array:
        return self.arrays[f"{self.history}/{field}"]


@dataclass(frozen=True)
class Row:
    """All programs of a row, to be put into figures."""

    contract: Contract
    metrics: Mapping[str, Record]  # metrics.json of each
    arrays: Mapping[str, Mapping[str, Array]]  # metrics.npz of each
    thresholds: Thresholds


# What a measure gives where it has nothing to say.


def _no_arrays(history: History) -> dict[str, Array]:
    return {}


def _no_figures(what: Measured | Whole | Row) -> Figures:
    return {}


def _no_gates(run: Run, thresholds: Thresholds) -> list[Gate]:
    return []


def _no_gates_of_program(program: str, metrics: Record, thresholds: Thresholds) -> list[Gate]:
    return []


def _no_check(body: Record, arrays: Mapping[str, Array], limit: float) -> tuple[Figures, list[Finding]]:
    return {}, []


def _no_worst(figures: Figures) -> Worst | None:
    return None


@dataclass(frozen=True)
class Measure:
    """A module of `measures/` has one.

    Where it has limits, `THRESHOLDS` beside it is their part of the config's schema, by key of thresholds.yaml; a key
    without `default` is required. It is a literal: planning reads it without importing.
    """

    name: str  # of its gate
    order: int  # of its gate among those that broke at one step: as a step computes. Its columns and figures go by it
    listed: int | None = None  # of its gate in verdict.json where that is another place
    title: str = ""  # of its error beside float16's own
    number: bool = False  # its gate says how far numbers are off: a row that breaks it may behave for all that

    # verify: of a history, [n] or [n, ..] each a value a step, to metrics.npz as {history}/{name}
    arrays: Callable[[History], dict[str, Array]] = _no_arrays
    # a history's, to metrics.json below `histories`
    summary: Callable[[Measured], Figures] = _no_figures
    # a program's, to metrics.json
    program: Callable[[Whole], Figures] = _no_figures

    # judge: the gates of a history, then of what is of a program. Both get all of thresholds.yaml.
    gate: Callable[[Run, Thresholds], list[Gate]] = _no_gates
    gate_program: Callable[[str, Record, Thresholds], list[Gate]] = _no_gates_of_program
    # a row's, to verdict.json
    figures: Callable[[Row], Figures] = _no_figures

    # check: facts of a program, and findings that say that the graph is not the model: above a limit of the L2
    check: Callable[[Record, Mapping[str, Array], float], tuple[Figures, list[Finding]]] = _no_check
    # of a history's figures the L2 whose least in float16 the check measures; has a `title`
    worst: Callable[[Figures], Worst | None] = _no_worst

    # report
    columns: tuple[Column, ...] = ()
    optional: bool = False  # columns only where a row of the table has something there
    terminal: Mapping[str, str] = field(default_factory=dict)  # columns that the terminal shows too, to their title
    bundle: Mapping[str, str] = field(default_factory=dict)  # columns that a bundle's README has, to its words
    words: Mapping[str, str] = field(default_factory=dict)  # README.md: columns as it names them, to their meaning
    broke: tuple[str, str] | None = None  # README.md, of its gate: what broke, and where to look

    @property
    def floor(self) -> bool:
        """Whether the check measures float16's own error of it."""
        return self.worst is not _no_worst


def number(value: float) -> float | None:
    """A figure for JSON: 6 significant digits, null where it is NaN or infinite."""
    value = float(value)
    return float(f"{value:.6g}") if np.isfinite(value) else None
