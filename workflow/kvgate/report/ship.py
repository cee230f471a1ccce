"""What to ship of a sweep: the best row, where its bundle lies, and the command that talks to it. Stdlib only."""

import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvgate.jobs.rows import HOST_PLATFORM, ROW
from kvgate.judging import behaviour
from kvgate.judging.records import Verdict
from kvgate.report import columns

WORDS = {"pass": "pass", "warn": "warn", "behaves": "red by the gates, behaves"}
PROMPT = "What is the capital of France?"
_ASKED = f'"{PROMPT}"'
_LISTED = 3  # other bundles that are named one by one; more are counted


@dataclass(frozen=True)
class Shelf:
    """The bundles of a sweep: what is wanted there, and what is."""

    place: Path  # results/bundles/{sweep}, as a person calls it
    wanted: Sequence[str]  # the config's sweep.bundle
    there: Collection[str]  # folders below `place`
    refused: Mapping[str, str] = field(default_factory=dict)  # folder to the reason why it could not be made


def folder(verdict: Verdict, wanted: Collection[str]) -> str:
    """The row's bundle below results/bundles/{sweep}, named by the row and by what it ships as; empty: it has none."""
    word = behaviour.ships(verdict)
    return f"{row_name(verdict['row'])}-{word}" if word and word in wanted else ""


def row_name(row: Mapping[str, str]) -> str:
    return "/".join(row[name] for name in ROW)


def best_row(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The row to ship: pass before warn before one that behaves, then the shortest measured step, the fewest operators
    left to the CPU, the fewest MiB of artifact, the fewest predicted cycles, the least predicted traffic.

    Times of different clock states are not compared: where there are several, no time counts.
    """
    shipping = [v for v in verdicts if behaviour.ships(v)]
    timed = [v for v in shipping if v["figures"].get("total_ms") is not None]
    comparable = len({(v["row"]["backend"], v["figures"]["clock_state"]) for v in timed}) == 1

    def rank(v: Verdict) -> tuple[float, ...]:
        f, none = v["figures"], float("inf")
        time = f.get("total_ms") if comparable else None
        size = round(f["artifact_bytes"] / 2**20) if f.get("artifact_bytes") else none
        left = sum((f.get("cpu_operators") or {}).values())
        cost = (left, size, f.get("cycles") or none, f.get("traffic_bytes") or none)
        return behaviour.SHIPS.index(behaviour.ships(v)), time or none, *cost

    return min(shipping, key=rank, default=None)


def lines(shelf: Shelf, verdicts: Sequence[Verdict]) -> list[str]:
    """What has nothing to ship; then for each model and platform what to ship, chips last."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for v in verdicts:
        groups.setdefault((v["row"]["model"], v["row"]["platform"]), []).append(v)
    nothing, ships = [], []
    for (model, platform), group in sorted(groups.items(), key=lambda x: x[0][1] != HOST_PLATFORM):
        named = {path: v for v in group if (path := folder(v, shelf.wanted))}
        there = {path: v for path, v in named.items() if path in shelf.there}
        nothing += [
            f"no bundle of {columns.name(named[x]['row'])}: {shelf.refused[x]}" for x in named if x in shelf.refused
        ]
        gone = len(named.keys() - there.keys() - shelf.refused.keys())
        if gone:
            nothing.append(f"{gone} bundles of {model} on {platform} are gone: a plain run makes them again")
        if there:
            ships += _group(shelf, there)
        elif not named:
            nothing.append(f"nothing to ship of {model} on {platform}: {_why(shelf.wanted)}{_closest(group)}")
    return nothing + ships


def _group(shelf: Shelf, there: Mapping[str, Verdict]) -> list[str]:
    """The best row with its commands, and where the others lie."""
    best = best_row(there.values())
    first = next(path for path, v in there.items() if v is best)
    row, place = there[first]["row"], shelf.place / first
    found = [f"ship ({WORDS[behaviour.ships(there[first])]}): {_what(there[first])}: {place}"]
    found.append(f"  on this PC: {_python()} {shlex.quote(str(place / 'generate.py'))} {_ASKED}")
    if row["platform"] != HOST_PLATFORM:
        found.append(f"  on a board ({row['platform']}): copy that folder, then in it: python3 generate.py {_ASKED}")
    others = {path: v for path, v in there.items() if path != first}
    if len(others) <= _LISTED:
        found += [
            f"  also ({WORDS[behaviour.ships(v)]}): {_what(v)}: {shelf.place / path}" for path, v in others.items()
        ]
    else:
        counts = Counter(behaviour.ships(v) for v in others.values())
        said = ", ".join(f"{counts[word]} {word}" for word in behaviour.SHIPS if counts[word])
        where = shelf.place / row["model"] / "*" / "*" / row["platform"]
        found.append(f"  {len(others)} more ({said}): {where}")
    return found


def _what(verdict: Verdict) -> str:
    """`tiny cpu_managed fp16 rk3576 (simulator), 278.0 MiB`; of a row without an artifact, what it is."""
    (size,) = columns.cells(verdict, ["artifact_bytes"], people=True)
    host = verdict["row"]["platform"] == HOST_PLATFORM
    return f"{columns.name(verdict['row'])}, {'the graph in ONNX Runtime, no NPU' if host else size + ' MiB'}"


def _python() -> str:
    """This interpreter, which has what the graph needs, as one calls it from here; no path of this machine."""
    path, here = Path(sys.executable), Path.cwd()
    return shlex.quote(str(path.relative_to(here))) if path.is_relative_to(here) else "python3"


def _why(wanted: Sequence[str]) -> str:
    return f"no row is {' or '.join(wanted)}" if wanted else "sweep.bundle is []"


def _closest(verdicts: Sequence[Verdict]) -> str:
    """The red row with the smallest error: what to look at first where nothing is green."""
    built = [v for v in verdicts if v["figures"].get("artifact_bytes") and v["figures"]["logits_worst"]]
    built = [v for v in built if v["figures"]["logits_worst"]["value"] is not None]
    if not built:
        return ""
    best = min(built, key=lambda v: (v["figures"]["logits_worst"]["value"], v["figures"]["traffic_bytes"] or 0))
    logits, tokens = columns.cells(best, ["logits_l2_worst", "tokens_end"], people=True)
    right = f", all tokens right in {tokens} prompts" if tokens else ""  # none where no prompt is answered
    return f"; closest: {columns.name(best['row'])}, logits off by at most {logits}{right}"
