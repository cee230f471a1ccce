"""What every host half shares: the cache buffers at the graph's boundary, the mask, the rotation.

A strategy's host.py subclasses `Host`. It runs in the check, the calibration, the simulator and on boards, so:
numpy only, Python 3.9 syntax. Arrays are float32, shapes as in the contract.
"""

from dataclasses import dataclass
from typing import Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

from kvgate import contract as c

Array = np.ndarray


@dataclass(frozen=True)
class Step:
    """What one step returned, in the model's own terms."""

    logits: Array  # [V], of the last token
    states: Dict[str, Array]  # by name, of an appended one this step's entry [Hk, D], else the whole
    disturbed: float  # ||slots that should be as fed - as fed|| / ||as fed||; 0 where only a delta comes back


def additive_mask(position: int, columns: Array, window: Optional[int], value: float) -> Array:
    """The mask row of a query at `position`: 0 where a column may be seen, `value` elsewhere.

    columns [columns]: each column's absolute position, -1 where it is empty. A window of w tokens sees the w newest
    positions, its own among them (transformers' `sliding_window`).
    """
    seen = (columns >= 0) & (columns <= position)
    if window is not None:
        seen &= columns > position - window
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


class Host:
    """Feeds one step of a graph and takes its outputs in. A slot's index is its token's absolute position.

    Subclasses say which columns the attention sees (`columns`), what else the graph reads (`extra`), and how the
    cache outputs are taken over (`take_cache`).
    """

    # Whether what a step returns is what the next one reads, slot by slot; more slots after these are this step's.
    gives_back = False

    def __init__(self, contract: c.Contract, tables: Mapping[str, Array], mask_value: float) -> None:
        """tables: host.npz. mask_value: the additive mask of unseen columns, finite and negative."""
        if not np.isfinite(mask_value) or mask_value >= 0:
            raise ValueError("mask value: got {!r}, allowed: finite and negative".format(mask_value))
        self.contract = contract
        self.tables = tables
        self.mask_value = mask_value
        self.buffers = {t.name: np.zeros(t.shape, np.float32) for t in contract.cache_inputs()}
        self.states = {x.name: x for x in contract.states}
        self.appended = [x.name for x in contract.states if x.appended]
        self.views = self._views(contract.cache_inputs(), self.buffers)
        self.length = 0  # tokens in the cache

    # What a strategy says

    def columns(self) -> Array:
        """[columns] absolute position of every column that the attention of this step sees, -1: empty."""
        raise NotImplementedError

    def extra(self, tensor: c.Tensor) -> Array:
        """The value of an input that only this strategy knows."""
        raise ValueError("input {!r}: got role {!r}, unknown to {}".format(tensor.name, tensor.role, type(self)))

    def take_cache(self, outputs: Mapping[str, Array], views: Dict[str, Array]) -> Tuple[Dict[str, Array], float]:
        """Take the appended states' outputs over. views: by state the outputs as [slots, Hk, D].

        Returns this step's entry [Hk, D] of every appended state, and `Step.disturbed`.
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

    def feeds(self, token: int) -> Dict[str, Array]:
        """The inputs of the next step, in the contract's order. Cache arrays are this object's own: do not keep them.

        Raises ValueError on a full cache and on a token id outside the vocabulary.
        """
        self._check_room(self.length)
        if not 0 <= token < self.contract.vocabulary:
            raise ValueError("token id: got {}, allowed: 0 to {}".format(token, self.contract.vocabulary - 1))
        return {t.name: self._feed(t, token) for t in self.contract.inputs}

    def take(self, outputs: Mapping[str, Array]) -> Step:
        """Take a step's outputs in: the cache then holds one token more. Shapes must be the contract's."""
        for t in self.contract.outputs:
            got = tuple(outputs[t.name].shape)
            if got != t.shape:
                raise ValueError("output {!r}: got shape {}, allowed: {}".format(t.name, got, t.shape))
        views = self._views(self.contract.cache_outputs(), outputs)
        taken, disturbed = self.take_cache(outputs, {n: x for n, x in views.items() if self.states[n].appended})
        found = {}
        for name, x in views.items():
            if self.states[name].appended:
                found[name] = self._changed("inverse", name, taken[name])
            else:
                self.views[name][...] = x
                found[name] = np.array(x)
        self.length += 1
        logits = next(outputs[t.name] for t in self.contract.outputs if t.role == c.LOGITS)
        return Step(np.asarray(logits).reshape(-1) + np.float32(self.contract.shift), found, disturbed)

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

    def _feed(self, t: c.Tensor, token: int) -> Array:
        if t.role == c.STATE:
            return self.buffers[t.name]
        if t.role == c.EMBEDDING:
            row = self.tables["embedding"][token].astype(np.float32)
            if "position" in self.tables:
                row = row + self.tables["position"][self.length]
            return row.reshape(t.shape)
        if t.role == c.IDS:
            return np.full(t.shape, token, t.dtype)
        if t.role == c.POSITION:
            return np.full(t.shape, self.length, t.dtype)
        if t.role == c.MASK:
            window = self.contract.windows[t.index]
            return additive_mask(self.length, self.columns(), window, self.mask_value).reshape(t.shape)
        if t.role == c.COSINE:
            return self.tables["cosine.{}".format(t.index)][self.length].astype(np.float32).reshape(t.shape)
        if t.role == c.SINE:
            return self.tables["sine.{}".format(t.index)][self.length].astype(np.float32).reshape(t.shape)
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
