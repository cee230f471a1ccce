"""Whether a loaded model is what its files hold: every tensor used, meaningless by name, or refused by name.

The loader may rename, fuse, split and reorder; it may not drop, fill in or round. So a tensor is looked for under its
own name, then by its content under another, then as a part of what a layer's tensors hold together.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from kvgate.checkpoint import stored
from kvgate.checkpoint.stored import Content
from kvgate.jobs.record import blocked

_TOLERANCE = 1e-9  # of sums in float64 whose order differs, relative to the values' size
_ROTARY = 1e-2  # of stored angles that were rounded to bfloat16
_MASKS = re.compile(r"\.(attn|attention|self_attention)\.(masked_)?bias$")
_FURTHER = re.compile(r"(^|\.)mtp(_layers)?\.")


def hold(contents: dict[str, Content], model: Any) -> dict[str, str]:
    """What of `contents` the model does not read, and why that is right. Raises Blocked with the tensor's name."""
    kept = model.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}
    names = {name: firsts.setdefault(id(x), name) for name, x in kept.items()}  # a tied parameter has two
    places = {name: stored.of_tensor(kept[name]) for name in firsts.values()}
    left, unread = dict(contents), dict(places)
    for name in [x for x in contents if x in names]:
        _same(name, contents[name], places[names[name]])
        unread.pop(names[name], None)
        del left[name]
    out = {name: why for name in left if (why := _meaningless(name, left[name], model))}
    left = {name: x for name, x in left.items() if name not in out}
    _renamed(left, unread)
    _converted(left, unread)
    if left:
        text = f"weights: got {len(left)} tensors that the model has no place for, the first is {next(iter(left))}"
        raise blocked("weights", f"{text} {list(next(iter(left.values())).shape)}, allowed: none")
    unread = {name: x for name, x in unread.items() if name in dict(model.named_parameters())}  # no tables of its own
    if unread:
        text = f"weights: {len(unread)} missing keys, the first is {next(iter(unread))}"
        raise blocked("weights", f"{text}: the model's content is in no file")
    return out


def _same(name: str, wanted: Content, got: Content) -> None:
    if wanted.shape != got.shape:
        text = f"weight {name}: got {list(wanted.shape)} in the file, allowed: {list(got.shape)} by config.json"
        raise blocked("weights", text)
    if wanted.crc != got.crc:
        text = f"weight {name}: loaded other values than the file's: the sum is {got.total:.9g}, of the file"
        raise blocked("weights", f"{text} {wanted.total:.9g}")


def _meaningless(name: str, found: Content, model: Any) -> str | None:
    """Why a tensor that is not the model's own may be left out: its name says so, and its values."""
    if name.endswith("inv_freq"):
        buffers = [stored.of_tensor(x) for n, x in model.named_buffers() if n.endswith("inv_freq")]
        if any(_close(found, x, _ROTARY) for x in buffers if x.size == found.size):
            return "rotary frequencies, equal to those of config.json"
        raise blocked("weights", f"weight {name}: got other rotary frequencies than config.json gives, allowed: equal")
    if _MASKS.search(name) and (found.size == 1 or _triangle(found)):
        return "a causal mask"
    if name.endswith("position_ids") and _counts(found):
        return "positions from 0 on"
    if _FURTHER.search(name):
        return "predicts tokens beyond the next one"
    return None


def _triangle(found: Content) -> bool:
    """Ones in and below the diagonal."""
    n = found.shape[-1] if found.shape else 0
    return found.size == n * n and found.total == found.squares == n * (n + 1) / 2


def _counts(found: Content) -> bool:
    n = found.size
    return found.total == n * (n - 1) / 2


def _renamed(left: dict[str, Content], unread: dict[str, Content]) -> None:
    """Take away what has an equal under another name in the same layer."""
    for name in list(left):
        fits = (x for x, other in unread.items() if layer(x) == layer(name) and _close(left[name], other))
        place = next(fits, None)
        if place is not None:
            del left[name], unread[place]


def _converted(left: dict[str, Content], unread: dict[str, Content]) -> None:
    """Take away the layers whose rests hold the same together: fused or split tensors."""
    rests: dict[tuple[str, ...], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((left, unread)):
        for name in names:
            rests[layer(name)][side].append(name)
    for files, places in rests.values():
        if files and places and _close(_together(left[x] for x in files), _together(unread[x] for x in places)):
            for x in files:
                del left[x]
            for x in places:
                del unread[x]


def _together(parts: Iterable[Content]) -> Content:
    found = list(parts)
    return Content((sum(x.size for x in found),), 0, sum(x.total for x in found), sum(x.squares for x in found))


def layer(name: str) -> tuple[str, ...]:
    """The numbers in a tensor's name."""
    return tuple(x for x in name.split(".") if x.isdigit())


def _close(a: Content, b: Content, tolerance: float = _TOLERANCE) -> bool:
    """Equal sizes and sums. The largest that the sum of n values can be is the root of n times their squares."""
    most = (a.size * max(a.squares, b.squares)) ** 0.5
    return (
        a.size == b.size
        and abs(a.total - b.total) <= tolerance * most
        and abs(a.squares - b.squares) <= tolerance * max(a.squares, b.squares)
    )
