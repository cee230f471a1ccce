"""The graph contract: what an exported graph reads and returns, and which states live on between its steps, and how.

The export writes it beside the graph; the host half, the check, the compiler's gates, the simulator and a board
read nothing else about the graph. Standard library only, Python 3.9 syntax: boards import it.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

VERSION = 2
LAYOUTS = ("rows", "channels")
PACKINGS = ("apart", "layer", "model")
RANKS = (3, 4)
DECODE, PREFILL = "decode", "prefill"  # parts of a row: one token a step; a prompt's tokens, many a step

# Roles of inputs and outputs. `index` of a tensor says which distinct mask or rotation it carries.
EMBEDDING = "embedding"  # [1, T, C] the tokens' embedding rows, learned positions already added
IDS = "ids"  # [1, T] token ids
POSITION = "position"  # [1, T] absolute positions
MASK = "mask"  # [T, columns] additive, finite
ATTENTION_MASK = "attention_mask"  # [1, columns] 1 = valid, as transformers' own exporter wants it
ROTATION = "rotation"  # [T, D(in), 1, D(out)]: rotated[out] = sum_in matrix[in, out] * x[in]
COSINE = "cosine"  # [1, T, D] rotary tables of the positions
SINE = "sine"
SLOT = "slot"  # int64 [T], the slots that this step writes
WRITE = "write"  # over slots: true at those that this step writes
PLACE = "place"  # [T, slots] or [slots, T]: 1 where a token goes; a token that is padding goes nowhere
STATE = "state"  # one or more states, as `states` of the tensor says
LOGITS = "logits"  # [1, 1, V], of the last token
HIDDEN = "hidden"  # [1, T, C], the residual stream from one piece of a decoder to the next

# Kinds of states.
KEY, VALUE = "key", "value"  # of attention, as it is cached (rotated)
CONVOLUTION = "convolution"  # the last inputs of a short convolution
RECURRENT = "recurrent"  # what linear attention keeps of all tokens
KINDS = (KEY, VALUE, CONVOLUTION, RECURRENT)
TOKENS = "tokens"  # the axis of a state that has an entry for each token

# Rules: how a state lives between steps.
APPEND = "append"  # an entry a token, at the token's slot; a strategy says who writes it
REPLACE = "replace"  # what comes out is what goes into the next step, as a whole
RULES = (APPEND, REPLACE)


@dataclass(frozen=True)
class State:
    """What a layer keeps between steps, in the model's own terms: the boundary may pack it or turn its axes."""

    name: str  # `layers.3.key`
    layer: int
    kind: str
    rule: str
    axes: Tuple[str, ...]  # what each axis of `shape` counts
    shape: Tuple[int, ...]
    dtype: str = "float32"  # numpy's name

    @property
    def entry(self) -> Tuple[int, ...]:
        """The shape of one token's entry; of a state that has none the whole."""
        return tuple(n for axis, n in zip(self.axes, self.shape) if axis != TOKENS)

    @property
    def appended(self) -> bool:
        return self.rule == APPEND


@dataclass(frozen=True)
class Tensor:
    """One input or output of a graph."""

    name: str
    role: str
    shape: Tuple[int, ...]
    dtype: str = "float32"  # numpy's name
    states: Tuple[str, ...] = ()  # the names of those that it holds, in order
    index: int = 0


@dataclass(frozen=True)
class Layer:
    """What a layer's attention reads besides its states: which mask and rotation (None: no rotary embedding)."""

    mask: Optional[int] = 0  # None: the layer has no attention, or in this part nobody needs its outcome
    rotation: Optional[int] = 0


@dataclass(frozen=True)
class Cache:
    """How the cache crosses the graph's boundary."""

    capacity: int  # slots, = the most tokens a conversation can have
    layout: str = "channels"  # `rows`: [.., S, D]; `channels`: [.., D, S]
    rank: int = 4
    packing: str = "apart"  # `apart`: a tensor a state; `layer`: K and V of a layer; `model`: one K, one V


@dataclass(frozen=True)
class Contract:
    """A graph's boundary. `windows[i]` is the sliding window of mask i in tokens, None where it is full."""

    strategy: str  # module name under kvgate.strategies
    part: str  # `decode`: one token a step; `prefill`: `tokens` a step, no logits;
    # `layers.4-7`, `head`: a piece of `decode`, with the residual stream between
    form: str  # `recipe`, `plain` or `exporter`
    reason: str  # why the form is not `recipe`; empty where it is
    vocabulary: int
    hidden: int
    cache: Cache
    states: Tuple[State, ...]  # by layer, and in a layer in the order in which a step computes them
    layers: Tuple[Layer, ...]
    windows: Tuple[Optional[int], ...]
    inputs: Tuple[Tensor, ...]
    outputs: Tuple[Tensor, ...]
    host_sha256: str  # of host.npz
    shift: int = 0  # what the host adds to the graph's logits, which stand around 0 to be fine in float16
    tokens: int = 1  # T of a step
    version: int = VERSION

    def to_json(self) -> str:
        return canonical(asdict(self))

    @property
    def digest(self) -> str:
        return sha256_text(self.to_json())

    @staticmethod
    def from_json(text: str) -> "Contract":
        """Raises ValueError on what this code does not know: a version, a layout, a packing, a rank, a kind, a rule."""
        raw = json.loads(text)
        if raw.get("version") != VERSION:
            told = "contract version: got {!r}, known: {} (make the graph, or its bundle, again with this kvgate{})"
            older = "; kvgate 0.1 wrote version 1" if raw.get("version") == 1 else ""
            raise ValueError(told.format(raw.get("version"), VERSION, older))
        for name, known in (("layout", LAYOUTS), ("packing", PACKINGS), ("rank", RANKS)):
            _hold("cache." + name, raw["cache"][name], known)
        raw["cache"] = Cache(**raw["cache"])
        raw["layers"] = tuple(Layer(**x) for x in raw["layers"])
        raw["windows"] = tuple(raw["windows"])
        raw["states"] = tuple(State(**dict(x, axes=tuple(x["axes"]), shape=tuple(x["shape"]))) for x in raw["states"])
        for side in ("inputs", "outputs"):
            tensors = (dict(x, shape=tuple(x["shape"]), states=tuple(x["states"])) for x in raw[side])
            raw[side] = tuple(Tensor(**x) for x in tensors)
        made = Contract(**raw)
        made._check()
        return made

    def _check(self) -> None:
        known = {x.name: x for x in self.states}
        for x in self.states:
            _hold(x.name + ".kind", x.kind, KINDS)
            _hold(x.name + ".rule", x.rule, RULES)
        for t in self.cache_inputs() + self.cache_outputs():
            lost = [name for name in t.states if name not in known]
            if lost or not t.states:
                said = "the unknown state {!r}".format(lost[0]) if lost else "no state"
                raise ValueError("contract: {}: got {}".format(t.name, said))
            whole = [known[name] for name in t.states if not known[name].appended]
            if whole and math.prod(t.shape) != sum(math.prod(x.shape) for x in whole):
                count, wanted = math.prod(t.shape), sum(math.prod(x.shape) for x in whole)
                raise ValueError("contract: {}: got {} elements, allowed: {}".format(t.name, count, wanted))
            if not whole and len(t.shape) != self.cache.rank:
                told = "contract: {}: got shape {}, allowed: rank {}"
                raise ValueError(told.format(t.name, list(t.shape), self.cache.rank))

    def cache_inputs(self) -> List[Tensor]:
        return [t for t in self.inputs if t.role == STATE]

    def cache_outputs(self) -> List[Tensor]:
        return [t for t in self.outputs if t.role == STATE]

    def unread(self) -> List[Tensor]:
        """The cache inputs that the graph does without: only a dropped attention would read them."""
        held = {name for t in self.cache_inputs() for name in t.states}
        lost = [x for x in self.states if x.name not in held]
        return cache_tensors(self.cache, lost, self.cache.capacity)

    def kept(self) -> List[State]:
        """The states that the graph returns, in their order; none where a strategy keeps no cache."""
        returned = {name for t in self.cache_outputs() for name in t.states}
        return [x for x in self.states if x.name in returned]

    def history_bytes(self, item: int = 2) -> int:
        """Bytes of cache read in one step, at `item` bytes a value."""
        return item * sum(math.prod(t.shape) for t in self.cache_inputs())

    def returned_bytes(self, item: int = 2) -> int:
        """Bytes of cache written out by one step (the delta, or the whole buffer), at `item` bytes a value."""
        return item * sum(math.prod(t.shape) for t in self.cache_outputs())


def key_value(layer: int, heads: int, key_size: int, value_size: int, slots: int) -> Tuple[State, State]:
    """K and V of an attention layer: entries [Hk, D] in `slots` slots."""
    axes = (TOKENS, "heads", "channels")
    return (
        State("layers.{}.key".format(layer), layer, KEY, APPEND, axes, (slots, heads, key_size)),
        State("layers.{}.value".format(layer), layer, VALUE, APPEND, axes, (slots, heads, value_size)),
    )


def convolution(layer: int, channels: int, inputs: int) -> State:
    """The last `inputs` inputs of a short convolution, the newest last; zeros before the first token."""
    axes = ("batch", "channels", "inputs")
    return State("layers.{}.convolution".format(layer), layer, CONVOLUTION, REPLACE, axes, (1, channels, inputs))


def recurrent(layer: int, heads: int, key_size: int, value_size: int) -> State:
    """What linear attention keeps of all tokens: of each head a matrix that maps keys to values; zeros at first."""
    axes, shape = ("batch", "heads", "key channels", "value channels"), (1, heads, key_size, value_size)
    return State("layers.{}.recurrent".format(layer), layer, RECURRENT, REPLACE, axes, shape)


def cache_tensors(cache: Cache, states: Sequence[State], slots: int, suffix: str = "") -> List[Tensor]:
    """The state tensors of a boundary with `slots` slots, in order; `suffix` tells outputs from inputs.

    Shapes of appended states, Hk heads and D channels (packed per layer: D_k + D_v channels; for all layers: L * Hk
    heads): channels [Hk, D, 1, S] or rank 3 [Hk, D, S]; rows [1, Hk, S, D] or rank 3 [Hk, S, D]. A replaced state
    crosses as it is. Raises ValueError where all layers must be equal and are not.
    """

    def shape(heads: int, channels: int) -> Tuple[int, ...]:
        if cache.layout == "channels":
            return (heads, channels, 1, slots) if cache.rank == 4 else (heads, channels, slots)
        return (1, heads, slots, channels) if cache.rank == 4 else (heads, slots, channels)

    tensors = []
    for name, members in _packed(cache.packing, states):
        names = tuple(x.name for x in members)
        if not members[0].appended:
            tensors.append(Tensor(name + suffix, STATE, members[0].shape, states=names))
            continue
        entries = [x.entry for x in members]
        if cache.packing == "model":
            if len(set(entries)) > 1:
                raise ValueError("packing: got 'model' for layers of different sizes, allowed: apart, layer")
            size = entries[0][0] * len(members), entries[0][1]
        else:
            size = entries[0][0], sum(channels for _, channels in entries)
        tensors.append(Tensor(name + suffix, STATE, shape(*size), states=names))
    return tensors


def _packed(packing: str, states: Sequence[State]) -> List[Tuple[str, List[State]]]:
    """Each boundary tensor's name and states."""
    found = {}  # type: Dict[str, List[State]]
    for x in states:
        name = "{}.{}".format(x.kind, x.layer)
        if x.appended and packing == "layer":
            name = "pair.{}".format(x.layer)
        if x.appended and packing == "model":
            name = x.kind + "s"
        found.setdefault(name, []).append(x)
    return list(found.items())


def _hold(name: str, got: Any, known: Sequence[Any]) -> None:
    if got not in known:
        raise ValueError("contract: {}: got {!r}, known: {}".format(name, got, ", ".join(str(x) for x in known)))


def canonical(value: Any) -> str:
    """JSON with one spelling: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def named(tensors: Tuple[Tensor, ...]) -> Dict[str, Tensor]:
    return {t.name: t for t in tensors}
