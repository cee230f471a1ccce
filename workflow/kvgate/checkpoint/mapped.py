"""Parameters that stay in their file: float64 to all that reads them, and in memory as such only while they are read.

A model in float64 would take twice the file's size, or four times. What is worked out is the same to the bit: a cast
from the file's dtype is exact, and every operator gets the layout that a parameter in memory would have.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

KEEP = 2 << 30  # bytes of float64 that are kept for the next reader: a small model is cast once, not at every step

_aten = torch.ops.aten
_VIEWS = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
}


class _Root:
    """The tensor that several views are of. `shared`: another root has it too."""

    total = 0  # bytes kept of all roots

    def __init__(self, base: Tensor, shared: bool = False) -> None:
        self.base, self.shared = base, shared
        self.kept: dict[tuple, Tensor] = {}

    def keep(self, key: tuple, made: Tensor) -> None:
        if _Root.total + made.nbytes <= KEEP:
            _Root.total += made.nbytes
            self.kept[key] = made

    def own(self) -> None:
        """Before it is written: in memory, in float64, and nobody else's."""
        if self.shared or self.base.dtype != torch.float64:
            self.base, self.shared = self.base.to(torch.float64, copy=True), False
        self.forget()

    def forget(self) -> None:
        _Root.total -= sum(x.nbytes for x in self.kept.values())
        self.kept.clear()

    def __del__(self) -> None:
        self.forget()


class Mapped(Tensor):
    """A tensor of float64 whose values lie in another dtype, and maybe in another order (`contiguous` copies nothing).

    What changes it in place takes it into memory first: the file is never written.
    """

    root: _Root
    place: tuple  # sizes, strides and offset of the values in the root's tensor

    @staticmethod
    def __new__(cls, root: _Root, place: tuple, strides: tuple[int, ...]) -> "Mapped":
        made = torch.Tensor._make_wrapper_subclass(cls, place[0], strides=strides, dtype=torch.float64)  # type: ignore[attr-defined]
        made.root, made.place = root, place
        return made  # type: ignore[no-any-return]

    def held(self) -> Tensor:
        """The values in the dtype and order in which they lie."""
        return self.root.base.as_strided(*self.place)

    def wide(self) -> Tensor:
        """The values in float64, in the order that the tensor says it has."""
        held = self.held()
        if held.dtype == torch.float64 and held.stride() == self.stride():
            return held
        key = (*self.place, self.stride())
        found = self.root.kept.get(key)
        if found is None:
            if self.is_contiguous():
                held = held.contiguous()  # in its own dtype first: torch has a fast way only between equal ones
            with torch.inference_mode(False):  # it may be kept for a reader with gradients
                found = torch.empty_strided(self.size(), self.stride(), dtype=torch.float64).copy_(held)
            self.root.keep(key, found)
        return found

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Mapped({list(self.shape)}, {self.root.base.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _VIEWS:
            return _views(function, args[0], args[1:], kwargs)
        if function is _aten.clone.default:
            return _clone(args[0], kwargs.get("memory_format"))
        if function is _aten.embedding.default and isinstance(args[0], Mapped):
            return function(args[0].held(), *_wide(args[1:]), **kwargs).to(torch.float64)
        if function._schema.is_mutable:
            return _write(function, args, kwargs)
        return function(*_wide(args), **_wide(kwargs))


def mapped(values: Tensor) -> Tensor:
    """A tensor of a file as float64. One that is float64 already is itself; vectors are cast, they are small."""
    if values.dtype == torch.float64 or not values.is_floating_point():
        return values
    if values.dim() < 2 or not values.is_contiguous():
        return values.to(torch.float64)
    return _of(_Root(values), values)


def held(tensor: Tensor) -> Tensor:
    """The values of any tensor without a cast, detached."""
    return tensor.held() if isinstance(tensor, Mapped) else tensor.detach()


@contextmanager
def loading() -> Iterator[None]:
    """Whatever transformers loads here in float64 stays in its file."""
    from transformers import core_model_loading

    original = core_model_loading._materialize_copy  # the one place where a tensor is read

    def read(tensor: Any, device: Any = None, dtype: Any = None) -> Tensor:
        return mapped(tensor[...]) if dtype is torch.float64 else original(tensor, device, dtype)

    core_model_loading._materialize_copy = read
    try:
        yield
    finally:
        core_model_loading._materialize_copy = original


def _of(root: _Root, view: Tensor, strides: tuple[int, ...] | None = None) -> Mapped:
    place = (tuple(view.shape), tuple(view.stride()), view.storage_offset())
    return Mapped(root, place, strides or tuple(view.stride()))


def _views(function: Any, tensor: Mapped, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    found = function(tensor.held(), *args, **kwargs)
    said = function(torch.empty_strided(tensor.size(), tensor.stride(), device="meta"), *args, **kwargs)
    if isinstance(found, Tensor):
        return _of(tensor.root, found, tuple(said.stride()))
    return [_of(tensor.root, x, tuple(y.stride())) for x, y in zip(found, said, strict=True)]


def _clone(tensor: Mapped, order: torch.memory_format | None) -> Mapped:
    """A copy when one of the two is written, not before."""
    tensor.root.shared = True
    root = _Root(tensor.root.base, shared=True)
    said = torch.empty_strided(tensor.size(), tensor.stride(), device="meta").clone(memory_format=order)
    return Mapped(root, tensor.place, tuple(said.stride()))


def _write(function: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """An operator that changes arguments in place, or writes into `out`."""
    changed: list[tuple[Mapped, Tensor]] = []

    def opened(argument: Any, value: Any) -> Any:
        if not (isinstance(value, Mapped) and argument.alias_info is not None and argument.alias_info.is_write):
            return _wide(value)
        value.root.own()
        changed.append((value, value.wide()))
        return changed[-1][1]

    schema = {x.name: x for x in function._schema.arguments}
    positional = [opened(x, value) for x, value in zip(schema.values(), args, strict=False)]
    found = function(*positional, **{name: opened(schema[name], value) for name, value in kwargs.items()})
    for tensor, made in changed:
        tensor.root.forget()
        if made.stride() != tensor.held().stride():
            tensor.held().copy_(made)
    return changed[0][0] if changed else found


def _wide(value: Any) -> Any:
    if isinstance(value, Mapped):
        return value.wide()
    if isinstance(value, (list, tuple)):
        return type(value)(_wide(x) for x in value)
    return {name: _wide(x) for name, x in value.items()} if isinstance(value, dict) else value
