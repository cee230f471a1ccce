"""Recipe A: one attention step in the form that the compiler turns into the fewest and leanest operators.

A KV head's query columns, its key and its value stand side by side, channels first: [Hk, D, 1, g + 2]. So no KV head is
repeated, nothing is transposed, the g queries of a group are g rows of one fused attention, and the rotation is one
product. The tensors come from measure_attention.py, already in this order.

Of T tokens the tokens come last, as a convolution leaves them: [Hk, D, 1, (g + 2) * T], a column's tokens side by side.
K and V are then cut off as the cache has them, and the g * T queries are rows of one fused attention. Each token has
angles of its own, so the rotation is x * cos + (R x) * sin with one constant R.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kvgate.checkpoint.seams import Step
from kvgate.prepare.spec import Layer

TENSORS = ("qkv", "bias", "norm", "shift", "norm_q", "norm_k", "gate", "out", "out_bias")


@dataclass(frozen=True)
class Angles:
    """How a chunk of T tokens is rotated: x * cosine + (turn x) * sine, then `turned`, where there is one."""

    cosine: Tensor  # [1, D, 1, T]
    sine: Tensor
    turn: Tensor  # [D(out), D(in)], a signed permutation
    turned: Tensor | None = None  # [D(out), D(in)]
    wide: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by n, [1, D, 1, n * T]

    def apply(self, columns: Tensor, n: int) -> Tensor:
        """[Hk, D, 1, n * T] of the same."""
        if n not in self.wide:  # the same for every layer: once in the graph
            self.wide[n] = torch.cat([self.cosine] * n, 3), torch.cat([self.sine] * n, 3)
        cosine, sine = self.wide[n]
        rotated = columns * cosine + _channels(self.turn, columns) * sine
        return rotated if self.turned is None else _channels(self.turned, rotated)


def _channels(matrix: Tensor, columns: Tensor) -> Tensor:
    """A matrix [D(out), D(in)] on the channels of [Hk, D, 1, n]."""
    return nn.functional.conv2d(columns, matrix[:, :, None, None])


class Attention(nn.Module):
    """In the place of an attention module; reads its step, not its arguments."""

    def __init__(self, layer: Layer, step: Step, tensors: Mapping[str, Tensor]) -> None:
        """tensors: those of TENSORS that the layer has."""
        super().__init__()
        self.layer, self.step = layer, step
        self.groups = layer.heads // layer.kv_heads
        for name in TENSORS:
            found = tensors.get(name)
            self.register_parameter(name, None if found is None else nn.Parameter(found, requires_grad=False))

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        layer, step = self.layer, self.step
        joint = hidden_states @ self.qkv  # [1, T, Hk * D * (g + 2)]
        if self.bias is not None:
            joint = joint + self.bias
        chunk = joint.shape[1] > 1
        q, k, v = self.chunk(joint) if chunk else self.columns(joint)
        keys, values = step.update(layer.index, k, v)  # [Hk, D, 1, S]
        attended = self.gated(hidden_states, self.attend(q, keys, values, step.masks[layer.index]))
        out = self.project_chunk(attended) if chunk else self.project(attended)
        if layer.residual:
            out = out + args[0]  # type: ignore[operator]
        return (out, *[None] * (layer.outputs - 1)) if layer.outputs else out

    def columns(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [Hk, D, 1, g], k and v [Hk, D, 1, 1], normed and rotated, of the joint product [1, 1, columns]."""
        return self._whole_norm(joint) if self.layer.norm == "all" else self._split(joint)

    def chunk(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [Hk, D, 1, g * T], k and v [Hk, D, 1, T] of the joint product [1, T, columns]."""
        layer, groups, tokens = self.layer, self.groups, int(joint.shape[1])
        if layer.norm == "all":
            one = layer.kv_heads * layer.key_size
            q, k, v = joint.split([one * groups, one, one], dim=2)
            q = self._tokens_last(_rms(q, 2, layer.epsilon[0]) * self.norm_q)
            k = self._tokens_last(_rms(k, 2, layer.epsilon[1]) * self.norm_k)
            return self._turn(q, groups), self._turn(k, 1), self._tokens_last(v)
        both, v = self._tokens_last(joint).split([(groups + 1) * tokens, tokens], dim=3)
        if layer.late:
            both = self._turn(both, groups + 1)
        if layer.norm:
            both = _rms(both, 1, layer.epsilon[0]) * self._each(self.norm, tokens)
            if self.shift is not None:
                both = both + self._each(self.shift, tokens)
        if not layer.late:
            both = self._turn(both, groups + 1)
        q, k = both.split([groups * tokens, tokens], dim=3)
        return q, k, v

    def _tokens_last(self, x: Tensor) -> Tensor:
        """[Hk, D, 1, n * T] of [1, T, Hk * D * n]."""
        return x.permute(0, 2, 1).reshape(self.layer.kv_heads, self.layer.key_size, 1, -1)

    def _turn(self, columns: Tensor, n: int) -> Tensor:
        """[Hk, D, 1, n * T] rotated."""
        return columns if self.layer.rotation is None else self.step.rotations[self.layer.rotation].apply(columns, n)

    def _each(self, weight: Tensor, tokens: int) -> Tensor:
        """[Hk or 1, D, 1, g + 1] for each of the tokens: only as [.., D, 1, columns] the compiler fuses it rightly."""
        return torch.cat([weight.permute(0, 1, 3, 2)] * tokens, 3).reshape(*weight.shape[:2], 1, -1)

    def project_chunk(self, attended: Tensor) -> Tensor:
        """[Hk, D, 1, g * T] -> [1, T, C]."""
        layer = self.layer
        if layer.kernel:
            images = attended.reshape(layer.kv_heads, layer.key_size, self.groups, -1).permute(0, 1, 3, 2)
            return nn.functional.conv2d(images, self.out, self.out_bias).flatten(2).permute(0, 2, 1)
        rows = attended.reshape(1, layer.kv_heads * layer.key_size * self.groups, -1).permute(0, 2, 1)
        out = rows @ self.out
        return out if self.out_bias is None else out + self.out_bias

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """[Hk, D, 1, Q] of q [Hk, D, 1, Q] over keys and values [Hk, D, 1, S], mask [1 or Q, S], with alibi
        [Hk, 1, Q, S]; Q is g, of T tokens g * T."""
        cap = self.layer.softcap
        if cap is None:
            scores = q.permute(0, 2, 3, 1) @ keys.permute(0, 2, 1, 3)  # [Hk, 1, g, S]
            return (torch.softmax(scores + mask, dim=-1) @ values.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        # A soft cap stops the fusion. Slots first then: the other way round the compiler transposes the weights too.
        scores = keys.permute(0, 2, 3, 1) @ q.permute(0, 2, 1, 3)  # [Hk, 1, S, g]
        capped = torch.tanh(scores / cap) * cap
        column = mask.reshape(1, 1, -1, 1) if q.shape[3] == self.groups else mask.transpose(-1, -2)
        weights = torch.softmax(capped + column, dim=2)
        return (values.permute(0, 2, 1, 3) @ weights).permute(0, 2, 1, 3)

    def gated(self, hidden_states: Tensor, attended: Tensor) -> Tensor:
        """What attention read, [Hk, D, 1, g] or [T, Hk, D, 1, g], through the gate that some models have behind it."""
        if self.gate is None:
            return attended
        return attended * torch.sigmoid(hidden_states @ self.gate).reshape(attended.shape)

    def _split(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self.layer
        columns = joint.reshape(layer.kv_heads, layer.key_size, 1, self.groups + 2)
        if layer.rotation is None and not layer.norm:
            return tuple(columns.split([self.groups, 1, 1], dim=3))  # type: ignore[return-value]
        both, v = columns.split([self.groups + 1, 1], dim=3)
        if layer.late:
            both = self._rotate(both)
        if layer.norm:
            both = _rms(both, 1, layer.epsilon[0]) * self.norm
            if self.shift is not None:
                both = both + self.shift
        if not layer.late:
            both = self._rotate(both)
        q, k = both.split([self.groups, 1], dim=3)
        return q, k, v

    def _whole_norm(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same where the norm of q and that of k span all heads; rotating them apart is a row shorter."""
        layer, one = self.layer, self.layer.kv_heads * self.layer.key_size
        q, k, v = joint.split([one * self.groups, one, one], dim=2)
        q = _rms(q, 2, layer.epsilon[0]) * self.norm_q
        k = _rms(k, 2, layer.epsilon[1]) * self.norm_k
        shape = (layer.kv_heads, layer.key_size, 1)
        return (
            self._rotate(q.reshape(*shape, self.groups)),
            self._rotate(k.reshape(*shape, 1)),
            v.reshape(*shape, 1),
        )

    def _rotate(self, columns: Tensor) -> Tensor:
        if self.layer.rotation is None:
            return columns
        # As [1, D(in), 1, D(out)] permuted here it costs neither a convolution nor a transpose.
        matrix = self.step.rotations[self.layer.rotation].permute(0, 2, 3, 1)  # [1, 1, D(out), D(in)]
        return (matrix @ columns.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)

    def project(self, attended: Tensor) -> Tensor:
        """[T, Hk, D, 1, g], or [Hk, D, 1, g] of one token, -> [1, T, C].

        One KV head: as a convolution, else the reshape turns into two of them.
        """
        tokens = attended.shape[0] if attended.dim() == 5 else 1
        if self.layer.kernel:
            images = attended.flatten(0, 1) if attended.dim() == 5 else attended
            out = nn.functional.conv2d(images, self.out, self.out_bias)
            return out.reshape(1, tokens, -1)
        out = attended.reshape(1, tokens, -1) @ self.out
        return out if self.out_bias is None else out + self.out_bias


def _rms(x: Tensor, axis: int, epsilon: float) -> Tensor:
    """The spelling that the compiler fuses: a power, not x * x."""
    return x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + epsilon)
