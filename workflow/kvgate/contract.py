"""The graph contract: what an exported graph reads and returns, and how the host keeps its cache between steps.

The export writes it beside the graph; the host half, the check, the compiler's gates, the simulator and a board
read nothing else about the graph. Standard library only, Python 3.9 syntax: boards import it.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Tuple

LAYOUTS = ("rows", "channels")
PACKINGS = ("apart", "layer", "model")
RANKS = (3, 4)

# Roles of inputs. `index` of a tensor says which distinct mask or rotation it carries.
EMBEDDING = "embedding"  # [1, 1, C] the token's embedding row, a learned position already added
IDS = "ids"  # [1, T] token ids
POSITION = "position"  # [1, T] absolute positions
MASK = "mask"  # [1, columns] additive, finite
ATTENTION_MASK = "attention_mask"  # [1, columns] 1 = valid, as transformers' own exporter wants it
ROTATION = "rotation"  # [1, D(in), 1, D(out)]: rotated[out] = sum_in matrix[in, out] * x[in]
COSINE = "cosine"  # [1, 1, D] rotary tables of the position
SINE = "sine"
SLOT = "slot"  # int64, the slot that this step writes
WRITE = "write"  # one-hot over slots: true at the slot that this step writes
KEY, VALUE, PAIR = "key", "value", "pair"  # cache tensors: a K, a V, or both packed
LOGITS = "logits"  # [1, T, V]
CACHE_ROLES = (KEY, VALUE, PAIR)


@dataclass(frozen=True)
class Tensor:
    """One input or output of a graph. `layer` is None on a tensor that holds all layers."""

    name: str
    role: str
    shape: Tuple[int, ...]
    dtype: str = "float32"  # numpy's name
    layer: Optional[int] = None
    index: int = 0


@dataclass(frozen=True)
class Layer:
    """The cached tensors of one attention layer, and which mask and rotation it uses (None: no rotary embedding)."""

    kv_heads: int  # Hk
    key_size: int  # D of a cached key
    value_size: int  # D of a cached value
    mask: int = 0
    rotation: Optional[int] = 0


@dataclass(frozen=True)
class Cache:
    """How the cache crosses the graph's boundary."""

    capacity: int  # slots, = the most tokens a conversation can have
    layout: str = "channels"  # `rows`: [.., S, D]; `channels`: [.., D, S]
    rank: int = 4
    packing: str = "apart"  # `apart`: a tensor per K and V; `layer`: K and V of a layer; `model`: one K, one V


@dataclass(frozen=True)
class Contract:
    """A graph's boundary. `windows[i]` is the sliding window of mask i in tokens, None where it is full."""

    strategy: str  # module name under kvgate.strategies
    part: str  # `decode`
    form: str  # `recipe`, `plain` or `exporter`
    reason: str  # why the form is not `recipe`; empty where it is
    vocabulary: int
    hidden: int
    cache: Cache
    layers: Tuple[Layer, ...]
    windows: Tuple[Optional[int], ...]
    inputs: Tuple[Tensor, ...]
    outputs: Tuple[Tensor, ...]
    host_sha256: str  # of host.npz
    shift: int = 0  # what the host adds to the graph's logits, which stand around 0 to be fine in float16
    version: int = 1

    def to_json(self) -> str:
        return canonical(asdict(self))

    @property
    def digest(self) -> str:
        return sha256_text(self.to_json())

    @staticmethod
    def from_json(text: str) -> "Contract":
        """Raises ValueError on what this code does not know: a version, a layout, a packing, a rank."""
        raw = json.loads(text)
        if raw.get("version") != 1:
            raise ValueError("contract version: got {!r}, known: 1".format(raw.get("version")))
        for name, known in (("layout", LAYOUTS), ("packing", PACKINGS), ("rank", RANKS)):
            if raw["cache"][name] not in known:
                words = ", ".join(str(x) for x in known)
                raise ValueError("contract: cache.{}: got {!r}, known: {}".format(name, raw["cache"][name], words))
        raw["cache"] = Cache(**raw["cache"])
        raw["layers"] = tuple(Layer(**x) for x in raw["layers"])
        raw["windows"] = tuple(raw["windows"])
        for side in ("inputs", "outputs"):
            raw[side] = tuple(Tensor(**dict(x, shape=tuple(x["shape"]))) for x in raw[side])
        made = Contract(**raw)
        for tensor in made.cache_inputs() + made.cache_outputs():
            if len(tensor.shape) != made.cache.rank:
                text = "contract: {}: got shape {}, allowed: rank {}"
                raise ValueError(text.format(tensor.name, list(tensor.shape), made.cache.rank))
        return made

    def cache_inputs(self) -> List[Tensor]:
        return [t for t in self.inputs if t.role in CACHE_ROLES]

    def cache_outputs(self) -> List[Tensor]:
        return [t for t in self.outputs if t.role in CACHE_ROLES]

    def history_bytes(self, item: int = 2) -> int:
        """Bytes of cache read in one step, at `item` bytes a value."""
        return item * sum(math.prod(t.shape) for t in self.cache_inputs())

    def returned_bytes(self, item: int = 2) -> int:
        """Bytes of cache written out by one step (the delta, or the whole buffer), at `item` bytes a value."""
        return item * sum(math.prod(t.shape) for t in self.cache_outputs())


def cache_tensors(cache: Cache, layers: Tuple[Layer, ...], slots: int, suffix: str = "") -> List[Tensor]:
    """The cache tensors of a boundary with `slots` slots, in order; `suffix` tells outputs from inputs.

    Shapes, Hk heads and D channels (packed per layer: D_k + D_v channels; for all layers: L * Hk heads):
    channels [Hk, D, 1, S] or rank 3 [Hk, D, S]; rows [1, Hk, S, D] or rank 3 [Hk, S, D].
    Raises ValueError where all layers must be equal and are not.
    """

    def shape(heads: int, channels: int) -> Tuple[int, ...]:
        if cache.layout == "channels":
            return (heads, channels, 1, slots) if cache.rank == 4 else (heads, channels, slots)
        return (1, heads, slots, channels) if cache.rank == 4 else (heads, slots, channels)

    tensors: List[Tensor] = []
    if cache.packing == "model":
        sizes = {(x.kv_heads, x.key_size, x.value_size) for x in layers}
        if len(sizes) > 1:
            raise ValueError("packing: got 'model' for layers of different sizes, allowed: apart, layer")
        heads, key, value = next(iter(sizes))
        heads *= len(layers)
        tensors.append(Tensor("keys" + suffix, KEY, shape(heads, key)))
        tensors.append(Tensor("values" + suffix, VALUE, shape(heads, value)))
        return tensors
    for i, x in enumerate(layers):
        if cache.packing == "layer":
            size = x.key_size + x.value_size
            tensors.append(Tensor("pair.{}{}".format(i, suffix), PAIR, shape(x.kv_heads, size), layer=i))
        else:
            tensors.append(Tensor("key.{}{}".format(i, suffix), KEY, shape(x.kv_heads, x.key_size), layer=i))
            tensors.append(Tensor("value.{}{}".format(i, suffix), VALUE, shape(x.kv_heads, x.value_size), layer=i))
    return tensors


def canonical(value: Any) -> str:
    """JSON with one spelling: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def named(tensors: Tuple[Tensor, ...]) -> Dict[str, Tensor]:
    return {t.name: t for t in tensors}
