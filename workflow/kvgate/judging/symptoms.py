"""What an observation shows beside being off: strange values, values in the wrong place, keys turned by other angles,
a window that hides nothing. numpy only."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvgate.contract import Contract
from kvgate.jobs import record
from kvgate.judging import metrics
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
    SUSPECT_L2 in most steps: the other order of its axes, another order of its heads, and another tensor, layer or
    position in its place.
    """
    positions = seen[f"{history}/positions"]
    places = []
    for layer, n in np.argwhere(np.nan_to_num(np.median(kv, axis=0)) > metrics.SUSPECT_L2):
        name, step = TENSORS[n], len(positions) - 1
        got = seen[f"{history}/{name}.{layer}"][step]
        want = (trace.keys, trace.values)[n][layer][positions[step]]
        how = metrics.permuted(got, want, ("heads", "channels")) or _heads(got, want)
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


def _heads(got: Array, want: Array) -> str | None:
    """[Hk, D] twice: the reference's head in the place of each, where they are its heads in another order."""
    order = [int(np.argmin([metrics.l2(head, other) for other in want])) for head in got]
    if sorted(order) != list(range(len(want))) or metrics.l2(got, want[order]) > metrics.FIT_L2:
        return None
    return f"has its heads permuted: {', '.join(map(str, order))}"


def turned(
    contract: Contract, trace: Trace, seen: Mapping[str, Array], history: str, kv: Array, off: float
) -> list[dict[str, Any]]:
    """Keys whose rotation is another one: a finding where layer 0's keys are off by more than `off`, its values hold
    everywhere, and every pair of channels that rotates keeps its length.

    Only layer 0's keys follow from the token and its position alone.
    """
    if not kv.shape[1] or contract.layers[0].rotation is None or not (kv[:, 0, 1] <= off).all():
        return []
    wrong = np.flatnonzero(kv[:, 0, 0] > off)
    positions = seen[f"{history}/positions"]
    got, want = seen[f"{history}/key.0"][wrong], trace.keys[0][positions[wrong]]
    if not len(wrong) or not _same_pairs(got, want):
        return []
    step, position = int(wrong[0]), int(positions[wrong[0]])
    text = f"{history}: keys of layer 0 turned by other angles than the reference's, from position {position} on"
    where = {"history": history, "tensor": "key", "layer": 0, "step": step, "position": position}
    return [record.finding("rotation", text, **where)]


def _same_pairs(got: Array, want: Array) -> bool:
    """[n, Hk, D] twice: whether the pairs' lengths differ far less than the values. Pairs are channels i and i + r / 2,
    or neighbours, of the first r channels: all of them, a half or a quarter."""
    size, error = want.shape[-1], metrics.l2(got, want)
    for count in (size, size // 2, size // 4):
        for axis, shape in ((-2, (2, count // 2)), (-1, (count // 2, 2))):
            if count >= 2 and not count % 2:
                lengths = [
                    np.concatenate(
                        [np.linalg.norm(x[..., :count].reshape(*x.shape[:-1], *shape), axis=axis), x[..., count:]], -1
                    )
                    for x in (got.astype(np.float64), want.astype(np.float64))
                ]
                if metrics.l2(*lengths) <= metrics.FIT_L2 * error:
                    return True
    return False


def unhidden(contract: Contract, history: str, positions: Array, kv: Array, raw: Array, off: float) -> list[dict]:
    """A window that hides nothing: a finding where the first position that is off is the first from which a window of
    the contract hides a slot, and layer 0, which reads none for its own K and V, holds there. Needs every position."""
    wrong = np.flatnonzero(~((kv.reshape(len(kv), -1) <= off).all(axis=1) & (raw <= off)))
    if not len(wrong) or history != "forced" or not (kv[wrong[0], :1] <= off).all():
        return []
    step, position = int(wrong[0]), int(positions[wrong[0]])
    if position not in contract.windows:
        return []
    text = f"{history}: off from position {position} on, the first where the window of {position} tokens hides a slot"
    return [record.finding("no_window", text, history=history, step=step, position=position)]


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
