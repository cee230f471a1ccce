"""The double of the C runtime: how it is built, and the scripts that it takes for artifacts. Not a test itself."""

import ctypes as ct
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from kvgate import contract as c

SOURCE = Path(__file__).with_name("double_rknnrt.c")
COMPILERS = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}
TYPES = {"float32": 0, "float16": 1, "int8": 2, "int16": 4, "int32": 6, "int64": 8, "bool": 9}
NCHW, NHWC, UNDEFINED = 0, 1, 3
NONE, DFP, AFFINE = 0, 1, 2


def build(path: Path, machine: str = "", version: str = "2.5.0") -> Path:
    """Compile the double to `path`. Skips the test where there is no compiler for the machine (default: this one)."""
    machine = machine or os.uname().machine
    compiler = shutil.which("gcc" if machine == os.uname().machine else COMPILERS[machine])
    if compiler is None:
        pytest.skip(f"no {COMPILERS[machine]} to compile the double of the C runtime")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f'-DVERSION="{version}"']
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, *flags, "-o", str(path), str(SOURCE)], check=True)
    return path


@dataclass(frozen=True)
class Stored:
    """How the double's artifact holds a tensor. fmt None: NHWC for inputs of rank 4, NCHW for outputs, else UNDEFINED.

    strides: of a row in elements and of a plane in rows, 0: not padded.
    """

    type: str = "float16"
    fmt: int | None = None
    qnt: int = AFFINE  # with scale 1, as real runtimes report float tensors
    fl: int = 0
    zp: int = 0
    scale: float = 1.0
    strides: tuple[int, int] = (0, 0)

    def line(self, tensor: c.Tensor, side: str) -> str:
        fmt = self.fmt
        if fmt is None:
            fmt = UNDEFINED if len(tensor.shape) != 4 else NHWC if side == "input" else NCHW
        dims = [tensor.shape[i] for i in (0, 2, 3, 1)] if fmt == NHWC else list(tensor.shape)
        numbers = (TYPES[self.type], fmt, self.qnt, self.fl, self.zp, self.scale, *self.strides)
        return f"{side} {tensor.name} {' '.join(map(str, numbers))} {','.join(map(str, dims))}"


def artifact(
    contract: c.Contract,
    *lines: str,
    stored: Stored = Stored(),
    special: Mapping[str, Stored] | None = None,
    custom: str = "",
) -> str:
    """A script with the contract's boundary. stored: of all float tensors; special: of tensors by name."""

    def of(t: c.Tensor) -> Stored:
        return (special or {}).get(t.name) or (stored if t.dtype == "float32" else Stored(t.dtype))

    return "\n".join(
        [
            "kvgate-double",
            *(of(t).line(t, "input") for t in contract.inputs),
            *(of(t).line(t, "output") for t in contract.outputs),
            f"custom {custom}",
            *lines,
            "end",
            "",
        ]
    )


def expected(contract: c.Contract, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The double's rule, spelled out with numpy: what it computes where no callback is set."""
    flat = [np.clip(feeds[t.name].astype(np.float64).reshape(-1), -1, 1) for t in contract.inputs]
    found = {}
    for o, t in enumerate(contract.outputs):
        n = np.arange(math.prod(t.shape))
        total = np.zeros(len(n))
        for i, values in enumerate(flat):
            k = np.arange(len(values))[:, None]
            total += (values[:, None] * ((i * 7 + k * 3 + o * 5 + n[None]) % 11 - 5) / 64).sum(0)
        found[t.name] = total.astype(np.float32).reshape(t.shape)
    return found


class Library:
    """A loaded double, to ask it what it was asked, and to compute in the test's own process.

    A copy of the file has its own counts.
    """

    _Compute = ct.CFUNCTYPE(None, ct.POINTER(ct.POINTER(ct.c_float)), ct.POINTER(ct.POINTER(ct.c_float)))

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ct.CDLL(str(path))
        self.library.double_calls.restype = ct.c_long
        for name in ("double_weight_users", "double_mask"):
            getattr(self.library, name).argtypes = [ct.c_uint64]
        self.problems: list[BaseException] = []  # of the callback, which cannot raise

    def calls(self, name: str) -> int:
        count: int = self.library.double_calls(name.encode())
        return count

    def forget(self) -> None:
        self.library.double_forget()

    @property
    def live(self) -> int:
        """Contexts and memories that nobody destroyed."""
        count: int = self.library.double_live()
        return count

    def compute(self, contract: c.Contract, step: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> None:
        """Let `step` compute: real numbers by the contract's names and shapes in and out."""

        def call(inputs: "ct._Pointer", outputs: "ct._Pointer") -> None:
            try:
                feeds = {t.name: _array(inputs[i], t).astype(t.dtype) for i, t in enumerate(contract.inputs)}
                found = step(feeds)
                for i, t in enumerate(contract.outputs):
                    _array(outputs[i], t)[...] = found[t.name]
            except BaseException as error:
                self.problems.append(error)

        self._kept = self._Compute(call)
        self.library.double_compute(self._kept)


def _array(pointer: "ct._Pointer", tensor: c.Tensor) -> np.ndarray:
    return np.ctypeslib.as_array(pointer, tensor.shape)


def journal(lines: Iterable[str]) -> dict[str, int]:
    """How often each call stands in a KVGATE_DOUBLE_JOURNAL."""
    counts: dict[str, int] = {}
    for line in lines:
        counts[line.strip()] = counts.get(line.strip(), 0) + 1
    return counts
