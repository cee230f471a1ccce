"""The artifacts of a row, which lie in one folder: which there are, and whether they belong together.

A job names them as a bundle does: `contract_digest` and `custom_string` of the whole decoder, `pieces` of it in the
order in which they run, and `parts` beside it. Each of these has a folder of its name. Standard library only,
Python 3.9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgate.contract import HIDDEN, LOGITS, Contract, Tensor

CONTRACT, ARTIFACT = "contract.json", "artifact.json"  # of the graph, and what the build says of what it made of it


class Unfit(ValueError):
    """Artifacts that are not those of one row. One line: which file, what was got, what is allowed."""


@dataclass(frozen=True)
class Artifact:
    """A graph that runs by itself; it need not be compiled."""

    folder: str  # below the job's; empty: that itself
    contract: Contract
    told: Mapping[str, Any]  # `contract_digest` and `custom_string`, as the job has them

    def named(self, name: str) -> str:
        """A file of it, as the job names it."""
        return "{}/{}".format(self.folder, name) if self.folder else name


@dataclass(frozen=True)
class Row:
    whole: Artifact  # has no artifact of its own where there are pieces
    pieces: tuple[Artifact, ...]
    parts: Mapping[str, Artifact]

    def artifacts(self) -> list[Artifact]:
        """Those that are loaded."""
        return [*(self.pieces or (self.whole,)), *self.parts.values()]


def read(folder: Path, job: Mapping[str, Any]) -> Row:
    """The contracts of a job's artifacts, held to what it says of them and to each other. Raises Unfit."""
    whole = _artifact(folder, "", job)
    pieces = tuple(_artifact(folder, x["part"], x) for x in job["pieces"])
    parts = {name: _artifact(folder, name, told) for name, told in job["parts"].items()}
    hold_pieces(whole.contract, [x.contract for x in pieces])
    for part in parts.values():
        hold_part(whole.contract, part.contract)
    return Row(whole, pieces, parts)


def hold_pieces(whole: Contract, pieces: Sequence[Contract]) -> None:
    """Pieces are the whole: in their order, nothing missing, nothing twice. No pieces are. Raises Unfit."""
    if not pieces:
        return
    left = {t.name: t for t in whole.outputs}
    columns = 0
    order = sorted(pieces, key=_place)
    for n, (piece, wanted) in enumerate(zip(pieces, order)):
        _same_row(whole, piece)
        if piece.part != wanted.part:
            raise Unfit("pieces: got {} as number {}, allowed: {}".format(piece.part, n + 1, wanted.part))
        reads = any(t.role == HIDDEN for t in piece.inputs)
        if reads != (n > 0):
            raise Unfit("{}: got {} stream to read as number {}".format(piece.part, "a" if reads else "no", n + 1))
        for t in (x for x in piece.outputs if x.role != HIDDEN):
            if t.role == LOGITS:
                columns += t.shape[-1]
            elif left.pop(t.name, None) != t:
                raise Unfit("{}: got {}, allowed: what the whole returns, once".format(piece.part, _told(t)))
    lost = [t for t in left.values() if t.role != LOGITS]
    if lost:
        raise Unfit("pieces: {}: got no piece that returns it, allowed: one".format(_told(lost[0])))
    if columns != whole.vocabulary:
        raise Unfit("pieces: logits: got {} columns, allowed: {}".format(columns, whole.vocabulary))


def hold_part(whole: Contract, part: Contract) -> None:
    """A part keeps the states of the whole, in the same buffers. Raises Unfit."""
    _same_row(whole, part)
    known = {x.name: x for x in whole.states}
    lost = [name for name in known if name not in {x.name for x in part.states}]
    if lost:
        raise Unfit("{}: {}: got no such state, allowed: all of decode's".format(part.part, lost[0]))
    buffers = {t.name: t.shape for t in whole.cache_inputs()}
    for t in part.cache_inputs():
        if buffers.get(t.name) != t.shape:
            allowed = list(buffers[t.name]) if t.name in buffers else "none of this name"
            raise Unfit("{}: {}: got {}, allowed: {}".format(part.part, _told(t), list(t.shape), allowed))


def hold_boundary(artifact: Artifact, told: Any) -> None:
    """The artifact's own boundary, where artifact.json has it, against its graph's contract. Raises Unfit."""
    boundary = told.get("boundary", {}) if isinstance(told, dict) else {}
    for side, tensors in (("inputs", artifact.contract.inputs), ("outputs", artifact.contract.outputs)):
        sizes = {x["name"]: math.prod(x["shape"]) for x in boundary.get(side, ())}
        for t in states_first(tensors):
            if sizes.get(t.name, math.prod(t.shape)) != math.prod(t.shape):
                text = "{}: {}: got {} elements, allowed: {}"
                place = artifact.named(ARTIFACT)
                raise Unfit(text.format(place, _told(t), sizes[t.name], math.prod(t.shape)))


def states_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What is held to the contract first: of an artifact with another cache people want to hear the state."""
    return sorted(tensors, key=lambda t: not t.states)


def chunk(left: int, tokens: int) -> int:
    """How many of a prompt's last `left` tokens go in one step of a part that takes `tokens`; 1: none, that is a step
    of `decode`. The last one always is, as it gives the logits."""
    return min(left - 1, tokens) if left > 2 else 1


def _artifact(folder: Path, name: str, told: Mapping[str, Any]) -> Artifact:
    place = "{}/{}".format(name, CONTRACT) if name else CONTRACT
    try:
        contract = Contract.from_json((folder / place).read_text(encoding="utf-8"))
    except OSError as error:
        raise Unfit("{}: {}".format(place, error.strerror)) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unfit("{}: {}".format(place, error)) from None
    if name and contract.part != name:
        raise Unfit("{}: got part {!r}, allowed: {!r}".format(place, contract.part, name))
    if contract.digest != told["contract_digest"]:
        where = place if name else "contract"
        raise Unfit("{}: got digest {}, allowed: {}".format(where, contract.digest, told["contract_digest"]))
    return Artifact(name, contract, told)


def _same_row(whole: Contract, other: Contract) -> None:
    for what in ("strategy", "cache", "vocabulary", "hidden"):
        got, allowed = getattr(other, what), getattr(whole, what)
        if got != allowed:
            raise Unfit("{}: {}: got {!r}, allowed: {!r}".format(other.part, what, got, allowed))
    known = {x.name: x for x in whole.states}
    for x in other.states:
        if known.get(x.name) != x:
            allowed = list(known[x.name].shape) if x.name in known else "none of this name"
            raise Unfit("{}: state {}: got {}, allowed: {}".format(other.part, x.name, list(x.shape), allowed))


def _place(piece: Contract) -> tuple[float, int]:
    """Where a piece runs: by its layers; of a head in several the ends of their names count."""
    number = piece.part.rpartition(".")[2]
    layers = [x.layer for x in piece.states]
    return min(layers, default=math.inf), int(number) if not layers and number.isdigit() else 0


def _told(tensor: Tensor) -> str:
    """A tensor by the states that it holds, which people know it by."""
    return "state {}".format(", ".join(tensor.states)) if tensor.states else "tensor {!r}".format(tensor.name)
