"""Why a row is red: one sentence where the evidence shows a cause. Pure, standard library only.

Every rule looks at what was measured and found, never at a strategy's or quant's name. No evidence, no cause.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvgate.judging.records import Finding, Place, Record, finding

FLOAT_INPUTS = ("cosine", "sine", "rotation")  # roles: angles that the host worked out
OUTSIDE = 0.01  # share of a tensor's values beyond its range that explains an error
WIDE_MASK = -1e3  # below it scores and mask in one integer tensor leave the scores no resolution
CHECKED = 1e-4  # L2 up to which float32 counts as right, as in the check


@dataclass(frozen=True)
class Evidence:
    """What is known about a red row."""

    first: Place  # where it broke first: history, position, layer, tensor
    gates: Sequence[str] = ()  # names of all that did not pass
    findings: Sequence[Record] = ()  # of the build and of all programs: kind, text
    cpu_operators: Mapping[str, int] = field(default_factory=dict)
    roles: Sequence[str] = ()  # of the graph's inputs
    boundary: Sequence[str] = ()  # dtypes of the artifact's cache tensors
    dtype: str = ""  # what the artifact was built to compute in: `fp16`, `w8a8`, ...
    mask: float | None = None  # additive mask value that the artifact was built for
    broken: Sequence[tuple[str, int]] = ()  # (history, position) of every step that broke a figure's gate
    steps: Sequence[tuple[str, int]] = ()  # (history, position) of every step compared
    check: float | None = None  # worst L2 of the same graph and host half in float32, all histories
    # median K/V delta of the isolated steps in the first and in the last quarter of the positions
    early: float | None = None
    late: float | None = None
    outside: tuple[str, float] = ("", 0.0)  # the cache tensor with the most values beyond its calibrated range; share


@dataclass(frozen=True)
class Remedy:
    """What to try first against a cause."""

    text: str
    weights: Sequence[str] = ()  # that it names; any of them is it
    quants: Sequence[str] = ()

    def beyond(self, row: Mapping[str, str]) -> str:
        """Its text; empty where the row has already what it names."""
        named = [(names, row[key]) for key, names in (("weights", self.weights), ("quant", self.quants)) if names]
        return "" if named and all(own in names for names, own in named) else self.text


def explain(evidence: Evidence) -> str:
    """The first rule's sentence whose evidence is there; empty where none is."""
    return next((text for rule in RULES if (text := rule(evidence))), "")


def remedy(evidence: Evidence) -> Remedy:
    """What to try against the first rule's cause; empty where nothing is known that helps. It may not be enough."""
    rule = next((rule for rule in RULES if rule(evidence)), None)
    if rule is not_covered and (saturated := clipped(evidence)):
        return Remedy(saturated["advice"])
    if rule is permuted and "read as" not in rule(evidence):  # heads, tensors or slots, and no order of axes
        return NOTHING
    if rule in (first_token, adds_up, arithmetic, other_slots, rounded_cache):
        return _BY_DTYPE.get(evidence.dtype, NOTHING)
    return _REMEDIES.get(rule.__name__, NOTHING) if rule else NOTHING


NOTHING = Remedy("")
INT4 = Remedy(
    "quant w4a16_g32_split2 with weights `split_g32` (twice the bytes; `split2_g32` where a family's norms forbid to "
    "scale) or `mixed_75` (`megabytes` of yours)",
    weights=("split_g32", "split2_g32", "mixed_75"),
    quants=("w4a16_g32_split2",),
)
MORE_TEXTS = Remedy("more calibration texts and samples (config.yaml, calibration), for int16 `headroom` in the quant")
RANK_3 = Remedy("a strategy with rank 3, which cannot be read as NCHW or NHWC")
_REMEDIES = {
    "not_a_number": Remedy(
        "weights `scaled`, if the residual stream leaves float16's range: it is divided by 32", weights=("scaled",)
    ),
    "out_of_range": Remedy("a strategy of the form `recipe` or `plain`: their norms are fused"),
    "permuted": RANK_3,
    "angles": Remedy("a strategy of the form `recipe` or `plain`: the host works the angles out"),
    "not_covered": MORE_TEXTS,
}
_INT8 = ("int8", "int8_fold")
_BY_DTYPE = {
    "w8a8": Remedy(
        "weights `int8` (where norms forbid to rotate `int8_fold`) with quant w8a8_outliers", _INT8, ("w8a8_outliers",)
    ),
    "w4a16": INT4,
    "w16a16i_dfp": Remedy("weights `int8` or `int8_fold` with quant w16a16i_outliers", _INT8, ("w16a16i_outliers",)),
}


def out_of_range(e: Evidence) -> str:
    """A norm that is not fused squares its input in float16: from 256 on the square is infinite and the norm zero.

    Needs all three: the simulator's range warning (a mask beyond float16 gives one too, harmlessly), the norm's
    operators left on the CPU, and outputs of zeros or an error of 100 %.
    """
    warned = [f for f in e.findings if is_range(f)]
    norms = {name: n for name, n in e.cpu_operators.items() if name.lower() in ("sqrt", "div", "reciprocal")}
    zeros = [f for f in e.findings if f["kind"] == "all_zero"]
    if not (warned and norms and zeros):
        return ""
    left = ", ".join(f"{n} {name}" for name, n in sorted(norms.items(), key=lambda x: -x[1]))
    layers = [f["layer"] for f in zeros if f.get("layer") is not None]
    # Which layer is the first depends on the token: the first token's activations grow in early layers already.
    where = f", first in layer {min(layers)}" if layers else ""
    return (
        f"values leave float16's range in norms that were not fused ({left} on the CPU): their outputs are zero{where}"
    )


def permuted(e: Evidence) -> str:
    text = next((str(f["text"]) for f in e.findings if f["kind"] == "permuted"), "")
    return text.split(": ", 1)[-1]


def recognised(e: Evidence) -> str:
    """Keys that another rotation turned, a window that hides nothing."""
    found = [f for f in e.findings if f["kind"] in ("rotation", "no_window")]
    first = min(found, key=lambda f: f["position"], default={"text": ""})
    return str(first["text"]).split(": ", 1)[-1]


def not_a_number(e: Evidence) -> str:
    found = {f["kind"] for f in e.findings} & {"nan", "inf"}
    if not found:
        return ""
    word = "NaN" if "nan" in found else "infinite values"
    warned = any(is_range(f) for f in e.findings)
    return f"{word} in the outputs" + (", after values left float16's range" if warned else "")


def constant(e: Evidence) -> str:
    found = next(
        (f for f in e.findings if f["kind"] in ("all_zero", "all_equal") and f.get("tensor") == "logits"), None
    )
    return str(found["text"]) if found else ""


def other_slots(e: Evidence) -> str:
    """A graph that gives the whole buffer back must not touch the slots that it does not write."""
    if e.first.get("gate") != "disturbed":
        return ""
    integer = [d for d in e.boundary if "int" in d]
    if integer:
        return f"the cache comes back rounded to {integer[0]}"
    return "slots that the step does not write came back changed"


def rounded_cache(e: Evidence) -> str:
    """Integers at the boundary: every K and V is rounded to one scale for the tensor."""
    integer = sorted({d for d in e.boundary if "int" in d})
    if not integer:
        return ""
    coarse = (
        f", and the mask of {e.mask:g} leaves scores no resolution" if e.mask is not None and e.mask < WIDE_MASK else ""
    )
    return f"activations and cache are {integer[0]}{coarse}"


def not_covered(e: Evidence) -> str:
    """What lies beyond the calibrated range is cut off, whatever the steps within it."""
    name, share = e.outside
    own = "; the calibration cuts off its own samples too" if clipped(e) else ""
    return f"{100 * share:.2g} % of {name} lie outside the calibrated range{own}" if share > OUTSIDE else ""


def clipped(e: Evidence) -> Record | None:
    """The finding that the calibration saturates: its ranges are not its samples', so further texts may not help."""
    return next((f for f in e.findings if f["kind"] == "saturated"), None)


def uncovered(e: Evidence, outside: Mapping[str, float]) -> list[Finding]:
    """The finding of a red row whose cache leaves the calibrated ranges: the worst tensor, and how many others.

    outside: share of the verified values beyond its range, by tensor.
    """
    text = not_covered(e)
    if not text:
        return []
    count = sum(share > OUTSIDE for share in outside.values())
    others = f"; more than {100 * OUTSIDE:g} % in {count} tensors" if count > 1 else ""
    name, share = e.outside
    return [finding("not_covered", text + others, tensor=name, share=share, count=count)]


def angles(e: Evidence) -> str:
    """Rotary angles worked out in float16 drift with the position; from the host they are exact."""
    host = any(role in FLOAT_INPUTS for role in e.roles)
    if host or e.early is None or e.late is None or not e.late > 3 * e.early:
        return ""
    growth = f"{100 * e.early:.2g} % early, {100 * e.late:.2g} % late"
    return f"the error grows with the position ({growth}): angles in the graph"


def first_token(e: Evidence) -> str:
    """At position 0 the cache is empty, so nothing but the step's own arithmetic can be wrong."""
    later = any(position != 0 for _, position in e.steps)
    if e.broken and later and all(position == 0 for _, position in e.broken):
        return "only the first token, whose cache is empty: the arithmetic, not the cache"
    return ""


def adds_up(e: Evidence) -> str:
    """Only the history with the graph's own cache broke. The check ran the same graph and host half in float32."""
    broken = {history for history, _ in e.broken}
    if "isolated" not in {history for history, _ in e.steps} or broken != {"forced"} or "disturbed" in e.gates:
        return ""
    if e.check is None or e.check > CHECKED:
        return "steps hold with the reference's cache, errors add up with the own one"
    return (
        f"the arithmetic of {e.dtype or 'the steps'}, not the cache: {e.check:.0e} in float32; every step tried holds "
        "with the reference's cache, the rounding adds up"
    )


def arithmetic(e: Evidence) -> str:
    """Fed the reference's exact cache, a step is still off."""
    if e.first.get("history") == "isolated" and e.first.get("gate") in ("kv_l2", "logits_l2"):
        return f"off with the reference's own cache: the arithmetic of {e.dtype or 'a step'}"
    return ""


def is_range(finding: Record) -> bool:
    return finding["kind"] == "fp16_range"


RULES: tuple[Callable[[Evidence], str], ...] = (
    out_of_range,
    permuted,
    recognised,
    not_a_number,
    constant,
    first_token,
    other_slots,
    not_covered,
    rounded_cache,
    angles,
    adds_up,
    arithmetic,
)
