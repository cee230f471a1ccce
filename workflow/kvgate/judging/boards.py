"""A row on a board: what its run and self test say beside the numbers, and how it stands to the simulator. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from kvgate.judging.gate import Gate
from kvgate.judging.records import Figures, Record
from kvgate.judging.wording import TIMES

# Findings of a run that no figure makes up for: what came back may be what lay in the buffers before.
FATAL = ("failed_to_submit", "ignored_run_error")
_GREEN = ("pass", "warn")
# Published board faults (compiler/risks.py names them on a row by these labels): the symptoms that each was seen with.
_SYMPTOMS: Mapping[str, tuple[str, ...]] = {
    "F1": ("permuted", "kv_l2"),
    "F3": ("permuted", "kv_l2"),
    "F4": ("permuted", "kv_l2"),
    "F7": ("disturbed", "kv_l2", "nan", "all_zero"),
    "F8": ("logits_l2", "kv_l2"),
    "F9": ("failed_to_submit", "all_zero", "kv_l2"),
    "F10": ("all_zero", "nan"),
    "F16": ("tokens", "top1"),
    "F17": ("logits_l2", "all_zero"),
    "F26": ("failed_to_submit", "all_zero"),
}


class Prediction(TypedDict):
    """An operator's measured time beside the compiler's cycles for it."""

    operator: str  # `Operator@Target`
    us: float  # a step
    cycles: int | None  # a step; null where the compiler's table has no such operator
    ns_a_cycle: float | None


def gates(run: Record, selftest: Record | None) -> list[Gate]:
    """Gates beside the numbers. A board that fails its self tests gets no pass for anything else."""
    found = []
    if selftest is not None and selftest["status"] == "ok" and not selftest["passed"]:
        found.append(Gate("selftest", "fail", f"the board fails its self test: {selftest['reason']}"))
    for finding in run.get("findings", ()):
        if finding["kind"] in FATAL:
            found.append(Gate("run", "fail", finding["text"]))
    return found


def beside(
    verdict: str,
    reason: str,
    simulator: str,
    risks: Iterable[str],
    first: Gate | None,
    findings: Iterable[Record],
) -> str:
    """A board row's reason beside the verdict that the same artifact has in the simulator."""
    if verdict not in ("fail", "blocked"):
        return reason
    if simulator not in _GREEN:
        return f"as in the simulator ({simulator}): {reason}"
    seen = {first.name} if first else set()
    seen |= {str(x["kind"]) for x in findings}
    fits = next((risk for risk in risks if seen & set(_SYMPTOMS.get(risk.split(" ")[0], ()))), "")
    return f"right in the simulator, wrong on the board: {reason}" + (f"; fits {fits}" if fits else "")


def figures(run: Record, simulator: Record | None, build: Record) -> Figures:
    """The time figures of a run in milliseconds, null where they are not known; empty where nothing ran on a board."""
    if not run:
        return {}
    ledger = run.get("ledger") or {}
    found: Figures = {f"{name}_ms": _ms(ledger.get(f"{name}_us")) for name in TIMES}
    found["tokens_per_second"] = ledger.get("tokens_per_second")
    found["peak_rss_bytes"] = ledger.get("peak_rss_bytes")
    found["clock_state"] = run.get("environment", {}).get("before", {}).get("clock_state", "unknown")
    found["simulator_verdict"] = simulator["verdict"] if simulator else None
    found["prediction"] = predictions(ledger.get("layers") or [], build.get("operator_cycles") or {})
    return found


def predictions(layers: Sequence[Record], cycles: Mapping[str, int]) -> list[Prediction]:
    """Measured time beside the compiler's cycles, by operator and target: what a predicted cycle costs on the board.

    layers: operator, target, us; cycles: `Operator@Target` -> predicted cycles a step. The costliest first.
    """
    found: list[Prediction] = []
    for layer in layers:
        name = f"{layer['operator']}@{layer['target']}"
        predicted = cycles.get(name)
        rate = 1e3 * layer["us"] / predicted if predicted else None
        found.append({"operator": name, "us": layer["us"], "cycles": predicted, "ns_a_cycle": rate})
    return sorted(found, key=lambda x: -x["us"])


def _ms(value: float | None) -> float | None:
    return None if value is None else value / 1e3
