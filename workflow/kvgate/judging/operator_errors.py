"""Why an operator is off by itself: the known kinds, each shown by figures of its tensors. Pure, standard library only.

As in explanations.py a rule looks at what was measured, never at a name of a strategy or quant; no figure, no kind. A
remedy is what to try first against that kind, not a promise: a wide range's was measured with w8a8 and int16 on one
model, the layout's rank 3 on none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgate.compiler.dtypes import BITS
from kvgate.judging import explanations
from kvgate.judging.explanations import Remedy

CLIPPED = 0.7  # share of an operator's error that cutting off makes where it explains the error
JOINT = 4.0  # times: the peak of a joint tensor over that of one of its parts, which shares its scale
WIDE_RANGE = 8.0  # times: a calibrated range over the values of this step, which are left that much fewer integers
OUTLIER = 20.0  # times: a channel's peak over the median channel's. Normal values of 500 channels have 5
MOVED = 0.1  # share of an error that is left when both sides are sorted, where values are only in other places
_KEEPS = ("Add", "Mul", "Reshape", "Transpose", "exDataConvert", "Split", "Concat", "exSoftmax13", "exSoftmaxMask")
# Tensors of the residual stream, which a rotation of it spreads out.
_RESIDUAL = ("Add", "exNorm", "Input", "exDataConvert", "Reshape")
_OUTLIERS = Remedy(
    "quant `w8a8_outliers` or `w16a16i_outliers`: what integers cannot hold in float16",
    quants=("w8a8_outliers", "w16a16i_outliers"),
)
_RANGE = Remedy(
    "a strategy of the form `recipe` or `plain`, whose norms are fused; then weights `scaled`", weights=("scaled",)
)
_MASK = Remedy("a quant with a mask of -100")
_QKV = Remedy("weights `int8` or `int8_fold` (qkv: q, k, v of one size)", weights=("int8", "int8_fold"))
_ROTATE = Remedy("weights `rotated` or `int8` (rotate)", weights=("rotated", "int8"))
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Off:
    """The first operator over the limit, and what is around it. Rows are kvgate.compiler.snapshot's."""

    row: Row
    rows: Mapping[str, Row] = field(default_factory=dict)  # all by tensor
    masks: Sequence[str] = ()  # the graph's mask inputs
    mask: float | None = None  # additive mask value
    dtype: str = ""  # what the artifact was built to compute in: `fp16`, `w8a8`, ...
    headroom: float = 1.0  # that its integer ranges were made wider than calibrated

    @property
    def inputs(self) -> list[Row]:
        return [self.rows[x] for x in self.row.get("inputs") or () if x in self.rows]

    @property
    def error(self) -> float:
        """Isolated L2; infinite where it is not finite."""
        value = self.row["isolated_l2"]
        return float("inf") if value is None else value


@dataclass(frozen=True)
class Kind:
    kind: str  # the rule's name
    text: str
    tensor: str  # that shows it
    remedy: Remedy


def first(rows: Sequence[Row], limit: float) -> Row | None:
    """The first operator whose isolated L2 is over the limit; one without a finite error is."""
    return next((row for row in work(rows) if row["isolated_l2"] is None or row["isolated_l2"] > limit), None)


def work(rows: Sequence[Row]) -> Iterator[Row]:
    """The operators that have figures: no inputs, and none that was not dumped."""
    return (row for row in rows if row["operator"] != "Input" and "golden" in row)


def explain(off: Off) -> Kind | None:
    """The first rule's kind; None where no figure shows one."""
    return next((kind for rule in RULES if (kind := rule(off))), None)


def overflow(off: Off) -> Kind | None:
    for row in (*off.inputs, off.row):
        if row.get("overflow") and row.get("dtype") not in BITS:
            text = f"{row['overflow']} values of {row['tensor']} leave float16's range"
            return Kind("overflow", text, row["tensor"], _RANGE)
    return None


def layout(off: Off) -> Kind | None:
    """Sorting both sides makes them equal: nothing is imprecise. Needs the operator's own inputs to be right."""
    got, moved = off.row.get("accumulated_l2"), off.row.get("sorted_l2")
    right = all((x.get("accumulated_l2") or 0.0) < 0.1 for x in off.inputs)
    if right and got is not None and moved is not None and off.error > 0.3 and moved < MOVED * got:
        text = "its values are right and in other places"
        return Kind("layout", text, off.row["tensor"], explanations.RANK_3)
    return None


def mask(off: Off) -> Kind | None:
    """Scores and mask are one tensor of integers: its step is the mask's own, or its size over the integers."""
    bits = BITS.get(off.row.get("dtype") or "")
    if bits is None or off.mask is None or off.mask >= explanations.WIDE_MASK:
        return None
    found = [row for row in _above(off, 4) for name in off.masks if row["tensor"].startswith(name)]
    if not found:
        return None
    step = found[0].get("scale") or -off.mask / (2**bits - 1)
    text = f"scores and a mask of {off.mask:g} are one {off.row['dtype']} tensor, in steps of {step:.2g}"
    return Kind("mask", text, off.row["tensor"], _MASK)


def coverage(off: Off) -> Kind | None:
    """Cutting the float32 values off at the calibrated range makes most of the error."""
    clipped = off.row.get("clipped_l2")
    if clipped is None or off.row["isolated_l2"] is None or clipped < CLIPPED * off.error:
        return None
    low, high = off.row["low"], off.row["high"]
    text = (
        f"{100 * off.row['outside']:.2g} % of its values lie outside the calibrated range {low:.3g} to {high:.3g}; "
        f"cutting them off makes {100 * clipped:.2g} % alone"
    )
    return Kind("coverage", text, off.row["tensor"], explanations.MORE_TEXTS)


def wide_range(off: Off) -> Kind | None:
    """One scale for all positions: a range that is far wider than this step's values leaves them few integers."""
    for row in (*off.inputs, off.row):
        low, high, own = row.get("low"), row.get("high"), _peak(row)
        if row.get("dtype") in BITS and low is not None and high is not None and own:
            times = max(abs(low), abs(high)) / own / off.headroom
            if times > WIDE_RANGE:
                text = f"the calibrated range of {row['tensor']} is {times:.3g} times its values here"
                return Kind("wide range", f"{text}: wider than this step's values need", row["tensor"], _OUTLIERS)
    return None


def joint_scale(off: Off) -> Kind | None:
    """A part of a tensor keeps the whole's scale, which its largest part has set."""
    if len(off.inputs) != 1 or off.row.get("dtype") not in BITS or not off.row.get("scale"):
        return None
    whole = off.inputs[0]
    part, all_of_it = _peak(off.row), _peak(whole)
    if whole.get("scale") != off.row["scale"] or not part or all_of_it < JOINT * part:
        return None
    text = f"it shares one scale with values {all_of_it / part:.3g} times as large in {whole['tensor']}"
    return Kind("joint scale", text, off.row["tensor"], _QKV)


def outlier_channel(off: Off) -> Kind | None:
    """One scale for all channels: a channel far above the others leaves those few steps."""
    rows = [r for r in (*off.inputs, off.row) if r.get("dtype") in BITS and (r.get("channels") or 0) > OUTLIER]
    if not rows:
        return None
    row = max(rows, key=lambda r: r["channels"])
    text = f"a channel of {row['tensor']} peaks at {row['channels']:.3g} times the median channel"
    remedy = _ROTATE if row["operator"] in _RESIDUAL else _OUTLIERS
    return Kind("outlier channel", text, row["tensor"], remedy)


def weights(off: Off) -> Kind | None:
    """Float activations, right inputs, and a product that is off: what is left are its own integers."""
    right = off.inputs and all((row.get("isolated_l2") or 0.0) < off.error / 10 for row in off.inputs)
    product = off.row["operator"] in ("Conv", "exMatMul", "MatMul")
    if not (right and product and off.dtype.startswith("w4") and off.row.get("dtype") not in BITS):
        return None
    text = f"its inputs are float16 and right, its weights are int{off.dtype[1]}"
    return Kind("weights", text, off.row["tensor"], explanations.INT4)


RULES: tuple[Callable[[Off], Kind | None], ...] = (
    *(overflow, layout, mask, coverage, joint_scale, wide_range, outlier_channel, weights),
)


def _above(off: Off, steps: int) -> list[Row]:
    """The rows that the operator's values come from, through operators that keep them."""
    found, level = [], off.inputs
    for _ in range(steps):
        found += level
        level = [
            off.rows[x] for row in level if row["operator"] in _KEEPS for x in row.get("inputs") or () if x in off.rows
        ]
    return found


def _peak(row: Row) -> float:
    low, high = row.get("golden") or (None, None)
    return max(abs(low), abs(high)) if low is not None and high is not None else 0.0
