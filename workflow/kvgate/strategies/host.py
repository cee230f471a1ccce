"""What every host half shares: the cache buffers at the graph's boundary, the mask, the rotation.

A strategy's host.py subclasses `Host`. It runs in the check, the calibration, the simulator and on boards, so:
numpy only, Python 3.9 syntax. Arrays are float32, shapes as in the contract.
"""

import copy
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

from kvgate import contract as c

Array = np.ndarray


@dataclass(frozen=True)
class Step:
    """What one step returned, in the model's own terms."""

    logits: Any  # [V], of the last token; None where the part has none
    # By name; of an appended one this step's entry [Hk, D], in a part of several tokens [valid, Hk, D]; else the whole.
    states: Dict[str, Array]
    disturbed: float  # ||slots that should be as fed - as fed|| / ||as fed||; 0 where only a delta comes back


def additive_mask(positions: Array, columns: Array, window: Optional[int], value: float) -> Array:
    """[T, columns], a row a query at its position of `positions` [T]: 0 where a column may be seen, `value` elsewhere.

    columns [columns]: each column's absolute position, -1 where it is empty. A window of w tokens sees the w newest
    positions, its own among them (transformers' `sliding_window`).
    """
    own = np.asarray(positions)[:, None]
    seen = (columns >= 0) & (columns <= own)
    if window is not None:
        seen &= columns > own - window
    return np.where(seen, np.float32(0), np.float32(value))


def view(array: Array, contract: c.Contract, tensor: c.Tensor, state: c.State) -> Array:
    """A view of one state inside a boundary tensor, an appended one as [S, Hk, D]; writing to it writes the tensor."""
    if not state.appended:
        return array.reshape(state.shape)
    cache = contract.cache
    if cache.rank == 4:
        array = array[:, :, 0, :] if cache.layout == "channels" else array[0]
    if cache.layout == "rows":
        array = array.transpose(0, 2, 1)
    if len(tensor.states) > 1:
        axis = 1 if cache.packing == "layer" else 0  # K and V of a layer side by side, or all layers' heads
        sizes = {x.name: x.entry[axis] for x in contract.states}
        first = sum(sizes[name] for name in tensor.states[: tensor.states.index(state.name)])
        array = array[(slice(None),) * axis + (slice(first, first + sizes[state.name]),)]
    return array.transpose(2, 0, 1)


def relative_change(returned: Mapping[str, Array], fed: Mapping[str, Array]) -> float:
    """||returned - fed|| / ||fed|| over all states of `returned`; 0 where both are all zero."""
    change = norm = 0.0
    for name, a in returned.items():
        change += float(np.square(a - fed[name], dtype=np.float64).sum())
        norm += float(np.square(fed[name], dtype=np.float64).sum())
    return float(np.sqrt(change / norm)) if norm else float(np.sqrt(change))


@dataclass
class Kept:
    """What lives on between steps, shared by the parts of one row."""

    buffers: Dict[str, Array]  # by the cache inputs' names
    views: Dict[str, Array]  # by state, in `buffers`
    length: int = 0  # tokens in the cache


class Host:
    """Feeds one step of a graph and takes its outputs in: T tokens a step, of which the last may be padding.

    Padding repeats the chunk's last token with its position, so that whatever is made of it is that token's again; no
    query sees its columns, and it is not taken in.

    Subclasses say which columns the attention sees (`columns`), what else the graph reads (`extra`), and how the
    cache outputs are taken over (`take_cache`).
    """

    kept: Kept

    # Whether what a step returns is what the next one reads, slot by slot; more slots after these are this step's.
    gives_back = False

    def __init__(self, contract: c.Contract, tables: Mapping[str, Array], mask_value: float) -> None:
        """tables: host.npz. mask_value: the additive mask of unseen columns, finite and negative."""
        if not np.isfinite(mask_value) or mask_value >= 0:
            raise ValueError("mask value: got {!r}, allowed: finite and negative".format(mask_value))
        self.contract = contract
        self.tables = tables
        self.mask_value = mask_value
        self.states = {x.name: x for x in contract.states}
        self.appended = [x.name for x in contract.states if x.appended]
        tensors = contract.cache_inputs() + contract.unread()
        buffers = {t.name: np.zeros(t.shape, np.float32) for t in tensors}
        self.kept = Kept(buffers, self._views(tensors, buffers))
        self.count = 1  # tokens of the step that was fed last, without padding

    def chunked(self, contract: c.Contract) -> "Host":
        """This host for another part of its row: the same cache, whatever either of them does with it.

        contract: that part's. Raises ValueError where its cache inputs are not this one's.
        """
        known = {t.name: t.shape for t in self.contract.cache_inputs()}
        for t in contract.cache_inputs():
            if known.get(t.name) != t.shape:
                told = "{}: input {!r}: got shape {}, allowed: {}"
                raise ValueError(told.format(contract.part, t.name, t.shape, known.get(t.name, "none of this name")))
        other = copy.copy(self)
        other.contract = contract
        return other

    @property
    def buffers(self) -> Dict[str, Array]:
        return self.kept.buffers

    @property
    def views(self) -> Dict[str, Array]:
        """By state, an appended one as [S, Hk, D]."""
        return self.kept.views

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.kept.length

    @length.setter
    def length(self, length: int) -> None:
        self.kept.length = length

    def positions(self) -> Array:
        """[T] absolute positions of the step that is being fed; padding stands where the last token does."""
        return self.length + np.minimum(np.arange(self.contract.tokens), self.count - 1)

    # What a strategy says

    def columns(self) -> Array:
        """[columns] absolute position of every column that the attention of this step sees, -1: empty or padding."""
        raise NotImplementedError

    def extra(self, tensor: c.Tensor) -> Array:
        """The value of an input that only this strategy knows."""
        raise ValueError("input {!r}: got role {!r}, unknown to {}".format(tensor.name, tensor.role, type(self)))

    def take_cache(
        self, outputs: Mapping[str, Array], views: Dict[str, Array], valid: int
    ) -> Tuple[Dict[str, Array], float]:
        """Take the appended states' outputs over. views: by state the outputs as [slots, Hk, D].

        Returns this step's entries [valid, Hk, D] of every appended state, and `Step.disturbed`.
        """
        raise NotImplementedError

    # What is the same for all

    def reset(self, garbage: float = 0.0) -> None:
        """Start over. Unused slots hold `garbage` (finite; tests use 1e3); a state without slots begins as zeros."""
        for name, mine in self.views.items():
            mine[...] = garbage if self.states[name].appended else 0
        self.length = 0

    def fill(self, tokens: Sequence[int], states: Mapping[str, Array], length: int) -> None:
        """Set the cache to a trace's first `length` tokens: ids [T], by state what it is then.

        states: of an appended state every token's entry [T, Hk, D], of another one the whole (not read at length 0).
        Other slots are zero.
        """
        self.reset()
        self._check_room(length - 1)
        for name, mine in self.views.items():
            if self.states[name].appended:
                mine[:length] = self._changed("basis", name, states[name][:length])
            elif length:
                mine[...] = states[name]
        self.length = length

    def feeds(self, tokens: Sequence[int]) -> Dict[str, Array]:
        """The inputs of the next step, in the contract's order. Cache arrays are this object's own: do not keep them.

        tokens: 1 to T ids. Raises ValueError on another number, a full cache, and an id outside the vocabulary.
        """
        if not 1 <= len(tokens) <= self.contract.tokens:
            raise ValueError("tokens of a step: got {}, allowed: 1 to {}".format(len(tokens), self.contract.tokens))
        self._check_room(self.length + len(tokens) - 1)
        for token in tokens:
            if not 0 <= token < self.contract.vocabulary:
                raise ValueError("token id: got {}, allowed: 0 to {}".format(token, self.contract.vocabulary - 1))
        self.count = len(tokens)
        padded = np.array([*tokens, *[tokens[-1]] * (self.contract.tokens - len(tokens))])
        return {t.name: self._feed(t, padded) for t in self.contract.inputs}

    def take(self, outputs: Mapping[str, Array], valid: int = 1) -> Step:
        """Take a step's outputs in: the cache then holds `valid` tokens more. Shapes must be the contract's."""
        if not 1 <= valid <= self.contract.tokens:
            raise ValueError("valid tokens: got {}, allowed: 1 to {}".format(valid, self.contract.tokens))
        for t in self.contract.outputs:
            got = tuple(outputs[t.name].shape)
            if got != t.shape:
                raise ValueError("output {!r}: got shape {}, allowed: {}".format(t.name, got, t.shape))
        views = self._views(self.contract.cache_outputs(), outputs)
        own = {name: x for name, x in views.items() if self.states[name].appended}
        taken, disturbed = self.take_cache(outputs, own, valid)
        found = {}
        for name, x in views.items():
            if self.states[name].appended:
                entries = self._changed("inverse", name, taken[name])
                found[name] = entries if self.contract.tokens > 1 else entries[0]
            else:
                self.views[name][...] = x
                found[name] = np.array(x)
        self.length += valid
        return Step(self._logits(outputs), found, disturbed)

    def _logits(self, outputs: Mapping[str, Array]) -> Optional[Array]:
        for t in self.contract.outputs:
            if t.role == c.LOGITS:
                return np.asarray(outputs[t.name]).reshape(-1) + np.float32(self.contract.shift)
        return None

    def _changed(self, table: str, name: str, rows: Array) -> Array:
        """[.., Hk, D] rows in another basis, where the preparation of the weights changed it."""
        state = self.states[name]
        matrix = self.tables.get("{}.{}.{}".format(table, state.kind, state.layer))
        return rows if matrix is None else np.einsum("...hd,hde->...he", rows, matrix.astype(np.float32))

    def snapshot(self) -> Tuple[int, Dict[str, Array]]:
        return self.length, {name: buffer.copy() for name, buffer in self.buffers.items()}

    def restore(self, state: Tuple[int, Dict[str, Array]]) -> None:
        self.length = state[0]
        for name, buffer in state[1].items():
            self.buffers[name][...] = buffer

    def _check_room(self, position: int) -> None:
        if position >= self.contract.cache.capacity:
            raise ValueError(
                "cache full: got position {}, allowed: 0 to {}".format(position, self.contract.cache.capacity - 1)
            )

    def _views(self, tensors: Sequence[c.Tensor], arrays: Mapping[str, Array]) -> Dict[str, Array]:
        """By state, in the contract's order."""
        found = {name: view(arrays[t.name], self.contract, t, self.states[name]) for t in tensors for name in t.states}
        return {name: found[name] for name in self.states if name in found}

    def _feed(self, t: c.Tensor, tokens: Array) -> Array:
        """tokens: [T] ids, padding among them."""
        if t.role == c.STATE:
            return self.buffers[t.name]
        if t.role == c.HIDDEN:  # who runs the pieces puts the stream in its place
            return np.zeros(t.shape, np.float32)
        if t.role == c.EMBEDDING:
            rows = self.tables["embedding"][tokens].astype(np.float32)
            if "position" in self.tables:
                rows = rows + self.tables["position"][self.positions()]
            return rows.reshape(t.shape)
        if t.role == c.IDS:
            return tokens.astype(t.dtype).reshape(t.shape)
        if t.role == c.POSITION:
            return self.positions().astype(t.dtype).reshape(t.shape)
        if t.role == c.MASK:
            window = self.contract.windows[t.index]
            return additive_mask(self.positions(), self.columns(), window, self.mask_value).reshape(t.shape)
        if t.role in (c.COSINE, c.SINE):
            table = self.tables["{}.{}".format(t.role, t.index)]
            return table[self.positions()].astype(np.float32).reshape(t.shape)
        if t.role == c.ROTATION:
            return self._rotation(t.index).reshape(t.shape)
        return self.extra(t)

    def _rotation(self, index: int) -> Array:
        """[D(in), D(out)] of this position: diag(cos) + diag(sin) R, transposed (R a signed permutation)."""
        cosine = self.tables["cosine.{}".format(index)][self.length].astype(np.float32)
        sine = self.tables["sine.{}".format(index)][self.length].astype(np.float32)
        turn = self.tables["turn.{}".format(index)].astype(np.float32)
        matrix = (np.diag(cosine) + sine[:, None] * turn).T
        after = self.tables.get("turned.{}".format(index))
        return np.ascontiguousarray(matrix if after is None else matrix @ after.astype(np.float32))
