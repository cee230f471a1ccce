"""Which results are not what would be planned now: told by the records alone, so a lost .snakemake does not matter."""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kvgate.jobs import keys, record
from kvgate.judging import judged
from kvgate.planning.plan import Node, Plan
from kvgate.report import bundle


@dataclass(frozen=True)
class Finding:
    """A result that is missing, stale, or not what its record says."""

    node: Node
    kind: str  # `missing`, `stale` or `damaged`
    why: str


def audit(plan: Plan, results: Path, deep: bool = False) -> list[Finding]:
    """Compare every record with the plan, with the records it read, and with the files it lists.

    deep: also read the large files and compare their sha256; else only that they are there. Diagnoses that there are
    are results like others.
    """
    found, sums = [], {}
    for node in _all(plan, results):
        path = results / node.record
        try:
            body = record.held(path)
        except FileNotFoundError:
            found.append(Finding(node, "missing", "not made yet"))
            continue
        except (OSError, ValueError) as error:
            found.append(Finding(node, "damaged", f"{path.name} was edited or cannot be read: {error}"))
            continue
        sums[node.record] = record.sha256(path)
        why = keys.changes(node.key, body.get("key"))
        if why:
            found.append(Finding(node, "stale", "; ".join(why)))
            continue
        read = body.get("inputs", {})
        other = [label for label, below in node.inputs.items() if sums.get(below.record) != read.get(label)]
        if other:
            found.append(Finding(node, "stale", f"made from another {', '.join(other)}"))
            continue
        whole = deep or record.doubted(path)
        bad = [x for x, sha in body.get("files", {}).items() if not _holds(path.parent / x, sha, whole)]
        bad += bundle.broken(results, body.get("bundles", {}))
        wrong = judged.contradiction(body) if node.stage == "judge" and "verdict" in body else ""
        wrong = wrong or (f"missing or changed: {', '.join(bad)}" if bad else "")
        if wrong:
            found.append(Finding(node, "damaged", wrong))
    return found


def outdated(plan: Plan, results: Path) -> dict[str, str]:
    """Why each result is not what would be made now, by record: its own finding, or that of what it comes from."""
    found = {x.node.record: x.why for x in audit(plan, results)}
    for node in plan.nodes():
        above = next((x for x in node.inputs.values() if x.record in found), None)
        if above is not None and node.record not in found:
            found[node.record] = f"{above.stage} {found[above.record]}"
    return found


def main(plan: Plan, results: Path, adopt: bool, discard: bool, deep: bool) -> int:
    """Print the findings; 1 where a result that exists is stale or damaged and was not discarded."""
    found = audit(plan, results, deep or adopt)
    bad = [x for x in found if x.kind != "missing"]
    for x in bad:
        print(f"{x.kind}: {results / x.node.record}: {x.why}")
    print(
        f"audit: sweep {plan.name}: {len(plan.nodes())} results planned, {len(found) - len(bad)} missing, "
        f"{sum(x.kind == 'stale' for x in bad)} stale, {sum(x.kind == 'damaged' for x in bad)} damaged"
    )
    if discard:
        for x in bad:
            (results / x.node.record).unlink(missing_ok=True)
        print(f"audit: {len(bad)} removed; snakemake makes them again")
        return 0
    if adopt:
        print(f"audit: {_adopt(plan, results, {x.node.record for x in found})} dated in order")
    return 1 if bad else 0


def redate(plan: Plan, results: Path, stale: Collection[str]) -> int:
    """Where a result is dated in the future, date all current ones in order; returns how many.

    After a clock was set back, or with results from another PC: Snakemake holds what is made now to be older than what
    it is made from, calls that a failure and removes it.
    """
    dates = [path.stat().st_mtime for node in _all(plan, results) if (path := results / node.record).exists()]
    return _adopt(plan, results, set(stale)) if max(dates, default=0) > time.time() else 0


def _adopt(plan: Plan, results: Path, found: set[str]) -> int:
    """Date every verified record after the records that it reads: a second apart, the last one now."""
    good = [x for x in _all(plan, results) if x.record not in found and (results / x.record).exists()]
    now = int(time.time())
    for n, node in enumerate(good):
        date = now - len(good) + n
        os.utime(results / node.record, (date, date))
    return len(good)


def _all(plan: Plan, results: Path) -> list[Node]:
    """Every node whose record may be there, after those that it reads."""
    return [*plan.nodes(), *plan.beside(results)]


def _holds(path: Path, sha: str, deep: bool) -> bool:
    return path.is_file() and (not deep or record.sha256(path) == sha)
