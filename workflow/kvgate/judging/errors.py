"""What measures that are a normalized L2 have in common: spread, gate and first place of the errors of every step.
numpy only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvgate.judging import gate, metrics, wording
from kvgate.judging.measure import STEPPED, Array, History, Measured, Run, number
from kvgate.judging.records import Figures, Finding, Place, Record, Spread, StatesSpread, Worst
from kvgate.judging.wording import percent
from kvgate.observe import Trace


@dataclass(frozen=True)
class Errors:
    """An array of metrics.npz: [n] a value a step, or [n, S] one of each state."""

    name: str  # of the gate and of the check's fact
    field: str  # of the array
    at: Callable[[Figures], Worst | None]  # of a history's figures the worst; None where it has none
    states: str = ""  # of metrics.json: `states` or `replaced`, the names along the second axis
    where: str = "positions"  # the array of the steps' positions; another one holds some of them
    tensor: str = "cache"  # what a value of no state is of

    def gate(self, run: Run, title: str, limits: Mapping[str, float]) -> gate.Gate:
        values = run.get(self.field)
        ranked = np.where(np.isfinite(values), values, np.inf)
        top = float(ranked.max())
        verdict = gate.level(top, limits)
        first: Place = {}
        steps: tuple[int, ...] = ()
        text = f"{title} {percent(top)}, allowed {percent(limits['pass'])}"
        if verdict != "pass":
            limit = limits["warn" if verdict == "fail" else "pass"]
            over = np.argwhere(ranked > limit)  # in the order step, state
            value = float(ranked[tuple(over[0])])
            positions, broken = run.get("positions"), over[:, 0]
            if self.where != "positions":  # some steps only: counted among all
                broken = np.searchsorted(positions, run.get(self.where))[broken]
            first = {"step": int(broken[0]), "position": int(positions[broken[0]])}
            if self.states:
                first |= wording.place(run.metrics[self.states][over[0][1]])
            else:
                first |= {"tensor": self.tensor}
            first |= {"value": value if np.isfinite(value) else None}
            text = f"{title} {percent(value)}, allowed {percent(limit)}"
            steps = tuple(int(n) for n in np.unique(broken))
        value_ = top if np.isfinite(top) else None
        return gate.Gate(self.name, verdict, text, run.program, run.history, value_, first, steps)

    def check(
        self, body: Record, arrays: Mapping[str, Array], limit: float
    ) -> tuple[dict[str, float | None], list[Finding]]:
        """The worst over all histories, and of each that is above the limit its first place."""
        worst: float | None = 0.0
        found = []
        for history, figures in body["histories"].items():
            at = self.at(figures)
            if at is not None:
                worst = None if worst is None or at["value"] is None else max(at["value"], worst)
                found += self.first(body, arrays, history, limit)
        return {self.name: worst}, found

    def first(self, body: Record, arrays: Mapping[str, Array], history: str, limit: float) -> list[Finding]:
        """The finding of the first step and state where it is above the limit; none where it holds."""
        values = arrays[f"{history}/{self.field}"]
        over = np.argwhere(~(values <= limit))
        if not len(over):
            return []
        n, *inside = (int(i) for i in over[0])
        position = int(arrays[f"{history}/{self.where}"][n])
        at: Worst = {"value": number(values[n, *inside]), "step": n, "position": position}
        where = ""
        if inside:
            state = wording.place(body[self.states][inside[0]])
            at |= state
            where = f"layer {state['layer']} {state['tensor']}, "
        text = f"{history}: {self.name} {at['value']} at {where}position {position}, allowed {limit:g}"
        return [{"kind": "differs", "text": text, "gate": self.name, "history": history, **at}]


def of_states(history: History, appended: bool) -> list[Array]:
    """[n] the L2 of every state of a kind, in the contract's order, at each step that the reference knows.

    Raises ValueError where one was not observed, or at other steps.
    """
    found = []
    for state in (x for x in history.contract.kept() if x.appended == appended):
        if f"{history.name}/{state.name}" not in history.seen:
            raise ValueError(f"observation: lacks {history.name}/{state.name}, which the contract returns")
        got, want = history.get(state.name), wanted(history.trace, state.name, history.positions)
        if len(got) != len(want):
            raise ValueError(f"{history.name}/{state.name}: got {len(got)} entries, allowed: {len(want)}")
        found.append(metrics.l2_rows(got, want))
    return found


def wanted(trace: Trace, state: str, positions: Array) -> Array:
    """The reference's values of a state at the positions of a history; of a replaced one at those that it knows."""
    if state in trace.replaced:
        return trace.replaced[state][np.searchsorted(trace.at, [p for p in positions if p in trace.at])]
    return trace.states[state][positions]


def of_each(values: Array, positions: Array, names: Sequence[str]) -> StatesSpread:
    """Median and worst of errors [n, S], in all and of every state."""
    ranked = np.where(np.isnan(values), np.inf, values)
    n, which = (int(i) for i in np.unravel_index(ranked.argmax(), ranked.shape))
    at: Worst = {"value": number(values[n, which]), "step": n, "position": int(positions[n])}
    return {
        "median": number(float(np.median(ranked))),
        "worst": at | wording.place(names[which]),
        "states": {
            name: {"median": number(float(np.median(x))), "worst": number(x.max())}
            for name, x in zip(names, ranked.T, strict=True)
        },
    }


def spread(steps: Measured, field: str) -> Spread:
    values = steps.arrays[field]
    median = float(np.median(np.where(np.isnan(values), np.inf, values)))
    return {"median": number(median), "worst": worst(steps, field)}


def worst(steps: Measured, field: str) -> Worst:
    values = steps.arrays[field]
    n = int(np.where(np.isnan(values), np.inf, values).argmax())
    return {"value": number(values[n]), "step": n, "position": int(steps.positions[n])}


def over_all(
    arrays: Mapping[str, Mapping[str, Array]], label: str, field: str, names: Sequence[str], where: str = "positions"
) -> Figures:
    """`{label}_median` of a measure over all programs and steps, and `{label}_worst` with program, history, step and
    state; both null where no step has it.

    where: the positions of its steps.
    """
    every, at, top = [], None, -1.0
    for program, found in arrays.items():
        for history in STEPPED:
            values = found.get(f"{history}/{field}")
            if values is None or not values.size:
                continue
            ranked = np.where(np.isfinite(values), values, np.inf)
            every.append(ranked.ravel())
            if ranked.max() > top:
                top = float(ranked.max())
                n, *inside = (int(i) for i in np.unravel_index(ranked.argmax(), ranked.shape))
                at = Worst(value=number(top), program=program, history=history, step=n)
                at["position"] = int(found[f"{history}/{where}"][n])
                if inside:
                    at |= wording.place(names[inside[0]])
    return {f"{label}_median": number(float(np.median(np.concatenate(every)))) if every else None, f"{label}_worst": at}


def share_over(arrays: Mapping[str, Mapping[str, Array]], field: str, limit: float) -> float | None:
    """The share of a measure's values above a limit or not finite, over all steps."""
    every = [a[f"{h}/{field}"] for a in arrays.values() for h in STEPPED if f"{h}/{field}" in a]
    values = np.concatenate([x.ravel() for x in every]) if every else np.zeros(0)
    return number(float(np.mean(~(values <= limit)))) if values.size else None
