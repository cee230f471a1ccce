"""Behaviour beside the gates: how a row's texts read, with its own cache. A row may behave and still fail its gates.

The gates ask whether every number is the reference's; this asks whether a user would notice. Pure; no numpy.
"""

import math
from collections.abc import Mapping

from kvgate.judging import measures
from kvgate.judging.records import Behaviour, Record, Verdict

SHIPS = ("pass", "warn", "behaves")  # as what a row is handed over, the best first


def ships(verdict: Verdict) -> str:
    """As what a row may be handed over: `pass`, `warn`, `behaves`; empty: not at all.

    A red row behaves where its texts do (`measure`), every free run gave the reference's tokens or left them at a near
    tie, and no gate failed but those on how far numbers are off: no strange output, no failed self test. Without a
    free run the texts alone decide; without a text no red row behaves. A blocked row was not judged.
    """
    word = str(verdict["verdict"])
    if word != "fail":
        return word if word in SHIPS else ""
    behaves = bool((verdict["figures"].get("behaviour") or {}).get("behaves"))
    failed = {gate["name"] for gate in verdict["gates"] if gate["verdict"] == "fail"}
    return "behaves" if behaves and failed <= {x.name for x in measures.every() if x.number} else ""


def measure(metrics: Mapping[str, Record], limits: Mapping[str, float]) -> Behaviour | None:
    """Over all text programs (teacher-forced): perplexity, its ratio to the reference's, mean KL, share of equal best
    tokens, and whether it behaves. None where no text was run; null where a figure is not finite.

    metrics: of all programs; limits: `perplexity`, the largest ratio, and `top1`, the smallest share.
    """
    texts = [m for m in metrics.values() if m["perplexity"]]
    if not texts:
        return None
    counts = [m["perplexity"]["tokens"] for m in texts]
    value = _mean(texts, counts, "value")
    reference = _mean(texts, counts, "reference")
    ratio = value / reference if value and reference else None
    kl = [m["perplexity"]["kl"] for m in texts]
    top1 = [m["histories"]["forced"]["top1"] for m in texts]
    share = sum(x["equal"] for x in top1) / sum(x["of"] for x in top1)
    return {
        "tokens": sum(counts),
        "perplexity": _number(value),
        "reference": _number(reference),
        "ratio": _number(ratio),
        "kl": _number(sum(k * n for k, n in zip(kl, counts, strict=True)) / sum(counts)) if None not in kl else None,
        "top1": _number(share),
        "behaves": ratio is not None and ratio <= limits["perplexity"] and share >= limits["top1"],
    }


def _mean(texts: list[Record], counts: list[int], name: str) -> float | None:
    """The perplexity of all texts as one."""
    values = [m["perplexity"][name] for m in texts]
    if None in values:
        return None
    total = sum(n * math.log(v) for v, n in zip(values, counts, strict=True))
    return math.exp(total / sum(counts)) if total / sum(counts) < 700 else None


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
