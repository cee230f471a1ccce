"""What an observation shows beside being off: NaN, inf, all zero, all equal, values in the wrong place. numpy only."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvgate import metrics, record
from kvgate.observe import Trace

Array = np.ndarray
TENSORS = ("key", "value")
_WORDS = {"nan": "NaN", "inf": "infinite values", "all_zero": "all zero", "all_equal": "all values equal"}


def odd(trace: Trace, seen: Mapping[str, Array], history: str, layers: int) -> list[dict[str, Any]]:
    """NaN, inf, all-zero and all-equal outputs: one finding for each kind and tensor, with the first place and a count.

    An output that is as odd as its reference (a zero weight makes a zero key) is none.
    """
    positions = seen[f"{history}/positions"]
    found: dict[tuple[str, str], list[tuple[int, int | None]]] = {}
    outputs: list[tuple[str, int | None, Array | None]] = [("logits", None, trace.logits)]
    outputs += [("key", i, trace.keys[i]) for i in range(layers)] + [
        ("value", i, trace.values[i]) for i in range(layers)
    ]
    for name, layer, reference in outputs:
        assert reference is not None
        for step, row in enumerate(seen[f"{history}/{name}" if layer is None else f"{history}/{name}.{layer}"]):
            kind = metrics.oddity(row)
            if kind and kind != metrics.oddity(reference[positions[step]]):
                found.setdefault((kind, name), []).append((step, layer))
    return [_odd(history, name, kind, places, positions) for (kind, name), places in found.items()]


def _odd(history: str, name: str, kind: str, places: list[tuple[int, int | None]], positions: Array) -> dict[str, Any]:
    step, layer = min(places, key=lambda place: (place[0], place[1] or 0))
    position = int(positions[step])
    where = f"position {position}" if layer is None else f"position {position}, layer {layer}"
    return record.finding(
        kind,
        f"{history}: {name} {_WORDS[kind]} in {len(places)} outputs, first at {where}",
        history=history,
        tensor=name,
        layer=layer,
        step=step,
        position=position,
        count=len(places),
    )


def moved(trace: Trace, seen: Mapping[str, Array], history: str, kv: Array) -> list[dict[str, Any]]:
    """Values in the wrong place: one finding, at the first layer whose tensor is the reference's, moved.

    kv: [n, L, 2] the L2 of every K and V delta. Tried on the last step where a tensor is off by more than
    SUSPECT_L2 in most steps: the other order of its axes, and another tensor, layer or position in its place.
    """
    positions = seen[f"{history}/positions"]
    places = []
    for layer, n in np.argwhere(np.nan_to_num(np.median(kv, axis=0)) > metrics.SUSPECT_L2):
        name, step = TENSORS[n], len(positions) - 1
        got = seen[f"{history}/{name}.{layer}"][step]
        want = (trace.keys, trace.values)[n][layer][positions[step]]
        how = metrics.permuted(got, want, ("heads", "channels"))
        if how is None:
            fits = ((metrics.l2(got, other), label) for label, other in _others(trace, int(positions[step]), layer, n))
            error, label = min(fits, default=(np.inf, ""))
            how = f"holds {label}" if error <= metrics.FIT_L2 else None
        if how:
            places.append((int(layer), name, step, how))
    if not places:
        return []
    layer, name, step, how = places[0]
    return [
        record.finding(
            "permuted",
            f"{history}: values permuted, not imprecise: {name} of layer {layer} {how}"
            + (f", and {len(places) - 1} tensors more" if len(places) > 1 else ""),
            history=history,
            tensor=name,
            layer=layer,
            step=step,
            position=int(positions[step]),
            how=how,
            count=len(places),
        )
    ]


def _others(trace: Trace, position: int, layer: int, n: int) -> Iterator[tuple[str, Array]]:
    """Tensors of the same shape that could lie in the place of this layer's key (n = 0) or value (1)."""
    both = (trace.keys, trace.values)
    shape = both[n][layer].shape
    for m in (0, 1):
        for other, tensor in enumerate(both[m]):
            if (other, m) != (layer, n) and tensor.shape == shape:
                yield f"the {TENSORS[m]} of layer {other}", tensor[position]
    for other in range(len(both[n][layer])):
        if other != position:
            yield f"position {other} instead of {position}", both[n][layer][other]
