"""A tensor of the runtime's boundary: where each value of the contract's array lies in memory, and how it is stored.

Python 3.9, numpy only.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgate.board.capi import Format, Quant, Type
from kvgate.board.engine import EngineError, told
from kvgate.contract import Tensor

_DTYPES = {
    Type.FLOAT32: "float32", Type.FLOAT16: "float16", Type.INT8: "int8", Type.UINT8: "uint8", Type.INT16: "int16",
    Type.UINT16: "uint16", Type.INT32: "int32", Type.UINT32: "uint32", Type.INT64: "int64", Type.BOOL: "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Boundary:
    """real = scale * (stored - zero) where scale is not 0, else real = stored."""

    tensor: Tensor
    dtype: np.dtype[Any]
    strides: tuple[int, ...]  # bytes, per axis of the contract's shape
    size: int  # bytes to allocate
    scale: float
    zero: int

    @property
    def plain(self) -> bool:
        """Whether the memory, seen through `view`, is an array of real numbers that anyone may write."""
        return self.dtype.kind == "f"

    def view(self, address: int) -> np.ndarray:
        """The memory at `address` as an array of the contract's shape, in the stored dtype. Nothing is copied."""
        buffer: Any = (ctypes.c_char * self.size).from_address(address)
        return np.ndarray(self.tensor.shape, self.dtype, buffer, 0, self.strides)

    def write(self, view: np.ndarray, array: np.ndarray) -> None:
        """Store real values. Raises EngineError on integers that the dtype does not hold."""
        if self.scale:
            limits = np.iinfo(self.dtype)
            stored = np.rint(array.astype(np.float32) / np.float32(self.scale)) + self.zero
            with np.errstate(invalid="ignore"):  # NaN becomes some number; the outputs that fed it are judged anyway
                view[...] = np.clip(stored, limits.min, limits.max)
            return
        if self.dtype.kind in "iu" and array.size:
            limits = np.iinfo(self.dtype)
            low, high = array.min(), array.max()
            if low < limits.min or high > limits.max or not np.array_equal(array, np.rint(array)):
                text = "tensor {!r}: got {} to {}, allowed: whole numbers of {}"
                raise EngineError("contract", text.format(self.tensor.name, low, high, self.dtype))
        with np.errstate(over="ignore"):  # beyond float16: infinite, as on the NPU itself
            view[...] = array

    def read(self, view: np.ndarray) -> np.ndarray:
        """A copy of the real values as float32, contiguous."""
        real = np.array(view, np.float32, order="C")
        return (real - np.float32(self.zero)) * np.float32(self.scale) if self.scale else real

    def same_memory(self, other: Boundary) -> bool:
        """Whether memory written as `other` reads as `self`: for swapping an output's memory to an input.

        True also where `other` has more slots behind those of `self` and the strides agree (dynamic_concat).
        """
        mine, theirs = self.tensor.shape, other.tensor.shape
        return (
            len(mine) == len(theirs)
            and all(a <= b for a, b in zip(mine, theirs))
            and all(s == o for s, o, n in zip(self.strides, other.strides, mine) if n > 1)
            and (self.dtype, self.scale, self.zero) == (other.dtype, other.scale, other.zero)
        )


def describe(attr: Any, tensor: Tensor) -> Boundary:
    """The boundary of the contract's tensor by the runtime's attribute (capi.TensorAttr).

    Raises EngineError where they do not fit each other, or the attribute's layout or type is not known.
    """
    if attr.type not in list(_DTYPES):
        raise _error(tensor, "type {}".format(attr.type), "types {}".format([int(t) for t in _DTYPES]))
    dtype = np.dtype(_DTYPES[Type(attr.type)])
    dims, shape = list(attr.dims[: attr.n_dims]), list(tensor.shape)
    if attr.n_elems != math.prod(shape):
        raise _error(tensor, "{} elements, dims {}".format(attr.n_elems, dims), shape)
    scale, zero = _numbers(attr, dtype, tensor)
    elements, count = _layout(attr, tensor, dims)
    strides = tuple(s * dtype.itemsize for s in elements)
    size = max(count * dtype.itemsize, attr.size_with_stride, attr.size)
    return Boundary(tensor, dtype, strides, size, scale, zero)


def _numbers(attr: Any, dtype: np.dtype[Any], tensor: Tensor) -> tuple[float, int]:
    """Scale and zero; 0, 0 where nothing is quantized. Runtimes call plain float and id tensors affine, too."""
    if dtype.kind not in "iu" or attr.qnt_type == Quant.NONE:
        return 0.0, 0
    if attr.qnt_type == Quant.DFP:
        return 2.0**-attr.fl, 0
    if attr.qnt_type != Quant.AFFINE or not (math.isfinite(attr.scale) and attr.scale > 0):
        raise _error(tensor, "quantization {}, scale {}".format(attr.qnt_type, attr.scale), "a scale above 0")
    if attr.scale == 1 and attr.zp == 0:
        return 0.0, 0
    return float(attr.scale), int(attr.zp)


def _layout(attr: Any, tensor: Tensor, dims: list[int]) -> tuple[list[int], int]:
    """Strides in elements per axis of the contract's shape, and the elements from the first to behind the last row."""
    shape = list(tensor.shape)
    if len(shape) == 4 and attr.n_dims == 4 and attr.fmt in (Format.NCHW, Format.NHWC):
        n, c, h, w = shape
        row, plane = attr.w_stride or w, attr.h_stride or h
        order = [n, h, w, c] if attr.fmt == Format.NHWC else shape
        if dims != order or row < w or plane < h:
            got = "dims {} as {}, strides {} and {}".format(dims, Format(attr.fmt).name, attr.w_stride, attr.h_stride)
            raise _error(tensor, got, "{}, no stride below it".format(order))
        if attr.fmt == Format.NHWC:
            return [plane * row * c, 1, row * c, c], n * plane * row * c
        return [c * plane * row, plane * row, row, 1], n * c * plane * row
    # Any other rank lies as the contract has it; a runtime may add or drop axes of extent 1.
    if attr.fmt == Format.NC1HWC2 or [d for d in dims if d != 1] != [d for d in shape if d != 1]:
        raise _error(tensor, "dims {} with format {}".format(dims, attr.fmt), shape)
    if attr.fmt == Format.NHWC and attr.n_dims == 4:
        raise _error(tensor, "dims {} as NHWC for rank {}".format(dims, len(shape)), "rank 4 for NHWC")
    if attr.w_stride not in (0, dims[-1] if dims else 0):
        raise _error(tensor, "a row stride of {}".format(attr.w_stride), "0 or {}".format(dims[-1:]))
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return strides, math.prod(shape)


def _error(tensor: Tensor, got: str, allowed: Any) -> EngineError:
    return EngineError("contract", "{}: got {}, allowed: {}".format(told(tensor), got, allowed))
