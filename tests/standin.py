"""A decoder in plain numpy, and an engine that runs it behind any contract. Not a test itself.

One attention a layer, no norm, no FFN: enough to see a wrong slot, mask, rotation or position. The engine reads its
history only from its feeds, by plain indexing of the boundary tensors, written without the host half's code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from kvgate import contract as c
from kvgate.observe import Trace

VOCABULARY, HIDDEN = 11, 12


@dataclass(frozen=True)
class Layer:
    """Hk heads of D channels, and the mask that it reads."""

    kv_heads: int
    key_size: int
    value_size: int
    mask: int = 0
    rotation: int | None = 0


def states(layers: Sequence[Layer], slots: int) -> tuple[c.State, ...]:
    """K and V of every layer."""
    pairs = (c.key_value(i, x.kv_heads, x.key_size, x.value_size, slots) for i, x in enumerate(layers))
    return tuple(state for pair in pairs for state in pair)


def layers_of(contract: c.Contract) -> tuple[Layer, ...]:
    size = {x.name: x.entry for x in contract.states}
    found = []
    for i, x in enumerate(contract.layers):
        (heads, key), (_, value) = size[f"layers.{i}.key"], size[f"layers.{i}.value"]
        found.append(Layer(heads, key, value, x.mask or 0, x.rotation))
    return tuple(found)


def pairs(views: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """K and V of every layer, out of states by name."""
    count = len(views) // 2
    return [(views[f"layers.{i}.key"], views[f"layers.{i}.value"]) for i in range(count)]


def contract(
    strategy: str,
    cache: c.Cache,
    layers: tuple[Layer, ...] = (Layer(2, 4, 4, mask=0), Layer(2, 4, 4, mask=1)),
    windows: tuple[int | None, ...] = (None, 3),
) -> c.Contract:
    """The boundary of the stand-in under a strategy."""
    fixed = strategy.startswith("fixed_max")
    slots = cache.capacity
    kept = states(layers, slots)
    inputs = [c.Tensor("embedding", c.EMBEDDING, (1, 1, HIDDEN))]
    inputs += [c.Tensor(f"mask.{i}", c.MASK, (1, slots + (not fixed)), index=i) for i in range(len(windows))]
    inputs += [c.Tensor("rotation.0", c.ROTATION, (1, 4, 1, 4))]
    if strategy == "fixed_max_blend":
        inputs.append(c.Tensor("write", c.WRITE, (1, slots), "bool"))
    if strategy == "fixed_max_scatter":
        inputs.append(c.Tensor("slot", c.SLOT, (1,), "int64"))
    returned = {"cpu_managed": 1, "dynamic_concat": slots + 1}.get(strategy, slots)
    outputs = [c.Tensor("logits", c.LOGITS, (1, 1, VOCABULARY)), *c.cache_tensors(cache, kept, returned, ".out")]
    inputs += c.cache_tensors(cache, kept, slots)
    return c.Contract(
        strategy, "decode", "plain", "stand-in", VOCABULARY, HIDDEN, cache, kept,
        tuple(c.Layer(x.mask, x.rotation) for x in layers), windows, tuple(inputs), tuple(outputs), "",
    )  # fmt: skip


def prefill(decode: c.Contract, tokens: int) -> c.Contract:
    """The boundary of the part that takes `tokens` tokens of a prompt a step into the cache of `decode`."""
    cache, slots, fixed = decode.cache, decode.cache.capacity, decode.strategy.startswith("fixed_max")
    layers = (*decode.layers[:-1], replace(decode.layers[-1], mask=None))
    inputs = [c.Tensor("embedding", c.EMBEDDING, (1, tokens, HIDDEN))]
    masks = sorted({x.mask for x in layers if x.mask is not None})
    columns = slots if fixed else slots + tokens
    inputs += [c.Tensor(f"mask.{i}", c.MASK, (tokens, columns), index=i) for i in masks]
    inputs += [c.Tensor("cosine.0", c.COSINE, (1, tokens, 4)), c.Tensor("sine.0", c.SINE, (1, tokens, 4))]
    if decode.strategy == "fixed_max_blend":
        place = (tokens, slots) if cache.layout == "channels" else (slots, tokens)
        inputs += [c.Tensor("write", c.WRITE, (1, slots), "bool"), c.Tensor("place", c.PLACE, place)]
    if decode.strategy == "fixed_max_scatter":
        inputs.append(c.Tensor("slot", c.SLOT, (tokens,), "int64"))
    delta = decode.strategy == "cpu_managed"
    last = {x.name for x in decode.states if x.layer == len(layers) - 1 and delta}
    inputs += [t for t in decode.cache_inputs() if not set(t.states) <= last]
    returned = tokens if delta else slots if fixed else slots + tokens
    outputs = c.cache_tensors(cache, decode.states, returned, ".out")
    return replace(decode, part="prefill", tokens=tokens, layers=layers, inputs=tuple(inputs), outputs=tuple(outputs))


def tables(positions: int, size: int = 4) -> dict[str, np.ndarray]:
    """host.npz: embedding, learned positions, one rotation of interleaved pairs."""
    rng = np.random.default_rng(0)
    angles = np.arange(positions)[:, None] * np.repeat([1.0, 0.3], 2)[None]
    turn = np.zeros((size, size), np.float32)
    for i in range(0, size, 2):
        turn[i, i + 1], turn[i + 1, i] = -1, 1
    return {
        "embedding": rng.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32),
        "position": rng.normal(size=(positions, HIDDEN)).astype(np.float32),
        "cosine.0": np.cos(angles).astype(np.float32),
        "sine.0": np.sin(angles).astype(np.float32),
        "turn.0": turn,
    }


class Model:
    """Weights of the stand-in: per layer q, k, v, o; a head."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        rng = np.random.default_rng(1)
        self.layers = layers
        # q is small: garbage of 1e3 in a masked slot must not beat a mask of -1e4
        self.weights = [
            [rng.normal(0, scale, (HIDDEN, x.kv_heads * x.key_size)) for scale in (0.2, 0.5, 0.5, 0.7)] for x in layers
        ]
        self.head = rng.normal(size=(HIDDEN, VOCABULARY))

    def layer(self, i: int, x: np.ndarray, rotate: np.ndarray) -> list[np.ndarray]:
        """Query, key and value [Hk, D] of one token; rotate [D(in), D(out)]."""
        rows = [(x @ w).reshape(self.layers[i].kv_heads, -1) for w in self.weights[i][:3]]
        return [rows[0] @ rotate, rows[1] @ rotate, rows[2]]

    def attend(self, i: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """[C] of q [Hk, D] over k, v [n, Hk, D], mask [n]."""
        scores = np.einsum("hd,nhd->hn", q, k) + mask
        p = np.exp(scores - scores.max(1, keepdims=True))
        mixed = np.einsum("hn,nhd->hd", p / p.sum(1, keepdims=True), v)
        return np.tanh(mixed.reshape(-1) @ self.weights[i][3].T)

    def trace(self, tokens: np.ndarray, prompt: int, host: dict[str, np.ndarray], windows: tuple) -> Trace:
        """The reference: the whole sequence, position by position, each seeing exactly what it may."""
        keys = [np.zeros((len(tokens), x.kv_heads, x.key_size), np.float32) for x in self.layers]
        values = [np.zeros_like(k) for k in keys]
        logits = np.zeros((len(tokens), VOCABULARY), np.float32)
        for t, token in enumerate(tokens):
            x = (host["embedding"][token] + host["position"][t]).astype(np.float64)
            rotate = (np.diag(host["cosine.0"][t]) + np.diag(host["sine.0"][t]) @ host["turn.0"]).T
            for i, spec in enumerate(self.layers):
                q, keys[i][t], values[i][t] = self.layer(i, x, rotate)
                window = windows[spec.mask]
                first = 0 if window is None else max(0, t - window + 1)
                x = x + self.attend(i, q, keys[i][first : t + 1], values[i][first : t + 1], np.zeros(t + 1 - first))
            logits[t] = x @ self.head
        found = {f"layers.{i}.{kind}": x[i] for i in range(len(keys)) for kind, x in (("key", keys), ("value", values))}
        return Trace(tokens, prompt, False, (), found, logits)

    def generate(self, prompt: list[int], count: int, host: dict[str, np.ndarray], windows: tuple) -> Trace:
        """A greedy generation of `count` tokens by whole-prefix recomputation."""
        tokens = list(prompt)
        for _ in range(count):
            found = self.trace(np.array(tokens), len(prompt), host, windows)
            tokens.append(int(found.logits[-1].argmax()))  # type: ignore[index]
        return self.trace(np.array(tokens), len(prompt), host, windows)


def index(contract: c.Contract, layer: int, role: str, head: int, channel: int, slot: int) -> tuple[str, tuple]:
    """Name (without suffix) and index of one cache element, spelled out from the contract's definition."""
    cache, spec = contract.cache, layers_of(contract)[layer]
    name = {"apart": f"{role}.{layer}", "layer": f"pair.{layer}", "model": f"{role}s"}[cache.packing]
    if cache.packing == "model":
        head += layer * spec.kv_heads
    if cache.packing == "layer" and role == c.VALUE:
        channel += spec.key_size
    if cache.layout == "channels":
        return name, (head, channel, 0, slot) if cache.rank == 4 else (head, channel, slot)
    return name, (0, head, slot, channel) if cache.rank == 4 else (head, slot, channel)


class Engine:
    """Runs the stand-in behind a contract. `break_`: one of the wrong ways, to see them noticed."""

    def __init__(self, contract: c.Contract, break_: str = "") -> None:
        self.contract, self.break_, self.model = contract, break_, Model(layers_of(contract))

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        contract, slots = self.contract, self.contract.cache.capacity
        assert list(feeds) == [t.name for t in contract.inputs]
        x = feeds["embedding"].reshape(-1).astype(np.float64)
        rotate = feeds["rotation.0"].reshape(4, 4).astype(np.float64)
        out = {t.name: np.zeros(t.shape, np.float32) for t in contract.outputs}
        fixed = contract.strategy.startswith("fixed_max")
        for i, spec in enumerate(contract.layers):
            history = [self._read(feeds, i, role, slots) for role in (c.KEY, c.VALUE)]
            q, *own = self.layer(i, x, rotate)
            if fixed:
                slot = int(feeds["slot"][0]) if "slot" in feeds else int(feeds["write"].reshape(-1).argmax())
                for h, row in zip(history, own, strict=True):
                    h[slot] = row
                seen, back = history, history
            else:
                seen = [np.concatenate([h, row[None]]) for h, row in zip(history, own, strict=True)]
                back = seen if contract.strategy == "dynamic_concat" else [row[None] for row in own]
            for role, rows in zip((c.KEY, c.VALUE), back, strict=True):
                self._write(out, i, role, rows)
            x = x + self.model.attend(i, q, seen[0], seen[1], feeds[f"mask.{spec.mask}"].reshape(-1))
        out["logits"][...] = x @ self.model.head
        if self.break_ == "disturb":
            name, at = index(contract, 0, c.KEY, 0, 0, 0)
            out[name + ".out"][at] += 1
        return out

    def layer(self, i: int, x: np.ndarray, rotate: np.ndarray) -> list[np.ndarray]:
        return self.model.layer(i, x, rotate)

    def _read(self, feeds: Mapping[str, np.ndarray], layer: int, role: str, slots: int) -> np.ndarray:
        spec = self.model.layers[layer]
        rows = np.zeros((slots, spec.kv_heads, spec.key_size))
        for s, h, d in np.ndindex(rows.shape):
            name, at = index(self.contract, layer, role, h, d, s)
            rows[s, h, d] = feeds[name][at]
        return rows

    def _write(self, out: dict[str, np.ndarray], layer: int, role: str, rows: np.ndarray) -> None:
        for s, h, d in np.ndindex(rows.shape):
            name, at = index(self.contract, layer, role, h, d, s)
            out[name + ".out"][at] = rows[s, h, d]


class Chunks(Engine):
    """The stand-in's prefill part: several tokens a step, of which the last layer's attention is nobody's business."""

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        contract, slots, count = self.contract, self.contract.cache.capacity, self.contract.tokens
        assert list(feeds) == [t.name for t in contract.inputs]
        x = feeds["embedding"].reshape(count, -1).astype(np.float64)
        turn = tables(1)["turn.0"]
        rotate = [
            (np.diag(a) + np.diag(b) @ turn).T for a, b in zip(feeds["cosine.0"][0], feeds["sine.0"][0], strict=True)
        ]
        out = {t.name: np.zeros(t.shape, np.float32) for t in contract.outputs}
        read = {name for t in contract.cache_inputs() for name in t.states}
        for i, spec in enumerate(contract.layers):
            rows = [self.layer(i, x[n], rotate[n]) for n in range(count)]
            own = [np.stack([row[k] for row in rows]) for k in (1, 2)]
            history = [self._read(feeds, i, role, slots) for role in (c.KEY, c.VALUE) if f"layers.{i}.{role}" in read]
            if contract.strategy.startswith("fixed_max"):
                for n, slot in self._places(feeds):
                    for h, new in zip(history, own, strict=True):
                        h[slot] = new[n]
                seen = history
            else:
                seen = [np.concatenate(pair) for pair in zip(history, own, strict=True)] if history else []
            for role, rows_ in zip((c.KEY, c.VALUE), own if contract.strategy == "cpu_managed" else seen, strict=True):
                self._write(out, i, role, rows_)
            if spec.mask is not None:
                mask = feeds[f"mask.{spec.mask}"]
                x = x + np.stack([self.model.attend(i, rows[n][0], *seen, mask[n]) for n in range(count)])
        return out

    def _places(self, feeds: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
        """Tokens and the slots that they go to."""
        if "slot" in feeds:
            return [(n, int(slot)) for n, slot in enumerate(feeds["slot"])]
        place = feeds["place"] if self.contract.cache.layout == "channels" else feeds["place"].T
        return [(int(n), int(slot)) for n, slot in zip(*np.nonzero(place), strict=True)]


class Counter(Engine):
    """Integers through the cache: key of position p is p + 1000 layer + 100 head + 10 channel; value = that + 0.5."""

    def layer(self, i: int, x: np.ndarray, rotate: np.ndarray) -> list[np.ndarray]:
        shape = (self.model.layers[i].kv_heads, self.model.layers[i].key_size)
        key = x[0] + 1000 * i + 100 * np.arange(shape[0])[:, None] + 10 * np.arange(shape[1])[None]
        return [np.zeros(shape), key, key + 0.5]
