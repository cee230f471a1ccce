"""Ask what a sweep ships: the best row's bundle, on this PC."""

import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from kvgate import columns, ship, table
from kvgate.sweep import HOST_PLATFORM, Row


def main(results: Path, sweep: str, rows: Iterable[Row], wanted: Collection[str], prompt: str) -> int:
    """Print which row is asked and what its bundle answers, as it answers. 1: there is no bundle, or it fails.

    The best row of a chip; of the host's graphs where there is none.
    """
    place = results / "bundles" / sweep
    found = {path: v for v in table.load(results, (r.wildcards() for r in rows)) if (path := ship.folder(v, wanted))}
    there = {path: v for path, v in found.items() if (place / path / "generate.py").is_file()}
    chips = {path: v for path, v in there.items() if v["row"]["platform"] != HOST_PLATFORM}
    best = ship.best_row((chips or there).values())
    if best is None:
        print(f"kvgate ask: {place}: got no bundle, allowed: a sweep that ships one", file=sys.stderr)
        return 1
    folder = place / ship.folder(best, wanted)
    prompt = prompt or ship.PROMPT
    print(f"{columns.name(best['row'])}, asked {prompt!r}:", flush=True)
    return subprocess.run([sys.executable, str(folder / "generate.py"), prompt], check=False).returncode
