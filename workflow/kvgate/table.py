"""The table in a terminal: the rows that there are at any time, the counts, and where to look next. Stdlib only."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvgate import columns, record
from kvgate.columns import COLUMNS, ROW, UNITS
from kvgate.job import record_path

Verdict = Mapping[str, Any]
VERDICTS = ("pass", "warn", "fail", "blocked")
# The terminal's columns: name of a column of the table, title.
_COMPACT = (
    ("strategy", "strategy"),
    ("quant", "quant"),
    ("verdict", "verdict"),
    ("kv_l2_worst", "K/V worst"),
    ("kv_l2_over_1_percent", "over 1 %"),
    ("logits_l2_worst", "logits"),
    ("top1", "top-1"),
    ("tokens_end", "to end"),
    ("perplexity_ratio", "perplexity x"),
    ("top1_text", "top-1 text"),
    ("behaves", "behaves"),
    ("cpu_operators", "CPU ops"),
    ("predicted_cycles", "Mcycles*"),
    ("predicted_traffic_bytes", "traffic MiB*"),
    ("artifact_bytes", "file MiB"),
)
# Only where a board has measured something.
_MEASURED = (("total_ms", "ms a token"), ("tokens_per_second", "tokens/s"))


class Row(Protocol):
    """A row of the sweep (sweep.Row)."""

    def wildcards(self) -> dict[str, str]: ...

    def matches(self, pattern: dict[str, Any]) -> bool: ...


def path(results: Path, row: Mapping[str, str]) -> Path:
    return results / record_path("judge", dict(row))


def load(results: Path, rows: Iterable[Mapping[str, str]]) -> list[Verdict]:
    """The verdicts that there are, in the order of the rows."""
    return [record.read(p) for p in (path(results, row) for row in rows) if p.exists()]


def cells(verdict: Verdict, names: Sequence[str], people: bool) -> list[str]:
    """A row's cells. people: rounded and in the units of the .md; else raw, with 6 significant digits. None: empty."""
    known = {name: (get, form) for name, get, form in COLUMNS}
    found = []
    for name in names:
        get, form = known[name]
        value = get(verdict)
        if not people:
            form = str
        elif name in UNITS:
            form = UNITS[name][1]
        found.append("" if value is None else " ".join(form(value).split()))
    return found


def compact(verdicts: Sequence[Verdict]) -> str:
    """The rows as aligned text; columns in which all rows are equal and that only name the row stand above it."""
    shared = ("model", "weights", "platform", "backend")
    lead = [name for name in shared if len({v["row"][name] for v in verdicts}) > 1]
    titled = [*_COMPACT, *(x for x in _MEASURED if any(v["figures"].get(x[0]) is not None for v in verdicts))]
    rows = [[*lead, *(title for _, title in titled)]]
    names = [name for name, _ in titled]
    rows += [[*(v["row"][n] for n in lead), *cells(v, names, people=True)] for v in verdicts]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    same = [verdicts[0]["row"][n] for n in shared if n not in lead]
    return "\n".join([*([" ".join(same)] if same else []), *lines, "* predicted by the compiler, a token"])


def summary(results: Path, sweep: str, verdicts: Sequence[Verdict], planned: int) -> str:
    """The counts, where to look for the first red row, and what to ship for the best green one."""
    counts = Counter(v["verdict"] for v in verdicts)
    lines = [", ".join(f"{counts[name]} {name}" for name in VERDICTS)]
    if len(verdicts) < planned:
        lines[0] += f", {planned - len(verdicts)} not there yet"
    red = next((v for v in verdicts if v["verdict"] in ("fail", "blocked")), None)
    if red:
        lines.append(f"first red row: {columns.name(red['row'])}: {red['reason']}")
        lines.append(f"  see {path(results, red['row'])}")
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for v in verdicts:
        groups.setdefault((v["row"]["model"], v["row"]["platform"]), []).append(v)
    for (model, platform), group in groups.items():
        best = best_row(group)
        if best:
            lines.append(f"ship ({best['verdict']}): {results / 'bundles' / sweep / row_name(best['row'])}")
        else:
            why = f"no row with an artifact passes{_closest(group)}"
            lines.append(f"nothing to ship of {model} on {platform}: {why}")
        lines += _behaving(model, platform, group)
    return "\n".join(lines)


def _behaving(model: str, platform: str, verdicts: Sequence[Verdict]) -> list[str]:
    """The smallest and the fastest predicted artifact that behaves, gates or not; one line where they are one row."""
    rows = [v for v in verdicts if v["figures"].get("artifact_bytes") and _behaves(v)]
    words: dict[str, list[str]] = {}
    for word, name in (("smallest", "artifact_bytes"), ("fastest predicted", "cycles")) if rows else ():
        best = min(rows, key=lambda v: v["figures"][name] or float("inf"))
        titles = ["perplexity_ratio", "top1_text", "artifact_bytes", "predicted_cycles"]
        ratio, top1, size, cycles = cells(best, titles, people=True)
        row = best["row"]
        text = f"{row['weights']} {row['strategy']} {row['quant']} ({best['verdict']})"
        text += f": perplexity x {ratio}, top-1 {top1}, {size} MiB, {cycles} Mcycles"
        words.setdefault(text, []).append(word)
    return [f"{' and '.join(x)} of {model} on {platform} that behaves: {text}" for text, x in words.items()]


def _behaves(verdict: Verdict) -> bool:
    return bool((verdict["figures"].get("behaviour") or {}).get("behaves"))


def _closest(verdicts: Sequence[Verdict]) -> str:
    """The red row with the smallest error: what to look at first where nothing is green."""
    built = [v for v in verdicts if v["figures"].get("artifact_bytes") and v["figures"]["logits_worst"]]
    built = [v for v in built if v["figures"]["logits_worst"]["value"] is not None]
    if not built:
        return ""
    best = min(built, key=lambda v: (v["figures"]["logits_worst"]["value"], v["figures"]["traffic_bytes"] or 0))
    logits, tokens = cells(best, ["logits_l2_worst", "tokens_end"], people=True)
    right = f", all tokens right in {tokens} prompts" if tokens else ""  # none where no prompt is answered
    return f"; closest: {columns.name(best['row'])}, logits off by at most {logits}{right}"


def best_row(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The row to ship: pass before warn, then the shortest measured step, then the fewest predicted cycles.

    Times of different clock states are not compared: where there are several, no time counts.
    """
    green = [v for v in verdicts if ships(v)]
    timed = [v for v in green if v["figures"].get("total_ms") is not None]
    comparable = len({(v["row"]["backend"], v["figures"]["clock_state"]) for v in timed}) == 1

    def rank(v: Verdict) -> tuple[int, float, float, float]:
        f, none = v["figures"], float("inf")
        time = f.get("total_ms") if comparable else None
        return VERDICTS.index(v["verdict"]), time or none, f["cycles"] or none, f["traffic_bytes"] or none

    return min(green, key=rank, default=None)


def ships(verdict: Verdict) -> bool:
    """Whether the row has an artifact that may be used."""
    return verdict["verdict"] in ("pass", "warn") and verdict["figures"].get("artifact_bytes") is not None


def row_name(row: Mapping[str, str]) -> str:
    """The row's folder below results/bundles/{sweep}."""
    return "/".join(row[name] for name in ROW)


def main(results: Path, sweep: str, rows: Sequence[Row]) -> int:
    """`python -m kvgate table`: what there is now. Returns 1 where there is no verdict at all."""
    verdicts = load(results, (row.wildcards() for row in rows))
    if not verdicts:
        print(f"sweep {sweep}: no row is finished yet, {len(rows)} planned", file=sys.stderr)
        return 1
    print(compact(verdicts))
    print(summary(results, sweep, verdicts, len(rows)))
    return 0


def gate(results: Path, rows: Sequence[Row], require: Sequence[dict[str, Any]]) -> int:
    """`python -m kvgate gate`: one line for each required row that is not `pass`; returns 1 where there is one.

    require: patterns (column -> value or values); none means every row. A pattern that no row matches fails too.
    """
    wanted = [row for row in rows if not require or any(row.matches(pattern) for pattern in require)]
    lines = [f"required, but no row matches: {p}" for p in require if not any(row.matches(p) for row in rows)]
    for row in wanted:
        where = path(results, row.wildcards())
        verdict = record.read(where) if where.exists() else {"verdict": "missing", "reason": "not judged yet"}
        if verdict["verdict"] != "pass":
            lines.append(f"{verdict['verdict']}: {row_name(row.wildcards())}: {verdict['reason']}")
    if not wanted and not lines:
        lines.append("no row is required: nothing was held to anything")
    print("\n".join(lines) if lines else f"gate: {len(wanted)} required rows pass")
    return 1 if lines else 0
