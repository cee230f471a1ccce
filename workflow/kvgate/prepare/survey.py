"""Walk one token through a model and note what each attention module is called with: its place, mask and rotation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvgate.checkpoint import seams

REACH = 1 << 20  # tokens: windows are looked for up to this length


class Unsupported(Exception):
    """A model whose attention does not go through the two seams; the text says how."""


@dataclass
class Site:
    """An attention module as it was called."""

    module: str
    index: int  # layer in the cache
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 0
    heads: int = 0
    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    mask: int = 0
    rotation: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # what the attention function got: scaling, softcap, ...


@dataclass
class Survey:
    sites: list[Site]
    windows: list[int | None]
    rotations: list[tuple[str, tuple]]  # module path, arguments after (x, position_ids)
    widths: list[int]  # of their cos and sin
    positions: str  # path of the learned-position module
    position_table: Tensor | None  # [P, C]
    mixers: list[tuple[int, str]]  # layer and module of those that keep replaced states


def survey(model: nn.Module) -> Survey:
    """Raises Unsupported."""
    base = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    if not hasattr(base, "config"):  # ModernBERT's head is called `decoder`
        base = model.base_model
    recorder = _Recorder(model)
    path, table = _positions(model, base)
    with recorder:
        try:
            run(base, torch.zeros(1, 1, width(model)), recorder.layers, recorder.cached, after=recorder.kept)
        except Unsupported:
            raise
        except Exception as why:  # foreign code called in a way that it may not know
            text = str(why).strip() or type(why).__name__
            raise Unsupported(f"{recorder.place()}: {text.splitlines()[0]}") from why
    recorder.attended()
    if not recorder.sites:
        raise Unsupported("no attention module called the attention function")
    return Survey(recorder.sites, recorder.windows, recorder.rotations, recorder.widths, path, table, recorder.mixers)


def width(model: nn.Module) -> int:
    return model.get_input_embeddings().embedding_dim


def run(
    base: nn.Module,
    embedded: Tensor,
    layers: int,
    update: seams.Update,
    positions: Tensor | None = None,
    after: seams.After = lambda layer, kind, state: None,
) -> Any:
    """Call a model with embedded tokens [1, T, C] and a cache of our layers."""
    import inspect

    names = inspect.signature(base.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": True, "inputs_embeds": embedded}
    kwargs["cache" if "cache" in names else "past_key_values"] = seams.cache(layers, update, after)
    if "position_ids" in names:
        kwargs["position_ids"] = torch.arange(embedded.shape[1])[None] if positions is None else positions
    return base(**kwargs)


def window(mask_function: Callable[..., Any]) -> int | None:
    """The sliding window of a mask predicate in tokens, None: causal. Raises Unsupported on any other pattern."""
    zero = torch.tensor(0)
    columns = torch.arange(REACH)
    counts = {}
    for row in (REACH - 1, REACH - 77, REACH // 2):
        seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(row), columns)).expand(REACH)
        counts[row] = int(seen.sum())
        if not bool(seen[row + 1 - counts[row] : row + 1].all()):
            raise Unsupported(f"a mask that is neither causal nor a sliding window: token {row} sees {counts[row]}")
    most = max(counts.values())
    if any(count != min(row + 1, most) for row, count in counts.items()):  # a row shorter than the window sees all
        text = ", ".join(f"token {row} sees {count}" for row, count in counts.items())
        raise Unsupported(f"a mask that is neither causal nor a sliding window: {text}")
    return None if most == REACH else most


class _Recorder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.layers = model.config.get_text_config().num_hidden_layers
        self.sites: list[Site] = []
        self.mixers: list[tuple[int, str]] = []
        self.windows: list[int | None] = []
        self.rotations: list[tuple[str, tuple]] = []
        self.widths: list[int] = []
        self.angles: list[tuple[Tensor, Tensor]] = []
        self.inside: list[str] = []  # the modules whose forward is running
        self.pending: tuple[int, str] | None = None  # a layer that has cached and not attended yet, and its module
        self.hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self.model.named_modules():
            self.hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.inside.append(name)))
            self.hooks.append(module.register_forward_hook(self._called(name), with_kwargs=True))
            if is_rotary(module):
                self.hooks.append(module.register_forward_hook(self._rotary(name), with_kwargs=True))
        self.using = seams.using(self.attend, self.mask)
        self.using.__enter__()

    def __exit__(self, *error: object) -> None:
        self.using.__exit__()
        for hook in self.hooks:
            hook.remove()

    def place(self) -> str:
        """The innermost module that is running."""
        name = self.inside[-1] if self.inside else ""
        return f"{name or 'the model'} ({type(self.model.get_submodule(name)).__name__})"

    def attended(self) -> None:
        """Raises Unsupported where a layer has cached and then not attended."""
        if self.pending is not None:
            layer, place = self.pending
            raise Unsupported(f"{place} caches K and V of layer {layer} and does not call the attention function")

    def _rotary(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple, kwargs: dict, angles: Any) -> None:
            extra = rotary_arguments(args, kwargs)
            if (name, extra) not in self.rotations:
                self.rotations.append((name, extra))
                self.angles.append(angles)
                self.widths.append(angles[0].shape[-1])

        return note

    def mask(self, **kwargs: Any) -> Tensor:
        """A mask whose elements are the number of its window: modules may cut it, the number stays."""
        number = float(self._window(window(kwargs["mask_function"])))
        return torch.full((1, 1, kwargs["q_length"], kwargs["kv_length"]), number)

    def cached(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.attended()
        self.pending = (layer, self.place())
        return key, value

    def kept(self, layer: int, kind: str, state: Tensor) -> None:
        self.attended()
        if (layer, self.inside[-1]) not in self.mixers:
            self.mixers.append((layer, self.inside[-1]))

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        name = self.names[module]
        if self.pending is None:
            raise Unsupported(f"{name} attends without caching K and V of its own")
        index, self.pending = self.pending[0], None
        if not self.windows:
            self.windows.append(None)
        site = Site(name, index, options=options)
        window = options.get("window")
        site.heads, site.kv_heads = query.shape[1], key.shape[1]
        site.key_size, site.value_size = key.shape[-1], value.shape[-1]
        site.mask = self._window(None) if mask is None else int(mask.flatten()[0])
        if mask is not None and not (site.mask in range(len(self.windows)) and bool((mask == site.mask).all())):
            raise Unsupported(f"{name} makes a mask of its own")
        if window is not None:  # the module cuts the mask to it by itself
            site.mask = self._window(window)
        self.sites.append(site)
        return torch.zeros(1, query.shape[2], site.heads, site.value_size)

    def _window(self, found: int | None) -> int:
        """Its number."""
        if found not in self.windows:
            self.windows.append(found)
        return self.windows.index(found)

    def _called(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            self.inside.pop()
            if not self.sites or self.sites[-1].module != name:
                return
            site = self.sites[-1]
            site.args, site.kwargs = args, kwargs
            site.outputs = len(out) if isinstance(out, tuple) else 0
            angles = kwargs.get("position_embeddings")
            if angles is not None and "slopes" not in site.options:  # alibi: handed angles, Falcon leaves them
                site.rotation = next(i for i, known in enumerate(self.angles) if known[0] is angles[0])

        return note


def is_rotary(module: nn.Module) -> bool:
    return "Rotary" in type(module).__name__


def rotary_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """What a rotary module was called with besides (x, position_ids)."""
    named = tuple(v for k, v in sorted(kwargs.items()) if k not in ("x", "position_ids") and v is not None)
    return (*args[2 - sum(k in kwargs for k in ("x", "position_ids")) :], *named)


class _Stop(Exception):
    pass


def _positions(model: nn.Module, base: nn.Module) -> tuple[str, Tensor | None]:
    """The module of learned positions and its rows, by asking for every position it can have."""
    embedding = model.get_input_embeddings()
    others = [(n, m) for n, m in model.named_modules() if _is_positions(m) and m is not embedding]
    found: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, out: Tensor) -> None:
            if bool((out == out[..., :1, :]).all()):
                return  # the same row for each: a type of tokens
            found.append((name, out))
            raise _Stop

        return hook

    if not others:
        return "", None
    limit = model.config.get_text_config().max_position_embeddings
    hooks = [m.register_forward_hook(note(n)) for n, m in others]
    try:
        with seams.using(_no_attention):
            run(base, torch.zeros(1, limit, width(model)), model.config.get_text_config().num_hidden_layers, _keep)
    except _Stop:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return "", None
    name, rows = found[0]
    return name, rows[0]


def _is_positions(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or "Positional" in type(module).__name__


def _keep(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key, value


def _no_attention(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("not reached: the learned positions come before the first attention")
