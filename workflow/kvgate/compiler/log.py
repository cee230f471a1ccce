"""What the toolkit prints, as data: warnings and errors -> findings, the layer table -> rows."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from kvgate.jobs.record import finding

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MARK = re.compile(r"\x1b\[[0-9;]*m([WE])\x1b\[0m")  # may follow a progress bar on the same line
_STAMP = re.compile(r"^([DIWE]) RKNN: \[[0-9:.]+\] ?")
_LEVEL = re.compile(r"^([WE]) (.*)$")

# kind, pattern of the line, what the finding says of all such lines ({n}: how many, {what}: the first one's group).
_KNOWN = (
    (
        "random_weights",
        r"Load external data for '(.*?)' failed",
        "weights of {what} were not found: built with random ones",
    ),
    (
        "fp16_range",
        r"The range \[.*?\] of '(.*?)' is out of the float16",
        "{n} values left float16, the first in {what}",
    ),
    ("unknown_target", r"Unkown op target: (\d+)", "{n} operators without a known target (seen on right graphs too)"),
    ("constant_output", r"These outputs (\[.*?\]) of model are constants", "constant outputs {what} were removed"),
    ("constant_changed", r"(For tensor .*?has been corrected to [-\d.e+]+)", "{n} constants changed: {what}"),
    ("level_changed", r"(optimization_level.*Set it to '\d')", "the toolkit changed an argument: {what}"),
    ("expanded", r"(Try expand dims.*)", "{n} calibration arrays lacked a dimension"),
    (
        "dtype_changed",
        r"The default (?:in|out)put dtype of .*? is changed from ('\w+' to '\w+')",
        "{n} inputs and outputs changed dtype: {what}",
    ),
)
_PATTERNS = tuple((kind, re.compile(pattern), text) for kind, pattern, text in _KNOWN)
# Printed on every build, whatever the graph.
_HARMLESS = re.compile(
    r"config\.(mean|std)_values is None|need parameter qtype|(Set|Restore) temperate env|pkg_resources|"
    r"default (out|in)put layout|WARN\(\d+\)|rknn-toolkit2 version|Traceback \(most recent|"
    r"Show op fuse match|You can add disable_rules"
)
_MOST_WARNINGS = 10


def lines(text: str) -> list[str]:
    """The log's lines without colours, progress bars and time stamps."""
    plain = _COLOUR.sub("", _MARK.sub(r"\n\1", text)).replace("\r", "\n")
    return [_STAMP.sub(r"\1 ", line).rstrip() for line in plain.split("\n") if line.strip()]


def findings(text: str) -> list[dict[str, Any]]:
    """Findings of a log: one a kind, with `count`; then errors, then warnings that no kind names."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    errors: list[str] = []  # true ones: the toolkit also prints its version and tracebacks as errors
    others: Counter[str] = Counter()
    for line in lines(text):
        known = next(((k, m) for k, p, _ in _PATTERNS if (m := p.search(line))), None)
        if known:
            kind, match = known
            counts[kind] += 1
            first.setdefault(kind, match.group(1))
        elif (level := _LEVEL.match(line)) and not _HARMLESS.search(line):
            if level.group(1) == "W":
                others[re.sub(r"'[^']*'|\d+", "#", level.group(2))[:160]] += 1
            else:
                errors.append(level.group(2).strip())
    found = [
        finding(kind, text.format(n=counts[kind], what=first[kind]), count=counts[kind])
        for kind, _, text in _PATTERNS
        if counts[kind]
    ]
    if errors:
        found.append(finding("error", bare(errors[-1])[:300], count=len(errors)))
    found += [finding("warning", bare(t), count=n) for t, n in others.most_common(_MOST_WARNINGS)]
    return found


def hybrid(text: str) -> dict[str, str]:
    """{tensor: dtype} of the tensors that hybrid quantization, by patterns or automatic, left at another dtype."""
    found = (re.search(r"Meet hybrid type, dtype: (\w+), tensor: (.+)$", line) for line in lines(text))
    return {match.group(2): match.group(1) for match in found if match}


def rule(text: str) -> str:
    """The fusion rule that the toolkit blames for a failed build, as `rule x at node`; empty where it blames none."""
    found = re.search(r"Rule: (\w+)\s+Subgraph:.*?Op name: (\S+).*?You can add disable_rules=\['\1'\]", text, re.DOTALL)
    return f"rule {found.group(1)} at {found.group(2)}" if found else ""


def bare(text: str) -> str:
    """The text with file names instead of absolute paths: a record is the same wherever it was made.

    Names of ONNX nodes look like absolute paths too: those whose first folder is not on this machine are kept.
    """

    def short(match: re.Match[str]) -> str:
        return "" if Path("/", match.group().split("/")[1]).exists() else match.group()

    return re.sub(r"(?<![\w.])/(?:[^\s/'\"]+/)+(?=[^\s/'\"]+)", short, text)


def last_error(text: str) -> str:
    """The last error line, empty where there is none."""
    return next((x["text"] for x in findings(text) if x["kind"] == "error"), "")


@dataclass(frozen=True)
class Line:
    """A row of the compiler's layer table. The table is in execution order: never read outputs' order from it."""

    operator: str
    dtype: str
    target: str
    name: str
    cycles: int | None  # predicted, total
    traffic: float | None  # RW column, units of 1024 bytes


class Summary(TypedDict):
    """Figures of a build record. None where the platform's table lacks the column. Bytes are predicted ones."""

    rows: int
    operators: dict[str, int]  # `Operator@Target` to how many
    cpu_operators: dict[str, int]
    cpu_names: list[str]
    cycles: int | None
    operator_cycles: dict[str, int]  # `Operator@Target` to cycles; only operators that have some
    traffic_bytes: int | None
    weight_bytes: int | None
    internal_bytes: int | None


@dataclass(frozen=True)
class Table:
    rows: tuple[Line, ...]
    text: str  # as printed, without time stamps
    weights: float | None  # units of 1024 bytes
    internal: float | None  # units of 1024 bytes

    def summary(self) -> Summary:
        work = [r for r in self.rows if r.operator not in ("InputOperator", "OutputOperator")]
        cpu = Counter(r.operator for r in work if r.target == "CPU")
        return {
            "rows": len(self.rows),
            "operators": dict(sorted(Counter(f"{r.operator}@{r.target}" for r in self.rows).items())),
            "cpu_operators": dict(sorted(cpu.items())),
            "cpu_names": [r.name for r in work if r.target == "CPU"],
            "cycles": _total([r.cycles for r in self.rows]),
            "operator_cycles": _by_operator(self.rows),
            "traffic_bytes": _bytes(_total([r.traffic for r in self.rows])),
            "weight_bytes": _bytes(self.weights),
            "internal_bytes": _bytes(self.internal),
        }


def _by_operator(rows: Iterable[Line]) -> dict[str, int]:
    """`Operator@Target` -> predicted cycles; only operators that have some."""
    found: Counter[str] = Counter()
    for row in rows:
        found[f"{row.operator}@{row.target}"] += row.cycles or 0
    return {name: count for name, count in sorted(found.items()) if count}


_COLUMNS = {
    "ID": r"(?P<id>\d+)",
    "OpType": r"(?P<operator>\S+)",
    "DataType": r"(?P<dtype>\S+)",
    "Target": r"(?P<target>\S+)",
    "InputShape": r"\S+",
    "OutputShape": r"\S+",
    "Cycles(DDR/NPU/Total)": r"\d+/\d+/(?P<cycles>\d+)",
    "SparseRatio": r"(?:[\d.]+%)?",
    "RW(KB)": r"(?P<traffic>[\d.]+)?",
    "FullName": r"(?P<name>.+)",
}


def table(text: str) -> Table:
    """The last layer table of a verbose log. Raises ValueError where there is none, or a row that does not fit."""
    all_lines = lines(text)
    heads = [i for i, line in enumerate(all_lines) if re.match(r"D ID\s+OpType\s", line)]
    if not heads:
        raise ValueError("layer table: not in the log")
    start = heads[-1]
    names = all_lines[start][2:].split()
    pattern = re.compile(r"\s+".join(_COLUMNS.get(n, r"\S*") for n in names).replace(r"?\s+", r"?\s*") + r"\s*$")
    rows, kept = [], [all_lines[start][2:].rstrip()]
    for line in all_lines[start + 2 :]:
        if line.startswith("D ---"):
            break
        match = pattern.match(line[2:])
        if not match:
            raise ValueError(f"layer table: got {line[2:]!r}, which does not fit the columns {names}")
        rows.append(_row(match.groupdict()))
        kept.append(line[2:])
    tail = "\n".join(all_lines[start:])
    return Table(tuple(rows), "\n".join(kept) + "\n", _size(tail, "Weight"), _size(tail, "Internal"))


def _row(got: dict[str, str | None]) -> Line:
    name = (got.get("name") or "").strip()
    cycles, traffic = got.get("cycles"), got.get("traffic")
    return Line(
        got.get("operator") or "",
        got.get("dtype") or "",
        got.get("target") or "",
        name.partition(":")[2] or name,
        int(cycles) if cycles else None,
        float(traffic) if traffic else None,
    )


def _size(text: str, what: str) -> float | None:
    """`Total Weight Memory Size: 263.1MB` in units of 1024 bytes."""
    match = re.search(rf"Total {what} Memory Size: ([\d.]+)\s*([KMG]?)i?B", text)
    return float(match.group(1)) * {"": 1 / 1024, "K": 1, "M": 1024, "G": 1024**2}[match.group(2)] if match else None


def _total(values: list[Any]) -> Any:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _bytes(units: float | None) -> int | None:
    return None if units is None else round(units * 1024)
