"""tabulate: all verdicts of a sweep -> acceptance.tsv, acceptance.md and acceptance.json, and the bundles.

A bundle for each row that sweep.bundle wants (report/bundle.py). Those of this sweep's rows that it no longer does
are removed, and the store is cut to its limit.
"""

from pathlib import Path
from typing import Any

from kvgate.jobs import record, store
from kvgate.jobs.job import Job
from kvgate.judging import judged
from kvgate.judging.records import Verdict
from kvgate.report import bundle, columns, ship, table
from kvgate.report.columns import UNITS

TAKES_BLOCKED = True


def run(job: Job) -> dict[str, Any]:
    """The body has the rows (column -> raw cell), the counts, and `announce`: what the terminal shows at the end.

    `bundles`: their folders, below the results folder, to the sha256 of their checksums. With `refused`, the rows whose
    bundle could not be made, the table is made again by the next run.
    """
    sweep = job.wildcards["sweep"]
    verdicts = [judged.read(path) for path in job.inputs.values()]
    names = columns.names(verdicts)
    rows = [columns.cells(v, names, people=False) for v in verdicts]
    tsv = "\n".join("\t".join(cells) for cells in [names, *rows]) + "\n"
    texts = {"acceptance.tsv": tsv, "acceptance.md": _markdown(sweep, verdicts)}
    files = {name: record.write_bytes(job.folder / name, text.encode()) for name, text in texts.items()}
    shown = Path(job.results.name)  # no absolute path in a record
    written = bundle.write(job.results, sweep, verdicts, job.config["bundle"])
    shelf = ship.Shelf(shown / "bundles" / sweep, job.config["bundle"], written.made, written.refused)
    store.prune(job.results, job.config["store_gb"])
    return {
        "files": files,
        "rows": [dict(zip(names, cells, strict=True)) for cells in rows],
        "counts": {name: sum(v["verdict"] == name for v in verdicts) for name in table.VERDICTS},
        "bundles": {f"bundles/{sweep}/{path}": sha for path, sha in written.made.items()},
        "announce": f"\n{table.compact(verdicts)}\n{table.summary(shown, verdicts, len(verdicts), shelf)}",
    } | ({"refused": written.refused, "again": True} if written.refused else {})


def _markdown(sweep: str, verdicts: list[Verdict]) -> str:
    names = columns.names(verdicts)
    counts = ", ".join(f"{sum(v['verdict'] == name for v in verdicts)} {name}" for name in table.VERDICTS)
    titles = [UNITS[name][0] if name in UNITS else name.replace("_", " ") for name in names]
    lines = [f"# Sweep {sweep}: {counts}", "", "L2 is normalized, in percent. Cycles and traffic are predicted by the"]
    lines[-1] += " compiler. Raw values: acceptance.tsv. Where a gate broke: the row's verdict.json."
    lines += ["", _row(titles), _row(["---"] * len(titles))]
    lines += [_row(columns.cells(v, names, people=True)) for v in verdicts]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
