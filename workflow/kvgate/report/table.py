"""The table in a terminal: the rows that there are at any time, the counts, and where to look next. Stdlib only."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvgate.jobs.job import record_path
from kvgate.jobs.rows import Row
from kvgate.judging import judged, measures
from kvgate.judging.records import Verdict
from kvgate.report import bundle, columns, ship

_NONE: Mapping[str, str] = {}
VERDICTS = ("pass", "warn", "fail", "blocked")
# The terminal's columns: name of a column of the table, title. The measures' own stand between.
_NAMES = (
    ("strategy", "strategy"),
    ("quant", "quant"),
    ("dtype", "dtype"),
    ("verdict", "verdict"),
)
_COSTS = (
    ("cpu_operators", "CPU ops"),
    ("predicted_cycles", "Mcycles*"),
    ("first_token_cycles", "prompt of 64*"),
    ("predicted_traffic_bytes", "traffic MiB*"),
    ("artifact_bytes", "file MiB"),
)
# Only where a board has measured something.
_MEASURED = (("total_ms", "ms a token"), ("tokens_per_second", "tokens/s"))


def path(results: Path, row: Mapping[str, str]) -> Path:
    return results / record_path("judge", dict(row))


def load(results: Path, rows: Iterable[Mapping[str, str]], outdated: Mapping[str, str] = _NONE) -> list[Verdict]:
    """The verdicts that there are, in the order of the rows; those that are not what would be judged now have `stale`.

    outdated: records to why (audit.outdated).
    """
    found: list[Verdict] = []
    for row in rows:
        where = record_path("judge", dict(row))
        if (results / where).exists():
            verdict = judged.read(results / where)
            if where in outdated:
                verdict["stale"] = outdated[where]
            found.append(verdict)
    return found


def compact(verdicts: Sequence[Verdict]) -> str:
    """The rows as aligned text; columns in which all rows are equal and that only name the row stand above it."""
    shared = ("model", "weights", "platform", "backend")
    lead = [name for name in shared if len({v["row"][name] for v in verdicts}) > 1]
    there = set(columns.names(verdicts))
    measured = [x for of in measures.every() for x in of.terminal.items()]
    titled = [
        *(x for x in (*_NAMES, *measured, *_COSTS) if x[0] in there),
        *(x for x in _MEASURED if any(v["figures"].get(x[0]) is not None for v in verdicts)),
    ]
    rows = [[*lead, *(title for _, title in titled)]]
    names = [name for name, _ in titled]
    rows += [[*(v["row"][n] for n in lead), *columns.cells(v, names, people=True)] for v in verdicts]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    same = [verdicts[0]["row"][n] for n in shared if n not in lead]
    return "\n".join([*([" ".join(same)] if same else []), *lines, "* predicted by the compiler, a token"])


def summary(results: Path, verdicts: Sequence[Verdict], planned: int, shelf: ship.Shelf) -> str:
    """The counts, where to look for the first red row, which rows behave, and at the end what to ship.

    Of stale rows nothing is said but how many.
    """
    there = len(verdicts)
    verdicts = [v for v in verdicts if not v.get("stale")]
    counts = Counter(v["verdict"] for v in verdicts)
    lines = [", ".join(f"{counts[name]} {name}" for name in VERDICTS)]
    if len(verdicts) < there:
        lines[0] += f", {there - len(verdicts)} stale: a plain run judges them again"
    if there < planned:
        lines[0] += f", {planned - there} not there yet"
    red = next((v for v in verdicts if v["verdict"] in ("fail", "blocked")), None)
    if red:
        lines.append(f"first red row: {columns.name(red['row'])}: {red['reason']}")
        lines.append(f"  see {path(results, red['row'])}")
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for v in verdicts:
        groups.setdefault((v["row"]["model"], v["row"]["platform"]), []).append(v)
    for (model, platform), group in groups.items():
        lines += _behaving(model, platform, group)
    return "\n".join(lines + ship.lines(shelf, verdicts))


def _behaving(model: str, platform: str, verdicts: Sequence[Verdict]) -> list[str]:
    """The smallest and the fastest predicted artifact that behaves, gates or not; one line where they are one row."""
    rows = [v for v in verdicts if v["figures"].get("artifact_bytes") and _behaves(v)]
    words: dict[str, list[str]] = {}
    for word, name in (("smallest", "artifact_bytes"), ("fastest predicted", "cycles")) if rows else ():
        best = min(rows, key=lambda v: v["figures"][name] or float("inf"))
        titles = ["perplexity_ratio", "top1_text", "artifact_bytes", "predicted_cycles"]
        ratio, top1, size, cycles = columns.cells(best, titles, people=True)
        row = best["row"]
        text = f"{row['weights']} {row['strategy']} {row['quant']} ({best['verdict']})"
        text += f": perplexity x {ratio}, top-1 {top1}, {size} MiB, {cycles} Mcycles"
        words.setdefault(text, []).append(word)
    return [f"{' and '.join(x)} of {model} on {platform} that behaves: {text}" for text, x in words.items()]


def _behaves(verdict: Verdict) -> bool:
    return bool((verdict["figures"].get("behaviour") or {}).get("behaves"))


def main(results: Path, sweep: str, rows: Sequence[Row], wanted: Sequence[str], outdated: Mapping[str, str]) -> int:
    """`python -m kvgate table`: what there is now. Returns 1 where there is no verdict at all.

    wanted: the config's sweep.bundle. outdated: as in `load`.
    """
    verdicts = load(results, (row.wildcards() for row in rows), outdated)
    if not verdicts:
        print(f"sweep {sweep}: no row is finished yet, {len(rows)} planned", file=sys.stderr)
        return 1
    print(compact(verdicts))
    there = bundle.whole(results, sweep)
    print(summary(results, verdicts, len(rows), ship.Shelf(results / "bundles" / sweep, wanted, there)))
    return 0


def gate(
    results: Path, rows: Sequence[Row], require: Sequence[Mapping[str, object]], outdated: Mapping[str, str]
) -> int:
    """`python -m kvgate gate`: one line for each required row that is not `pass`, or whose verdict is not what would be
    judged now; returns 1 where there is one.

    require: patterns (column -> value or values); none means every row. A pattern that no row matches fails too.
    outdated: as in `load`.
    """
    wanted = [row for row in rows if not require or any(row.matches(pattern) for pattern in require)]
    lines = [f"required, but no row matches: {p}" for p in require if not any(row.matches(p) for row in rows)]
    for row in wanted:
        there = load(results, [row.wildcards()], outdated)
        verdict = there[0] if there else {"verdict": "missing", "reason": "not judged yet"}
        word, reason = verdict["verdict"], verdict["reason"]
        if verdict.get("stale"):
            word, reason = "stale", f"was {word}; {verdict['stale']}: run snakemake"
        if word != "pass":
            lines.append(f"{word}: {ship.row_name(row.wildcards())}: {reason}")
    if not wanted and not lines:
        lines.append("no row is required: nothing was held to anything")
    print("\n".join(lines) if lines else f"gate: {len(wanted)} required rows pass")
    return 1 if lines else 0
