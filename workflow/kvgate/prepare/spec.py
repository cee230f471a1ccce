"""What `prepare` found in a model, as JSON: enough to build the decoder again without its checkpoint. Stdlib only."""

from dataclasses import asdict, dataclass
from typing import Any

from kvgate import contract as c


@dataclass(frozen=True)
class Rotation:
    """One rotary embedding: the module that makes cos and sin, and how its attention applies them to D channels.

    channel d of the rotated vector = cos[cosine[d]] * x[d] + sign[d] * sin[sine[d]] * x[turn[d]];
    -1 in `cosine` and `sine`: the channel passes as it is. The lists are empty in the plain form.
    """

    module: str
    arguments: tuple[Any, ...]  # what its forward takes after (x, position_ids)
    width: int  # of cos and sin
    cosine: tuple[int, ...] = ()
    sine: tuple[int, ...] = ()
    turn: tuple[int, ...] = ()
    sign: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One attention module."""

    module: str  # path in the model
    index: int  # of its layer in the cache
    heads: int  # Hq
    kv_heads: int  # Hk
    key_size: int  # D
    value_size: int
    outputs: int  # length of the tuple that its forward returns; 0: a tensor
    mask: int = 0
    rotation: int | None = None
    scale: float = 1.0  # plain only: the recipe folds it into the weights
    softcap: float | None = None
    norm: str = ""  # recipe only: "" none, `head`: RMS over D, `all`: RMS over all heads
    epsilon: tuple[float, float] = (0.0, 0.0)  # of q's and k's norm
    kernel: bool = False  # the output projection is a convolution with kernel (1, g)
    slopes: tuple[float, ...] = ()  # alibi: of each query head, score += slope * (key's position - query's)
    bfloat16: float = 0.0  # alibi of Falcon: not 0: slope * position rounded to bfloat16, then times this
    late: bool = False  # recipe only: the norm of q and k reads them after their rotation
    residual: bool = False  # the module adds its second argument to its output


@dataclass(frozen=True)
class ShortConvolution:
    """A layer that keeps the last inputs of a convolution over each channel's `window` newest ones."""

    module: str
    index: int  # of its layer in the cache
    channels: int
    window: int

    def states(self) -> tuple[c.State, ...]:
        return (c.convolution(self.index, self.channels, self.window - 1),)


@dataclass(frozen=True)
class DeltaRule:
    """A layer of linear attention by the gated delta rule, behind a convolution of its queries, keys and values."""

    module: str
    index: int
    channels: int  # of the convolution
    window: int
    key_heads: int  # each serves heads / key_heads heads
    heads: int
    key_size: int
    value_size: int
    epsilon: float  # of the norm of its output

    def states(self) -> tuple[c.State, ...]:
        kept = c.recurrent(self.index, self.heads, self.key_size, self.value_size)
        return c.convolution(self.index, self.channels, self.window - 1), kept


Mixer = ShortConvolution | DeltaRule


@dataclass(frozen=True)
class Norm:
    """A norm module that is replaced by an equal one; `rms` or `layer`, over the last axis."""

    module: str
    kind: str
    epsilon: float


@dataclass(frozen=True)
class Spec:
    form: str  # `recipe` or `plain`
    reason: str  # why it is not `recipe`; empty where it is
    vocabulary: int
    hidden: int  # C of the embedding rows
    positions: str  # path of the learned-position module, "" none
    windows: tuple[int | None, ...]  # of each distinct mask, in tokens
    rotations: tuple[Rotation, ...]
    layers: tuple[Layer, ...]
    norms: tuple[Norm, ...] = ()
    top: int = 0  # about how large the largest logit is
    convolutions: tuple[ShortConvolution, ...] = ()
    delta_rules: tuple[DeltaRule, ...] = ()

    @property
    def mixers(self) -> list[Mixer]:
        """The layers without K and V, in order."""
        return sorted((*self.convolutions, *self.delta_rules), key=lambda x: x.index)

    @property
    def depth(self) -> int:
        """Layers of the cache."""
        return len(self.layers) + len(self.mixers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> "Spec":
        def tuples(x: dict[str, Any]) -> dict[str, Any]:
            return {k: tuple(v) if isinstance(v, list) else v for k, v in x.items()}

        parts: dict[str, Any] = {"rotations": Rotation, "layers": Layer, "norms": Norm}
        parts |= {"convolutions": ShortConvolution, "delta_rules": DeltaRule}
        lists = {name: tuple(kind(**tuples(x)) for x in raw[name]) for name, kind in parts.items()}
        return Spec(**{**tuples(raw), **lists})
