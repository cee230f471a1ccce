"""The records that verify and judge write, field by field. Standard library only.

Open by design, and so plain mappings: a history's figures in metrics.json and a row's in verdict.json, to which every
measure adds its own (`measures/`), and what a record of another stage holds (a build's, a run's).
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, Unpack

Figures = dict[str, Any]  # of a history, a program or a row: what the measures make of it, by names of their own
Record = Mapping[str, Any]  # of another stage, as it was read
Thresholds = Mapping[str, Any]  # of the config: every measure's limits by its name, and what else it declares


class StatePlace(TypedDict, total=False):
    state: str  # its name, `layers.3.key`
    layer: int
    tensor: str  # its kind, `key`; of a gate on no state `logits` or `cache`


class Worst(StatePlace, total=False):
    """The worst value of a measure, and where it is."""

    value: float | None  # null where it is NaN or infinite
    step: int  # counted in the history
    position: int
    program: str  # this and the next one over several programs only
    history: str


class Spread(TypedDict):
    median: float | None
    worst: Worst


class StateSpread(TypedDict):
    median: float | None
    worst: float | None


class StatesSpread(Spread):
    states: dict[str, StateSpread]  # of every state by its name


class Change(TypedDict, total=False):
    """A best token that is not the reference's."""

    step: int  # of a free run: the generated one
    position: int
    token: int
    reference: int
    margin: float | None  # between the reference's two best logits
    error: float | None  # of the logits, in logits (metrics.rms_error)


class Top1(TypedDict):
    equal: int
    of: int
    changed: list[Change]


class Free(TypedDict):
    """A free run's tokens against the reference's generated ones."""

    tokens: list[int]
    reference: list[int]
    equal: dict[str, bool | None]  # generated step, and `end`; null where the reference has no such step
    diverged: Change | None
    ended: bool
    reference_ended: bool


class Perplexity(TypedDict):
    tokens: int
    value: float | None
    reference: float | None
    kl: float | None  # nats


class Behaviour(TypedDict):
    """Over all texts of a row."""

    tokens: int
    perplexity: float | None
    reference: float | None
    ratio: float | None
    kl: float | None
    top1: float | None
    behaves: bool


class Place(Worst, total=False):
    """Where a gate broke first."""

    stage: str
    gate: str
    generated: int  # step of a free run, counted from the prompt's end


class Where(TypedDict, total=False):
    """What a finding says of itself beside its kind and text."""

    gate: str
    program: str
    history: str
    tensor: str
    state: str
    layer: int | None
    step: int
    position: int
    value: float | None
    count: int  # of all such places
    how: str  # the values were moved
    token: int
    reference: int
    margin: float | None
    error: float | None
    share: float
    advice: str
    window: int


class Finding(Where):
    kind: str  # a short fixed word
    text: str  # one line


class Count(TypedDict):
    """Steps of a history, or tokens of a free run."""

    got: int
    of: int


class Program(TypedDict):
    """The body of metrics.json of a program. Open: the measures add what is of no history, `free` among it."""

    states: list[str]  # names of those that get an entry a token, in the order of the arrays' second axis
    replaced: list[str]  # of those that each step replaces
    histories: dict[str, Figures]  # steps, positions, and what the measures say
    findings: list[Finding]
    free: NotRequired[Free | None]
    perplexity: NotRequired[Perplexity | None]
    steps: NotRequired[dict[str, Count]]  # this and the next two are verify's: by history, and `free`
    kind: NotRequired[str]  # `chat`, `text`
    part: NotRequired[str]


class GateRecord(TypedDict):
    """A gate in verdict.json."""

    name: str
    verdict: str  # `pass`, `warn`, `fail`
    text: str  # one line: what was got, what is allowed
    program: str
    history: str
    value: float | None  # the worst
    first: Place  # empty where nothing broke


class Verdict(TypedDict, total=False):
    """The body of verdict.json."""

    verdict: str  # `pass`, `warn`, `fail`, `blocked`
    reason: str  # one line
    row: dict[str, str]
    first: Place | None  # null where nothing broke
    gates: list[GateRecord]
    risks: list[str]
    findings: list[Record]  # of the build, the run and all programs
    figures: Figures
    cause: str  # this, `remedy` and `coverage` not of a blocked row
    remedy: str
    coverage: dict[str, float]  # share of the values beyond its calibrated range, by cache tensor
    announce: str  # the row in a line, as it finishes
    status: str  # this and the next one are the runner's
    key: Record
    stale: str  # of one that was read, and is not what would be judged now: why


def finding(kind: str, text: str, **where: Unpack[Where]) -> Finding:
    return {"kind": kind, "text": text, **where}
