"""Ask what a sweep ships: the best row's bundle, on this PC."""

import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kvgate.jobs import hashed, record
from kvgate.jobs.job import Job, record_path
from kvgate.jobs.rows import HOST_PLATFORM, Row
from kvgate.report import bundle, columns, ship, table


def main(results: Path, sweep: str, rows: Iterable[Row], wanted: Collection[str], prompt: str) -> int:
    """Print which row is asked and what its bundle answers, as it answers. 1: there is no bundle, or it fails.

    The best row of a chip; of the host's graphs where there is none.
    """
    place = results / "bundles" / sweep
    found = {path: v for v in table.load(results, (r.wildcards() for r in rows)) if (path := ship.folder(v, wanted))}
    whole = bundle.whole(results, sweep)
    there = {path: v for path, v in found.items() if path in whole}
    chips = {path: v for path, v in there.items() if v["row"]["platform"] != HOST_PLATFORM}
    best = ship.best_row((chips or there).values())
    if best is None:
        print(f"kvgate ask: {place}: got no bundle, allowed: a sweep that ships one", file=sys.stderr)
        return 1
    wrong = _graph(results, best["row"])
    if wrong:
        print(f"kvgate ask: {wrong}", file=sys.stderr)
        return 1
    folder = place / ship.folder(best, wanted)
    prompt = prompt or ship.PROMPT
    print(f"{columns.name(best['row'])}, asked {prompt!r}:", flush=True)
    return subprocess.run([sys.executable, str(folder / "generate.py"), prompt], check=False).returncode


def _graph(results: Path, row: Mapping[str, str]) -> str:
    """Why the graph that answers on a PC is not the one that was exported; empty where it is."""
    above = results / record_path("export", {**row, "part": "decode"})
    job = Job("ask", {}, {}, {"export": above}, results)
    try:
        for name in job.read("export")["files"]:
            job.file("export", name, hashed.sha256)
    except record.Blocked as why:
        return why.reason
    return ""
