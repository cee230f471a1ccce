"""How much of what a row must carry lies outside the range that its calibration gave a quantized tensor. numpy only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvgate.contract import Contract, Tensor
from kvgate.judging.records import Finding, Record, finding
from kvgate.observe import Trace
from kvgate.strategies.host import Array, Host

# Share of the calibration samples' own values beyond the range made of them that counts as saturated: a range from the
# smallest to the largest value leaves none outside, and a row with 1 % of its cache cut off is wrong for that.
CLIPPED = 0.01
_ROUNDING = 1e-5  # the compiler's own float32 and the reference's differ by as much: the sample that made a bound is in


@dataclass(frozen=True)
class Range:
    """A cache tensor with a calibrated range. `buffer`: the cache input that holds the same values."""

    name: str
    buffer: Tensor
    low: float
    high: float
    returned: bool  # an output: K and V of a step come back through it


def ranges(contract: Contract, boundary: Record) -> list[Range]:
    """The cache inputs and outputs that are quantized. boundary: the build record's."""
    found, whole = [], {x.name for x in contract.states if not x.appended}  # what is replaced has no entries to count
    for side, tensors in (("inputs", contract.cache_inputs()), ("outputs", contract.cache_outputs())):
        known = {t["name"]: (t["low"], t["high"]) for t in boundary.get(side, ()) if t.get("low") is not None}
        for t in (x for x in tensors if not whole & set(x.states)):
            buffer = next((x for x in contract.cache_inputs() if x.states == t.states), None)
            if t.name in known and buffer is not None:
                found.append(Range(t.name, buffer, *known[t.name], side == "outputs"))
    return found


def measure(host: Host, traces: Iterable[Trace], boundary: Record) -> dict[str, float]:
    """Share of the reference's K and V beyond a cache tensor's calibrated range, by tensor; only those with a range.

    host: of the artifact's graph, whose buffers are the tensors. boundary: the build record's.
    """
    found = ranges(host.contract, boundary)
    outside, slots = dict.fromkeys((r.name for r in found), 0), 0
    for trace in traces if found else ():
        length = min(len(trace.tokens), host.contract.cache.capacity)
        counts = _outside(host, trace, length, found)
        slots += length
        for name, count in counts.items():
            outside[name] += int(count.sum())
    return _shares(host.contract, found, outside, dict.fromkeys(outside, slots))


def own(
    host: Host, samples: Sequence[tuple[str, int]], traces: Mapping[str, Trace], boundary: Record
) -> dict[str, float]:
    """As `measure`, of the calibration samples themselves, (text, position) each: what they fed and what came back.

    A sample fed the slots before its position; empty slots do not count. One fill a text stands for all its samples.
    """
    found = ranges(host.contract, boundary)
    outside, slots = (dict.fromkeys((r.name for r in found), 0) for _ in range(2))
    for text, trace in traces.items() if found else ():
        at = np.array([position for of, position in samples if of == text], int)
        if not at.size:
            continue
        times = (at[:, None] > np.arange(at.max() + 1)).sum(axis=0)  # how often each slot was fed
        written = np.bincount(at)
        counts = _outside(host, trace, int(at.max()) + 1, found)
        for r in found:
            weights = written if r.returned else times
            outside[r.name] += int((counts[r.name] * weights).sum())
            slots[r.name] += int(weights.sum())
    return _shares(host.contract, found, outside, slots)


def saturated(shares: Mapping[str, float], boundary: Record, algorithm: str) -> list[Finding]:
    """One finding where the calibration cuts off its own samples: the worst tensor, and how many others.

    shares: of `own`. algorithm: the quant's `quantized_algorithm`.
    """
    clipped = {name: share for name, share in shares.items() if share > CLIPPED}
    if not clipped:
        return []
    worst = max(clipped, key=lambda name: clipped[name])
    built = next(t for side in ("inputs", "outputs") for t in boundary.get(side, ()) if t["name"] == worst)
    others = f" (the worst of {len(clipped)} tensors)" if len(clipped) > 1 else ""
    advice = "more samples" if algorithm == "normal" else "quantized_algorithm normal or more samples"
    text = (
        f"calibration: {worst} saturates{others}: {100 * clipped[worst]:.2g} % of its own samples' values lie outside "
        f"{built['low']:.4g}..{built['high']:.4g}; try {advice}"
    )
    return [finding("saturated", text, tensor=worst, share=clipped[worst], count=len(clipped), advice=advice)]


def _outside(host: Host, trace: Trace, length: int, found: Sequence[Range]) -> dict[str, Array]:
    """By tensor, how many values of each of the first `length` slots lie outside its range [length]."""
    host.fill(trace.tokens.tolist(), trace.states, length)
    axis = -1 if host.contract.cache.layout == "channels" else -2
    counts = {}
    for r in found:
        rows = np.moveaxis(host.buffers[r.buffer.name], axis, 0)[:length].reshape(length, -1)
        low, high = r.low - _ROUNDING * abs(r.low), r.high + _ROUNDING * abs(r.high)
        counts[r.name] = ((rows < low) | (rows > high)).sum(axis=1)
    return counts


def _shares(
    contract: Contract, found: Sequence[Range], outside: Mapping[str, int], slots: Mapping[str, int]
) -> dict[str, float]:
    size = {r.name: int(np.prod(r.buffer.shape)) // contract.cache.capacity for r in found}  # values a slot
    return {name: float(f"{n / (slots[name] * size[name]):.4g}") for name, n in outside.items() if slots[name]}
