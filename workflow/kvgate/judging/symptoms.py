"""What an observation shows beside being off: strange values, values in the wrong place, keys turned by other angles,
a window that hides nothing. numpy only."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvgate.contract import Contract, State
from kvgate.judging import metrics
from kvgate.judging.records import Finding, Where, finding
from kvgate.observe import Trace

Array = np.ndarray
_WORDS = {"nan": "NaN", "inf": "infinite values", "all_zero": "all zero", "all_equal": "all values equal"}


def odd(contract: Contract, trace: Trace, seen: Mapping[str, Array], history: str) -> list[Finding]:
    """NaN, inf, all-zero and all-equal outputs: one finding for each kind and tensor, with the first place and a count.

    An output that is as odd as its reference (a zero weight makes a zero key) is none.
    """
    positions = seen[f"{history}/positions"]
    found: dict[tuple[str, str], list[tuple[int, int | None]]] = {}
    assert trace.logits is not None
    outputs: list[tuple[str, int | None, str, Array]] = []
    if f"{history}/logits" in seen:
        outputs.append(("logits", None, "logits", trace.logits))
    outputs += [(x.kind, x.layer, x.name, trace.states[x.name]) for x in contract.kept() if x.appended]
    for tensor, layer, name, reference in outputs:
        for step, row in enumerate(seen[f"{history}/{name}"]):
            kind = metrics.oddity(row)
            if kind and kind != metrics.oddity(reference[positions[step]]):
                found.setdefault((kind, tensor), []).append((step, layer))
    for x in contract.kept():
        for row in seen[f"{history}/{x.name}"] if not x.appended else ():
            if not np.isfinite(row).all():  # of a whole state only what no reference has
                kind = "nan" if np.isnan(row).any() else "inf"
                found.setdefault((kind, x.kind), []).append((len(positions) - 1, x.layer))
    return [_odd(history, name, kind, places, positions) for (kind, name), places in found.items()]


def _odd(history: str, name: str, kind: str, places: list[tuple[int, int | None]], positions: Array) -> Finding:
    step, layer = min(places, key=lambda place: (place[0], place[1] or 0))
    position = int(positions[step])
    where = f"position {position}" if layer is None else f"position {position}, layer {layer}"
    return finding(
        kind,
        f"{history}: {name} {_WORDS[kind]} in {len(places)} outputs, first at {where}",
        history=history,
        tensor=name,
        layer=layer,
        step=step,
        position=position,
        count=len(places),
    )


def moved(contract: Contract, trace: Trace, seen: Mapping[str, Array], history: str, kv: Array) -> list[Finding]:
    """Values in the wrong place: one finding, at the first layer whose tensor is the reference's, moved.

    kv: [n, S] the L2 of every appended state's entry. Tried on the last step where a tensor is off by more than
    SUSPECT_L2 in most steps: the other order of its axes, another order of its heads, and another tensor, layer or
    position in its place.
    """
    positions = seen[f"{history}/positions"]
    states, places = [x for x in contract.kept() if x.appended], []
    for n in np.flatnonzero(np.nan_to_num(np.median(kv, axis=0)) > metrics.SUSPECT_L2):
        state, step = states[n], len(positions) - 1
        got, want = seen[f"{history}/{state.name}"][step], trace.states[state.name][positions[step]]
        how = metrics.permuted(got, want, ("heads", "channels")) or _heads(got, want)
        if how is None:
            fits = (
                (metrics.l2(got, other), label) for label, other in _others(trace, states, int(positions[step]), state)
            )
            error, label = min(fits, default=(np.inf, ""))
            how = f"holds {label}" if error <= metrics.FIT_L2 else None
        if how:
            places.append((state.layer, state.kind, step, how))
    if not places:
        return []
    layer, name, step, how = places[0]
    return [
        finding(
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
) -> list[Finding]:
    """Keys whose rotation is another one: a finding where layer 0's keys are off by more than `off`, its values hold
    everywhere, and every pair of channels that rotates keeps its length.

    Only layer 0's keys follow from the token and its position alone.
    """
    names = [x.name for x in contract.kept() if x.appended]
    if "layers.0.key" not in names or contract.layers[0].rotation is None:
        return []
    key, value = (kv[:, names.index(f"layers.0.{kind}")] for kind in ("key", "value"))
    if not (value <= off).all():
        return []
    wrong = np.flatnonzero(key > off)
    positions = seen[f"{history}/positions"]
    got, want = seen[f"{history}/layers.0.key"][wrong], trace.states["layers.0.key"][positions[wrong]]
    if not len(wrong) or not _same_pairs(got, want):
        return []
    step, position = int(wrong[0]), int(positions[wrong[0]])
    text = f"{history}: keys of layer 0 turned by other angles than the reference's, from position {position} on"
    where: Where = {"history": history, "tensor": "key", "layer": 0, "step": step, "position": position}
    return [finding("rotation", text, **where)]


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


def unhidden(contract: Contract, history: str, positions: Array, kv: Array, raw: Array, off: float) -> list[Finding]:
    """A window that hides nothing: a finding where the first position that is off is the first from which a window of
    the contract hides a slot, and layer 0, which reads none for its own K and V, holds there. Needs every position."""
    wrong = np.flatnonzero(~((kv <= off).all(axis=1) & ((raw <= off) if raw.size else True)))
    lowest = [n for n, x in enumerate(x for x in contract.kept() if x.appended) if x.layer == 0]
    if not len(wrong) or history != "forced" or not (kv[wrong[0], lowest] <= off).all():
        return []
    step, position = int(wrong[0]), int(positions[wrong[0]])
    if position not in contract.windows:
        return []
    text = f"{history}: off from position {position} on, the first where the window of {position} tokens hides a slot"
    return [finding("no_window", text, history=history, step=step, position=position)]


def _others(trace: Trace, states: Sequence[State], position: int, mine: State) -> Iterator[tuple[str, Array]]:
    """Tensors of the same shape that could lie in the place of a state's entry."""
    for kind in dict.fromkeys(x.kind for x in states):
        for other in states:
            if other.kind == kind and other.name != mine.name and other.entry == mine.entry:
                yield f"the {other.kind} of layer {other.layer}", trace.states[other.name][position]
    entries = trace.states[mine.name]
    for other_position in range(len(entries)):
        if other_position != position:
            yield f"position {other_position} instead of {position}", entries[other_position]
