"""The gates: a program's metrics held against the thresholds. Pure; numpy only.

A gate's verdict is `pass`, `warn` or `fail`; where it broke is the first place in the order history, step, layer. The
measures in `measures/` have their own; here is what is of none.
"""

from collections.abc import Mapping

from kvgate.jobs.rows import DECODE
from kvgate.judging import measures
from kvgate.judging.gate import FREE, HISTORIES, Gate
from kvgate.judging.measure import MOVED, STRANGE, Array, Run
from kvgate.judging.records import Finding, Place, Program, Thresholds

STRANGE_OUTPUTS = ("nan", "inf", "all_zero", "all_equal")
FATAL = (*STRANGE_OUTPUTS, "permuted")  # findings that are gates of their own
OF_BOARD = ("selftest", "run")  # what a board says beside the numbers: before all of them
OF_SWEEP = ("compared", "capacity")  # what was run at all: after all numbers


def place(gate: Gate) -> tuple[int, int, int]:
    """Sorts gates by where they broke: history, step, then the order in which a step computes things, a strange output
    before the error that it makes."""
    order = {name: STRANGE + n for n, name in enumerate(STRANGE_OUTPUTS)}
    order |= {name: MOVED + n for n, name in enumerate(("permuted", *OF_SWEEP))}
    order |= {x.name: x.order for x in measures.every()}
    if gate.name in OF_BOARD:
        return -1, 0, OF_BOARD.index(gate.name)
    history = HISTORIES.index(gate.history) if gate.history in HISTORIES else len(HISTORIES)
    return history, int(gate.first.get("step", 0)), order[gate.name]


def judge(program: str, metrics: Program, arrays: Mapping[str, Array], thresholds: Thresholds) -> list[Gate]:
    """Every gate of a program. metrics: metrics.json; arrays: metrics.npz; thresholds: as in thresholds.yaml.

    A row's gates are those of all its programs; no gate at all means that nothing was compared.
    """
    found = []
    for history, figures in metrics["histories"].items():
        run = Run(program, history, figures, metrics, arrays)
        for of in measures.listed():
            found += of.gate(run, thresholds)
    for of in measures.listed():
        found += of.gate_program(program, metrics, thresholds)
    for history, steps in metrics["steps"].items():
        # metrics.npz is what the figures above were judged by.
        got = min(steps["got"], len(arrays.get(f"{history}/positions", range(steps["got"]))))
        if got < steps["of"]:
            what = "tokens" if history == FREE else "steps"
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


def _where(finding: Finding) -> Place:
    found: Place = {}
    for key in ("step", "position", "layer", "tensor"):
        if finding.get(key) is not None:
            found[key] = finding[key]  # type: ignore[literal-required, typeddict-item]
    return found
