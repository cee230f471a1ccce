"""The verdicts of rows, as they may be believed: not edited, and what their own gates say. Standard library only."""

from pathlib import Path
from typing import cast

from kvgate.jobs import record
from kvgate.jobs.rows import ROW
from kvgate.judging.records import Record, Verdict

_LEVELS = ("pass", "warn", "fail")  # gates.LEVELS, which needs numpy


def read(path: Path) -> Verdict:
    """A row's verdict; `blocked`, with the reason, where it is not to be believed. Raises FileNotFoundError."""
    try:
        found = cast(Verdict, record.held(path))
        why = contradiction(found)
    except ValueError:
        found, why = {}, "its verdict.json was edited"
    if not why:
        return found
    return {
        "status": "blocked",
        "verdict": "blocked",
        "reason": f"{why}; run again: it is judged again",
        "row": found.get("row") or _row(path),
        "first": {"stage": "judge"},
        "gates": [],
        "risks": [],
        "findings": [],
        "figures": {},
    }


def contradiction(verdict: Record) -> str:
    """In one line how a verdict is not what its own gates, figures and limits make; empty where it is."""
    word = verdict.get("verdict")
    said = [gate["verdict"] for gate in verdict.get("gates", ())]
    if word == "blocked":
        return f"blocked, and its gates say {_worst(said)}" if said else ""
    if word not in _LEVELS:
        return verdict.get("reason") or f"the verdict is {word!r}, allowed: {', '.join(_LEVELS)}, blocked"
    if word != _worst(said):
        return f"the verdict is {word}, and its gates say {_worst(said)}"
    behaves = verdict["figures"].get("behaviour")
    limits = verdict.get("key", {}).get("config", {}).get("thresholds", {}).get("behaviour")
    if not behaves or not limits:
        return ""
    ratio, top1 = behaves["ratio"], behaves["top1"]
    holds = None not in (ratio, top1) and ratio <= limits["perplexity"] and top1 >= limits["top1"]
    if behaves["behaves"] and not holds:
        return f"it behaves with perplexity x {ratio} and top-1 {top1}, which its limits do not allow"
    return ""


def _worst(said: list[str]) -> str:
    return max(said, key=lambda x: _LEVELS.index(x) if x in _LEVELS else len(_LEVELS), default="nothing")


def _row(path: Path) -> dict[str, str]:
    """The row of a verdict.json, by where it lies (job.RECORDS)."""
    model, _, *rest = path.parts[-8:-1]
    return dict(zip(ROW, (model, *rest), strict=True))
