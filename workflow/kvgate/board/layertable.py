"""The runtime's layer table (RKNN_QUERY_PERF_DETAIL) as numbers. Standard library only, Python 3.9.

Read by the names in its header. The columns were taken from tables that others published (runtimes of 2022 to 2025);
that a board's table is read right, only a board can prove: therefore its own total must agree with the sum.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

SOURCE = "RKNN_QUERY_PERF_DETAIL"
EDGES = ("InputOperator", "OutputOperator")  # data crossing the boundary, not operators of the graph
_TARGETS = ("NPU", "CPU", "GPU")
# Names of columns that have a blank in them; all others are one word.
_WORDS = re.compile(r"(?:DDR|NPU|Total|Max) Cycles|(?:Task|Lut) Number|(?:Task|Regcmd) Size|\S+")
_STAMP = re.compile(r"^[DIWE] RKNN: \[[0-9:.]+\] ?|^[DIWE] ")
_TOTAL = re.compile(r"Total Operator Elapsed (?:Per Frame )?Time\(us\):\s*([\d.]+)")
_NEEDED = ("OpType", "Target", "Time(us)")
_OFF = 0.02  # of the total, how far the sum may be off: each time is rounded


def summary(text: str) -> dict[str, Any]:
    """{"npu_us", "cpu_us", "boundary_us", "source", "operators", "layers", "why"}, microseconds of one step.

    operators: [{"kind", "target", "us", "name"}] in order; layers: sums [{"operator", "target", "us"}], longest first.
    Times are None, with a reason in `why`, where the table was not understood.
    """
    try:
        rows = operators(text)
    except ValueError as error:
        empty = {"npu_us": None, "cpu_us": None, "boundary_us": None, "operators": None, "layers": None}
        return {**empty, "source": SOURCE, "why": "layer table: {}".format(error)}
    work = [r for r in rows if r["kind"] not in EDGES]
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for row in rows:
        sums[row["kind"], row["target"]] += row["us"]
    return {
        "npu_us": sum(r["us"] for r in work if r["target"] == "NPU"),
        "cpu_us": sum(r["us"] for r in work if r["target"] == "CPU"),
        "boundary_us": sum(r["us"] for r in rows if r["kind"] in EDGES),
        "source": SOURCE,
        "why": None,
        "operators": rows,
        "layers": _ranked(sums),
    }


def joined(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One `summary` of several, of artifacts that run one after the other; the first without times if there is one."""
    for table in tables:
        if table["npu_us"] is None:
            return dict(table)
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for row in (x for table in tables for x in table["layers"]):
        sums[row["operator"], row["target"]] += row["us"]
    return {
        **{name: sum(table[name] for table in tables) for name in ("npu_us", "cpu_us", "boundary_us")},
        "source": SOURCE,
        "why": None,
        "operators": [x for table in tables for x in table["operators"]],
        "layers": _ranked(sums),
    }


def _ranked(sums: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    ranked = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return [{"operator": kind, "target": target, "us": us} for (kind, target), us in ranked]


def operators(text: str) -> list[dict[str, Any]]:
    """The table's rows. Raises ValueError where there is no table, or its own total is another than the sum."""
    lines = [_STAMP.sub("", line).rstrip() for line in text.splitlines()]
    heads = [i for i, line in enumerate(lines) if line.startswith("ID") and all(n in line for n in _NEEDED)]
    if not heads:
        raise ValueError("got {} lines, allowed: a line with {}".format(len(lines), ", ".join(_NEEDED)))
    names = _WORDS.findall(lines[heads[-1]])
    rows = [row for row in (_row(line, names) for line in lines[heads[-1] + 1 :]) if row]
    total = _TOTAL.search("\n".join(lines[heads[-1] :]))
    added = sum(row["us"] for row in rows)
    if not rows:
        raise ValueError("got no row that fits the columns {}".format(names))
    if total and abs(added - float(total.group(1))) > max(1.0 * len(rows), _OFF * float(total.group(1))):
        raise ValueError("got rows of {:.0f} us, allowed: the total of {} us below it".format(added, total.group(1)))
    return rows


def _row(line: str, names: list[str]) -> dict[str, Any] | None:
    """A row, or None for lines of any other kind. No column before the time's has blanks in its values."""
    values = line.split()
    if not values or not values[0].isdigit() or len(values) <= names.index("Time(us)"):
        return None
    row = dict(zip(names, values))
    if row["Target"] not in _TARGETS or not re.fullmatch(r"\d+(\.\d+)?", row["Time(us)"]):
        return None
    name = values[-1].partition(":")[2] or values[-1] if names[-1] == "FullName" else ""
    return {"kind": row["OpType"], "target": row["Target"], "us": float(row["Time(us)"]), "name": name}
