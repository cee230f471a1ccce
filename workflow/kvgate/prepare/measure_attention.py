"""Measure an attention module by calling its own forward: joint weights, norms, rotation. No weight name is read.

At the seams (cache and attention function) a module shows q, k, v for any hidden states and what it makes of any
attention output. On zero and unit inputs that is its matrices and biases, whatever it does inside: fused, interleaved,
transposed, scaled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvgate.checkpoint import seams
from kvgate.prepare import rotary
from kvgate.prepare.spec import Layer, Rotation
from kvgate.prepare.survey import Site, Unsupported

# Unit vectors are this long (a power of two: exact), so that a large bias does not round the weights away.
UNIT = 2.0**20
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Norm:
    """y = weight * x / rms(x) + bias over the last axis; `centred`: the mean is taken off first."""

    span: int  # channels that it normalizes together
    weight: Tensor  # [H, D], float64
    bias: Tensor | None
    epsilon: float
    centred: bool
    late: bool  # it reads q or k after the rotation


def layer(module: nn.Module, site: Site, rotation: Rotation | None) -> tuple[Layer, dict[str, Tensor], Rotation | None]:
    """The layer's facts, the recipe's tensors, and how it rotates (None: not). Raises Unsupported with the reason."""
    _supported(site)
    children = norm_children(module).items()
    norms = {role: _norm(module, site, role, child, rotation) for role, child in children}
    bare = _Bare(module, site)
    with bare:
        joint, bias = _affine(bare, site)
        out, out_bias, gate = _output(bare, site)
        turning = rotary.measure(bare.heads, bare.TOKENS, rotation) if rotation else None
    made = Layer(
        module=site.module,
        index=site.index,
        heads=site.heads,
        kv_heads=site.kv_heads,
        key_size=site.key_size,
        value_size=site.value_size,
        outputs=site.outputs,
        mask=site.mask,
        rotation=site.rotation if turning else None,
        softcap=site.options.get("softcap"),
        **distances(site),
        residual=bool(site.options.get("residual")),
        kernel=site.kv_heads == 1 and (site.heads <= 8 or site.heads % 8 != 0),
    )
    scale = float(site.options.get("scaling") or site.key_size**-0.5)
    made, tensors = _assemble(made, joint, bias, norms, scale)
    groups = made.heads // made.kv_heads
    size, hidden = made.key_size, out.shape[1]
    out = out.view(made.kv_heads, groups, size, hidden).transpose(1, 2)  # [Hk, D, g, C]
    tensors["out"] = out[0].permute(2, 0, 1)[:, :, None] if made.kernel else out.flatten(0, 2)
    if out_bias is not None:
        tensors["out_bias"] = out_bias
    if gate is not None:
        tensors["gate"] = _group(gate.unflatten(1, (made.heads, size)), made.kv_heads, groups).flatten(1)
    return made, {k: v.contiguous() for k, v in tensors.items()}, turning


def _supported(site: Site) -> None:
    if site.key_size != site.value_size:
        raise Unsupported(f"{site.module}: keys of {site.key_size} and values of {site.value_size} channels")
    if site.options.get("s_aux") is not None:
        raise Unsupported(f"{site.module}: attention sinks")
    if site.heads % site.kv_heads:
        raise Unsupported(f"{site.module}: {site.heads} query heads for {site.kv_heads} KV heads")


def distances(site: Site) -> dict[str, Any]:
    """The layer's fields of the distance bias that the module adds to its scores (alibi)."""
    found = site.options.get("slopes")
    return {} if found is None else {"slopes": tuple(found.tolist()), "bfloat16": site.options.get("bfloat16", 0.0)}


def norm_children(module: nn.Module) -> dict[str, str]:
    """`q` and `k` to the names of the norms of queries and keys."""
    named = [n for n, m in module.named_children() if "Norm" in type(m).__name__]
    return {role: n for role in "qk" for n in named if n.startswith(role)}


class _Seen(Exception):
    """Carries q, k, v [T, H, D] out of a forward that is not needed any further."""


class _Bare:
    """A module whose norms of q and k are the identity while it is measured."""

    TOKENS = 24

    def __init__(self, module: nn.Module, site: Site, bare: bool = True) -> None:
        self.module, self.site = module, site
        self.norms = {n: getattr(module, n) for n in norm_children(module).values()} if bare else {}
        self.width = self._hidden().shape[-1]

    def __enter__(self) -> "_Bare":
        for name in self.norms:
            setattr(self.module, name, nn.Identity())
        return self

    def __exit__(self, *error: object) -> None:
        for name, norm in self.norms.items():
            setattr(self.module, name, norm)

    def _hidden(self) -> Tensor:
        found = self.site.args[0] if self.site.args else self.site.kwargs["hidden_states"]
        return found

    def call(self, hidden: Tensor, attention: Any, angles: tuple[Tensor, Tensor] | None = None) -> Any:
        """The module's forward on [1, T, C], at cos 1 and sin 0 if no angles are given; `attention` is the seam."""
        fresh = seams.cache(self.site.index + 1, lambda i, k, v: (k, v))
        kwargs = {k: fresh if isinstance(v, seams.Cache) else v for k, v in self.site.kwargs.items()}
        args = [fresh if isinstance(a, seams.Cache) else a for a in self.site.args]
        if args:  # a residual that the module adds would be taken for its bias
            same = [isinstance(a, Tensor) and a.shape == args[0].shape for a in args]
            args = [torch.zeros(1) if alike and a is not args[0] else a for a, alike in zip(args, same, strict=True)]
            args = [hidden if a is args[0] else a for a in args]  # CTRL is handed them three times
        else:
            kwargs["hidden_states"] = hidden
        known = kwargs.get("position_embeddings")
        if known is not None:
            shape = (1, hidden.shape[1], known[0].shape[-1])
            kwargs["position_embeddings"] = angles or (torch.ones(shape), torch.zeros(shape))
        with seams.using(attention):
            return self.module(*args, **kwargs)

    def seen(self, hidden: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, Hq, D], k and v [T, Hk, D] at the seams."""

        def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
            raise _Seen(*(x[0].transpose(0, 1) for x in (query, key, value)))

        try:
            self.call(hidden, attention, angles)
        except _Seen as found:
            return found.args  # type: ignore[return-value]
        raise Unsupported(f"{self.site.module} does not call the attention function")

    def heads(self, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, D]: every query and key head of some random tokens."""
        q, k, _ = self.seen(_random(self.TOKENS, self.width), (cos, sin))
        return torch.cat([q.flatten(0, 1), k.flatten(0, 1)])


def _random(tokens: int, width: int) -> Tensor:
    return torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0))


def _affine(bare: _Bare, site: Site) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v as matrices [C, H, D] and biases [H, D]."""
    units = torch.cat([torch.zeros(1, bare.width), UNIT * torch.eye(bare.width)])[None]
    rows = bare.seen(units)
    biases = [x[0].clone() for x in rows]
    matrices = [(x[1:] - x[:1]) / UNIT for x in rows]
    hidden = _random(bare.TOKENS, bare.width)
    for got, matrix, bias in zip(bare.seen(hidden), matrices, biases, strict=True):
        want = torch.einsum("tc,chd->thd", hidden[0], matrix) + bias
        if not (want - got).norm() <= TOLERANCE * got.norm():
            raise Unsupported(f"{site.module}: its queries, keys and values are not affine in the hidden states")
    return matrices, biases


def _output(bare: _Bare, site: Site) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output projection [Hq * D, C], its bias [C] (None: zero), and the matrix [C, Hq * D] of a gate before it."""
    size = site.heads * site.value_size

    def project(rows: Tensor, hidden: Tensor | None = None) -> Tensor:
        def attention(*args: Any, **options: Any) -> Tensor:
            return rows.view(1, len(rows), site.heads, site.value_size)

        out = bare.call(torch.zeros(1, len(rows), bare.width) if hidden is None else hidden[None], attention)
        return (out[0] if isinstance(out, tuple) else out)[0]

    rows = project(torch.cat([torch.zeros(1, size), UNIT * torch.eye(size)]))
    bias, matrix = rows[0].clone(), (rows[1:] - rows[:1]) / UNIT
    sample = _random(bare.TOKENS, size)[0]
    want, got = sample @ matrix + bias, project(sample)
    if not (want - got).norm() <= TOLERANCE * got.norm():
        raise Unsupported(f"{site.module}: its output is not affine in what attention returns")
    gate, hidden = None, _random(bare.TOKENS, bare.width)[0]
    got = project(sample, hidden)
    if not (want - got).norm() <= TOLERANCE * got.norm():
        gate = _gate(project, matrix, bias, bare.width)
        matrix = 2 * matrix  # measured where the gate is a half
        want = (sample * torch.sigmoid(hidden @ gate)) @ matrix + bias
        if not (want - got).norm() <= TOLERANCE * got.norm():
            raise Unsupported(f"{site.module}: its output reads the hidden states, and not as a sigmoid of a product")
    return matrix, (bias if bias.any() else None), gate


def _gate(project: Callable[..., Tensor], matrix: Tensor, bias: Tensor, width: int) -> Tensor:
    """[C, Hq * D]: what the hidden states are multiplied by in a gate sigmoid(hidden @ gate) before the projection.

    matrix: the projection [Hq * D, C] through the half-open gate of hidden states that are zero. A block of channels at
    a time, few enough to tell them apart in the output.
    """
    found = []
    for block in torch.arange(len(matrix)).split(max(1, min(matrix.shape) // 2)):
        rows = torch.zeros(width, len(matrix))
        rows[:, block] = 1.0
        opened = torch.linalg.lstsq(matrix[block].T, (project(rows, torch.eye(width)) - bias).T).solution.T
        found.append(torch.logit(opened / 2))
    return torch.cat(found, dim=1)


def _norm(module: nn.Module, site: Site, role: str, child: str, rotation: Rotation | None) -> Norm:
    """Measure the norm of q or k on what it is really called with."""
    calls: list[tuple[Tensor, Tensor]] = []
    norm = getattr(module, child)
    hook = norm.register_forward_hook(lambda m, args, out: calls.append((args[0], out)))
    bare = _Bare(module, site, bare=False)
    hidden, angles = _random(bare.TOKENS, bare.width), torch.ones(1, bare.TOKENS, rotation.width if rotation else 1)
    try:
        bare.seen(hidden)
        count = len(calls)
        bare.seen(hidden, (torch.zeros_like(angles), angles))  # turned by 90 degrees
    finally:
        hook.remove()
    if count != 1:
        raise Unsupported(f"{site.module}.{child}: called {count} times in one step")
    late = not torch.equal(calls[0][0], calls[1][0])
    epsilon = float(getattr(norm, "eps", getattr(norm, "variance_epsilon", 0.0)) or 0.0)
    heads = site.heads if role == "q" else site.kv_heads
    x, y = (_by_token(t, bare.TOKENS, heads, site.key_size) for t in calls[0])
    span = calls[0][0].shape[-1]
    for centred in (False, True):
        found = _fit(x, y, span, epsilon, centred)
        if found:
            return replace(found, late=late)
    raise Unsupported(f"{site.module}.{child}: neither an RMS norm nor a LayerNorm")


def _by_token(x: Tensor, tokens: int, heads: int, size: int) -> Tensor:
    """[T, H, D] of what a norm reads: [1, H, T, D], [1, T, H, D] or [1, T, H * D]."""
    if x.dim() == 4 and x.shape[1] == heads and x.shape[2] == tokens:
        x = x.transpose(1, 2)
    return x.reshape(tokens, heads, size).double()


def _normalized(x: Tensor, span: int, epsilon: float, centred: bool) -> Tensor:
    flat = x.reshape(-1, span)
    if centred:
        flat = flat - flat.mean(1, keepdim=True)
    return (flat * torch.rsqrt(flat.pow(2).mean(1, keepdim=True) + epsilon)).reshape(x.shape)


def _fit(x: Tensor, y: Tensor, span: int, epsilon: float, centred: bool) -> Norm | None:
    """Weight and bias per head and channel by least squares over the tokens; None where they do not fit."""
    n = _normalized(x, span, epsilon, centred)
    weight = ((n - n.mean(0)) * (y - y.mean(0))).sum(0) / (n - n.mean(0)).pow(2).sum(0)
    bias = y.mean(0) - weight * n.mean(0)
    if not (weight * n + bias - y).norm() <= TOLERANCE * y.norm():
        return None
    plain = bool(bias.abs().max() <= 1e-6 * y.abs().max())
    return Norm(span, weight, None if plain else bias, epsilon, centred, late=False)


def _assemble(
    made: Layer, matrices: list[Tensor], biases: list[Tensor], norms: dict[str, Norm], scale: float
) -> tuple[Layer, dict[str, Tensor]]:
    """The joint product's matrix and bias, and the norm's weights. The softmax scale goes into q."""
    matrices, biases = [x.double() for x in matrices], [x.double() for x in biases]
    if set(norms) not in (set(), {"q", "k"}):
        raise Unsupported(f"{made.module}: a norm on {' and '.join(norms)} only")
    kind = ""
    if norms:
        q, k = norms["q"], norms["k"]
        kind = "head" if q.span == made.key_size == k.span else "all"
        made = replace(made, norm=kind, epsilon=(q.epsilon, k.epsilon), late=q.late)
        if q.late != k.late or (q.late and (kind == "all" or q.centred or k.centred)):
            raise Unsupported(f"{made.module}: a norm after the rotation that is no RMS norm of each head of q and k")
        if kind == "head" and q.epsilon != k.epsilon:
            raise Unsupported(f"{made.module}: norms of q and k with different epsilon")
        for i, norm in enumerate((q, k)):
            if norm.centred and kind == "head":  # a LayerNorm is the RMS norm of centred rows
                matrices[i] = matrices[i] - matrices[i].mean(2, keepdim=True)
                biases[i] = biases[i] - biases[i].mean(1, keepdim=True)
            elif norm.centred or (norm.bias is not None and kind == "all"):
                raise Unsupported(f"{made.module}: a LayerNorm over all heads of q or k")
    else:
        matrices[0], biases[0] = matrices[0] * scale, biases[0] * scale
    groups = made.heads // made.kv_heads
    pack = _columns if kind != "all" else _apart
    tensors = {"qkv": pack(matrices, made.kv_heads, groups)}
    if any(b.any() for b in biases):
        tensors["bias"] = pack([b[None] for b in biases], made.kv_heads, groups)[0]
    if kind == "head":
        weights = [norms["q"].weight * scale, norms["k"].weight]
        tensors["norm"] = _norm_columns(weights, made.kv_heads, groups)
        if any(n.bias is not None for n in norms.values()):
            shifts = [torch.zeros_like(n.weight) if n.bias is None else n.bias for n in (norms["q"], norms["k"])]
            tensors["shift"] = _norm_columns([shifts[0] * scale, shifts[1]], made.kv_heads, groups)
    elif kind == "all":
        tensors["norm_q"] = _group(norms["q"].weight[None] * scale, made.kv_heads, groups).flatten()
        tensors["norm_k"] = norms["k"].weight.flatten()
    return made, {k: v.float() for k, v in tensors.items()}


def _group(q: Tensor, kv_heads: int, groups: int) -> Tensor:
    """[C, Hq, D] -> [C, Hk, D, g]: the g query heads of a KV head as its columns."""
    return q.reshape(len(q), kv_heads, groups, -1).transpose(2, 3)


def _columns(parts: list[Tensor], kv_heads: int, groups: int) -> Tensor:
    """[C, Hk * D * (g + 2)] ordered (KV head, channel, column): g queries, the key, the value."""
    q, k, v = parts
    return torch.cat([_group(q, kv_heads, groups), k[..., None], v[..., None]], dim=3).flatten(1)


def _apart(parts: list[Tensor], kv_heads: int, groups: int) -> Tensor:
    """All of q (KV head, channel, column), then k, then v: a norm over all heads reads each of them whole."""
    q, k, v = parts
    return torch.cat([_group(q, kv_heads, groups).flatten(1), k.flatten(1), v.flatten(1)], dim=1)


def _norm_columns(weights: list[Tensor], kv_heads: int, groups: int) -> Tensor:
    """[1 or Hk, D, 1, g + 1]: one KV head's if all are equal."""
    q, k = weights
    columns = torch.cat([_group(q[None], kv_heads, groups)[0], k[..., None]], dim=2)[:, :, None]
    equal = (columns - columns[:1]).abs().max() < 1e-6 * columns.abs().max()  # fitted ones differ in their last digits
    return columns.mean(0, keepdim=True) if equal else columns
