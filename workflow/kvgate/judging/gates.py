"""The gates: a program's metrics held against the thresholds. Pure; numpy only.

A gate's verdict is `pass`, `warn` or `fail`; where it broke is the first place in the order history, step, layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvgate.jobs.rows import DECODE
from kvgate.judging import wording
from kvgate.judging.wording import percent

Array = np.ndarray
LEVELS = ("pass", "warn", "fail")
HISTORIES = ("isolated", "forced", "free")
FATAL = ("nan", "inf", "all_zero", "all_equal", "permuted")  # findings that are gates of their own
OF_BOARD = ("selftest", "run")  # what a board says beside the numbers: before all of them
OF_SWEEP = ("compared", "capacity")  # what was run at all: after all numbers
# Of one step: as the step computes, and a strange output before the error that it makes.
_ORDER = (*OF_BOARD, "kv_l2", "state_l2", "disturbed", *FATAL[:4], "logits_l2", "top1", "tokens", "permuted", *OF_SWEEP)


@dataclass(frozen=True)
class Gate:
    name: str  # one of _ORDER
    verdict: str
    text: str  # one line: what was got, what is allowed
    program: str = ""
    history: str = ""
    value: float | None = None  # the worst; null where it is NaN or infinite
    first: dict[str, Any] = field(default_factory=dict)  # where it broke first: step, position, layer, tensor, value
    steps: tuple[int, ...] = ()  # all steps of the history that broke it as badly as the verdict says

    def place(self) -> tuple[int, int, int]:
        """Sorts gates by where they broke: history, step, then the order in which a step computes things."""
        if self.name in OF_BOARD:
            return -1, 0, _ORDER.index(self.name)
        history = HISTORIES.index(self.history) if self.history in HISTORIES else len(HISTORIES)
        return history, int(self.first.get("step", 0)), _ORDER.index(self.name)

    def to_json(self) -> dict[str, Any]:
        """All but the steps: metrics.npz has them."""
        return {k: v for k, v in asdict(self).items() if k != "steps"}


def level(value: float | None, limits: Mapping[str, float]) -> str:
    """NaN, infinite and null fail."""
    if value is None or not np.isfinite(value) or value > limits["warn"]:
        return "fail"
    return "pass" if value <= limits["pass"] else "warn"


def worst(verdicts: list[str]) -> str:
    """The worst of several verdicts. Raises ValueError on none: a comparison of nothing is no pass."""
    return max(verdicts, key=LEVELS.index)


def judge(
    program: str, metrics: Mapping[str, Any], arrays: Mapping[str, Array], thresholds: Mapping[str, Any]
) -> list[Gate]:
    """Every gate of a program. metrics: metrics.json; arrays: metrics.npz; thresholds: as in thresholds.yaml.

    A row's gates are those of all its programs; no gate at all means that nothing was compared.
    """
    found = []
    for history, figures in metrics["histories"].items():
        run = Run(program, history, arrays)
        if figures["kv"] is not None:
            found.append(_figure("kv_l2", "K/V delta", run, "kv", thresholds["kv_l2"], metrics["states"]))
            found.append(_figure("disturbed", "other slots", run, "disturbed", thresholds["disturbed"]))
        if figures.get("replaced") is not None:
            found.append(_figure("state_l2", "state", run, "replaced", thresholds["state_l2"], metrics["replaced"]))
        elif metrics.get("replaced"):
            text = f"none of {len(metrics['replaced'])} replaced states compared"
            found.append(Gate("compared", "fail", text, program, history))
        if figures["logits"] is not None:
            measure = thresholds["logits_measure"]
            found.append(_figure("logits_l2", f"logits ({measure})", run, measure, thresholds["logits_l2"]))
            found.append(_top1(program, history, figures["top1"]))
    if metrics["free"] is not None:
        found.append(_tokens(program, metrics["free"]))
    for history, steps in metrics["steps"].items():
        # metrics.npz is what the figures above were judged by.
        got = min(steps["got"], len(arrays.get(f"{history}/positions", range(steps["got"]))))
        if got < steps["of"]:
            what = "tokens" if history == "free" else "steps"
            found.append(Gate("compared", "fail", f"{got} of {steps['of']} {what} compared", program, history))
    found += [
        Gate(x["kind"], "fail", x["text"], program, x["history"], None, _where(x))
        for x in metrics["findings"]
        if x["kind"] in FATAL
    ]
    return found


def capacity(slots: int, arrays: Mapping[str, Mapping[str, Array]], part: str = DECODE) -> list[Gate]:
    """The gate of a row whose own cache no program took to its last slot: what is kept there nobody has seen.

    arrays: metrics.npz of all programs of a part.
    """
    reached = max((int(a["forced/positions"].max()) + 1 for a in arrays.values() if "forced/positions" in a), default=0)
    if reached >= slots:
        return []
    whose = "own cache" if part == DECODE else f"own cache of {part}"
    text = f"{whose} reached slot {reached} of {slots}; a forced text of {slots} tokens reaches the last"
    return [Gate("capacity", "fail", text)]


@dataclass(frozen=True)
class Run:
    """A history of a program, and its arrays of metrics.npz."""

    program: str
    history: str
    arrays: Mapping[str, Array]

    def get(self, field: str) -> Array:
        return self.arrays[f"{self.history}/{field}"]


def _figure(
    name: str, title: str, run: Run, field: str, limits: Mapping[str, float], states: Sequence[str] = ()
) -> Gate:
    """states: the names of the second axis of the measure, where it has one."""
    values = run.get(field)  # [n] or [n, S]
    ranked = np.where(np.isfinite(values), values, np.inf)
    top = float(ranked.max())
    verdict = level(top, limits)
    first: dict[str, Any] = {}
    steps: tuple[int, ...] = ()
    text = f"{title} {percent(top)}, allowed {percent(limits['pass'])}"
    if verdict != "pass":
        limit = limits["warn" if verdict == "fail" else "pass"]
        at = np.argwhere(ranked > limit)[0]  # in the order step, state
        positions = run.get("positions")
        over = np.unique(np.argwhere(ranked > limit)[:, 0])
        if field == "replaced":  # some steps only: counted among all
            known = np.searchsorted(positions, run.get("replaced_positions"))
            at, over = np.array([known[at[0]], at[1]]), known[over]
            value = float(ranked[np.argwhere(ranked > limit)[0][0], at[1]])
        else:
            value = float(ranked[tuple(at)])
        first = {"step": int(at[0]), "position": int(positions[at[0]])}
        first |= wording.place(states[at[1]]) if states else {"tensor": "logits" if name == "logits_l2" else "cache"}
        first["value"] = value if np.isfinite(value) else None
        text = f"{title} {percent(value)}, allowed {percent(limit)}"
        steps = tuple(int(n) for n in over)
    return Gate(name, verdict, text, run.program, run.history, top if np.isfinite(top) else None, first, steps)


def near_tie(change: Mapping[str, Any]) -> bool:
    """Whether the reference's margin between its two best logits is below the logits' error (metrics.rms_error)."""
    margin, error = change.get("margin"), change.get("error")
    return margin is not None and error is not None and margin < error


def _change(change: Mapping[str, Any]) -> str:
    text = f"token {change['token']} instead of {change['reference']}"
    margin, error = change.get("margin"), change.get("error")
    if margin is None or error is None:
        return text
    return text + f" (margin {margin:.4g}, logits' error {error:.4g})"


def _top1(program: str, history: str, top1: Mapping[str, Any]) -> Gate:
    if not top1["changed"]:
        return Gate("top1", "pass", f"best token equal in {top1['equal']} of {top1['of']} steps", program, history)
    true = [x for x in top1["changed"] if not near_tie(x)]
    changed = true or top1["changed"]
    change = changed[0]
    text = ("" if true else "near tie: ") + _change(change)
    first = {"step": change["step"], "position": change["position"], "tensor": "logits"}
    return Gate(
        "top1", "fail" if true else "warn", text, program, history, None, first, tuple(x["step"] for x in changed)
    )


def _tokens(program: str, free: Mapping[str, Any]) -> Gate:
    end, at = free["equal"]["end"], free["diverged"]
    if at is None:
        verdict = "fail" if end is False else "pass"
        text = {True: "all tokens equal", False: "the end differs", None: "equal to the full cache"}[end]
        return Gate("tokens", verdict, text, program, "free")
    tie = near_tie(at)
    text = ("near tie: " if tie else "") + f"generated step {at['step']}: {_change(at)}"
    # The step counted in the program, not in the generated part: it sorts against the other histories' steps.
    first = {"step": at["position"], "position": at["position"], "generated": at["step"], "tensor": "logits"}
    return Gate("tokens", "warn" if tie else "fail", text, program, "free", None, first)


def _where(finding: Mapping[str, Any]) -> dict[str, Any]:
    return {k: finding[k] for k in ("step", "position", "layer", "tensor") if finding.get(k) is not None}
