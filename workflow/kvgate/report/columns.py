"""The columns of the table, their order and how people read them, and a row in one line.

Standard library only, until a cell is asked for: what is measured brings numpy.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kvgate.judging import measures
from kvgate.judging.column import Column, figure, get
from kvgate.judging.records import Verdict
from kvgate.judging.wording import TIMES, percent

if TYPE_CHECKING:
    from kvgate.judging.measure import Measure


def _verdict(verdict: Verdict) -> str:
    return f"{verdict['verdict']} (stale)" if verdict.get("stale") else str(verdict["verdict"])


def _cpu(verdict: Verdict) -> int | None:
    found = figure("cpu_operators")(verdict)
    return None if found is None else sum(found.values())


def _risks(verdict: Verdict) -> str:
    return "; ".join(verdict["risks"])


def _mib(value: float) -> str:
    return f"{value / 2**20:.1f}"


# Name in the .tsv (raw values), where it is in a verdict, how people read it (.md). Ratios are shown in percent.
_ROW = (
    *(Column(name, get("row", name), str) for name in ("model", "weights", "strategy")),
    Column("form", figure("form"), str),
    *(Column(name, get("row", name), str) for name in ("platform", "quant")),
    Column("dtype", figure("dtype"), str),  # as the artifact was built, whatever the quant's name
    Column("backend", get("row", "backend"), str),
    Column("verdict", _verdict, str),
    Column("reason", get("reason"), str),
)
_COSTS = (
    Column("cpu_operators", _cpu, str),
    Column("rows", figure("rows"), str),
    Column("predicted_cycles", figure("cycles"), str),
    Column("first_token_cycles", figure("first_token_cycles"), str),
    Column("prefill_tokens", figure("prefill_tokens"), str),
    Column("predicted_traffic_bytes", figure("traffic_bytes"), str),
    Column("weight_bytes", figure("weight_bytes"), str),
    Column("history_bytes", figure("history_bytes"), str),
    Column("delta_bytes", figure("delta_bytes"), str),
    Column("artifact_bytes", figure("artifact_bytes"), str),
    Column("simulator", figure("simulator_verdict"), str),
    Column("tokens_per_second", figure("tokens_per_second"), lambda v: f"{v:.2f}"),
    *(Column(f"{name}_ms", figure(f"{name}_ms"), lambda v: f"{v:.2f}") for name in TIMES),
    Column("clock_state", figure("clock_state"), str),
    Column("risks", _risks, str),
)


@cache
def every() -> tuple[Column, ...]:
    """All columns in their order: the errors that have a least one in float16, that one, then the other measures'."""
    found = measures.every()
    errors = [x for x in found if x.floor]
    others = [column for x in found if not x.floor for column in x.columns]
    floors = [column for x in errors for column in _floor(x)]
    return *_ROW, *(column for x in errors for column in x.columns), *floors, *others, *_COSTS


def _floor(of: "Measure") -> tuple[Column, ...]:
    """The column of an error's least in float16, where it has one."""
    return (Column(f"{of.name}_float16", figure("float16", of.name), percent),) if of.floor else ()


@cache
def _optional() -> tuple[str, ...]:
    """Columns that a table has only where a row has something there."""
    found = [x for x in measures.every() if x.optional]
    return tuple(column.name for x in found for column in (*x.columns, *_floor(x)))


# The columns that differ in the .md: a title with the unit, and the value in it.
UNITS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "predicted_cycles": ("predicted Mcycles a token", lambda v: f"{v / 1e6:.1f}"),
    "first_token_cycles": ("predicted Mcycles to the first token of a prompt of 64", lambda v: f"{v / 1e6:.0f}"),
    "predicted_traffic_bytes": ("predicted traffic MiB a token", _mib),
    "weight_bytes": ("weights MiB", _mib),
    "history_bytes": ("history KiB a step", lambda v: f"{v / 1024:.0f}"),
    "delta_bytes": ("returned K/V KiB a step", lambda v: f"{v / 1024:.0f}"),
    "artifact_bytes": ("artifact MiB", _mib),
}


def names(verdicts: Sequence[Verdict]) -> list[str]:
    """The columns of a table of these rows."""
    empty = [name for name in _optional() if not any(any(cells(v, [name], people=False)) for v in verdicts)]
    return [column.name for column in every() if column.name not in empty]


def cells(verdict: Verdict, names: Sequence[str], people: bool) -> list[str]:
    """A row's cells. people: rounded and in the units of the .md; else raw, with 6 significant digits. None: empty."""
    known = {column.name: column for column in every()}
    found = []
    for name in names:
        column = known[name]
        value, form = column.get(verdict), column.form
        if not people:
            form = str
        elif name in UNITS:
            form = UNITS[name][1]
        found.append("" if value is None else " ".join(form(value).split()))
    return found


def name(row: Mapping[str, str]) -> str:
    """A row's name in a sentence: `smollm2-135m int8 cpu_managed w8a8 rk3576 (simulator)`, plain weights unsaid."""
    weights = "" if row["weights"] == "plain" else f" {row['weights']}"
    return f"{row['model']}{weights} {row['strategy']} {row['quant']} {row['platform']} ({row['backend']})"


def line(verdict: Verdict) -> str:
    """A row in one line, as it finishes: `pass    tiny cpu_managed fp16 rk3576 (simulator): all 9 gates hold`."""
    return f"{verdict['verdict']:<7} {name(verdict['row'])}: {verdict['reason']}"
