"""The artifact in the C runtime itself, through ctypes: its memory is ours to write, every call's code is looked at.

Against the lite package: quantized inputs and outputs as they are stored, no queries in a step, the runtime's own run
time and layer table, and caches that are never copied (`Engine.host`). Python 3.9, numpy only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.board import capi, environment, layertable
from kvgate.board.engine import EngineError
from kvgate.board.parts import states_first
from kvgate.board.placement import Boundary, describe
from kvgate.board.resident import Resident, Side
from kvgate.contract import Contract, Tensor
from kvgate.strategies.host import Host

ARTIFACT = "model.rknn"
# Core masks of platforms that let a program choose: 0 leaves it to the runtime, 0xffff is all.
MASKS = {"rk3588": (0, 1, 2, 4, 3, 7, 0xFFFF), "rk3576": (0, 1, 2, 3, 0xFFFF)}
TABLE = "layers.txt"  # the layer table as the runtime printed it, left in the job's folder
_LAYER_RUNS = 3  # of which the last one's table is read


class Engine:
    """Holds one context and the memory of each of its inputs and outputs, bound once."""

    def __init__(self, job: Mapping[str, Any], folder: Path, contract: Contract, library: str = "") -> None:
        """library: the runtime's path; empty: the board's own."""
        self.job, self.contract = job, contract
        self.folder = folder
        self.library = library or _installed()
        self.flags = int(capi.Flag.PRIOR_MEDIUM)  # as the lite package
        self.context = 0
        self.run_us: float | None = None
        self._clear()

    def _clear(self) -> None:
        self.boundaries: dict[str, Boundary] = {}
        self.attributes: dict[str, Any] = {}  # capi.TensorAttr
        self.memories: dict[str, Any] = {}  # pointers to capi.TensorMem
        self.views: dict[str, np.ndarray] = {}  # over these memories, in the stored dtypes
        self.others: dict[str, np.ndarray] = {}  # views after a swap
        self.swaps: list[tuple[str, str]] = []  # cache input and output whose memories change places after a step

    # The interface of every engine

    def open(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Load and initialize. Also returns `memory`: {"weights", "internal"} in bytes, known before it was taken."""
        mask = self._mask()
        say("load")
        self.runtime = capi.Runtime(self.library)
        memory = self._need()
        say("init")
        try:
            self._open(mask)
            versions = self.runtime.versions(self.context)
        except EngineError:
            self.close()
            raise
        return {"versions": versions, "core_mask": mask, "findings": [], "memory": memory}

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """An array that is this engine's own memory (`views`) is taken as it lies; all others are checked and stored.

        Outputs are float32 copies, but for those that are swapped: they are this engine's memory as it is stored.
        """
        if not self.context:
            raise EngineError("contract", "engine: got a step, allowed: after open and before close or layers")
        if len(feeds) != len(self.contract.inputs):
            allowed = [t.name for t in self.contract.inputs]
            raise EngineError("contract", "feeds: got {}, allowed: {}".format(sorted(feeds), allowed))
        for t in self.contract.inputs:
            self._feed(t, feeds.get(t.name))
        self._run()
        swapped = {output for _, output in self.swaps}
        return {
            t.name: self.views[t.name] if t.name in swapped else self.boundaries[t.name].read(self.views[t.name])
            for t in self.contract.outputs
        }

    def last_us(self) -> dict[str, float | None]:
        return {"run_us": self.run_us}

    def layers(self) -> dict[str, Any]:
        """The layer table of a step with the last inputs, in a context of its own that collects it, which is slower.

        The engine's context is closed before, so that both never need memory at once: no step is possible after it,
        and the arrays of a host half made by `host` are gone.
        """
        inputs = [t.name for t in self.contract.inputs]
        kept = {name: ctypes.string_at(self._address(name), self.boundaries[name].size) for name in inputs}
        self.close()
        self.flags |= capi.Flag.COLLECT_PERF
        try:
            self._open(self._mask())
            for name, data in kept.items():
                ctypes.memmove(self._address(name), data, len(data))
            for _ in range(_LAYER_RUNS):
                self._run()
            answer = self.runtime.query(self.context, capi.Query.PERF_DETAIL, capi.PerfDetail)
            text = (answer.text or b"").decode(errors="replace")
        finally:
            self.close()
        (self.folder / TABLE).write_text(text, encoding="utf-8")
        return layertable.summary(text)

    def close(self) -> None:
        context, self.context = self.context, 0
        memories = list(self.memories.values())
        self._clear()
        if context:
            for memory in memories:
                self.runtime.call("destroy_mem", context, memory)
            self.runtime.call("destroy", context)

    # The host half over this engine's memory

    def host(self, kind: type[Host], tables: Mapping[str, np.ndarray], mask: float) -> Host:
        """The strategy's host half `kind`, whose cache buffers are this engine's memory wherever that holds floats.

        A delta is then written where the NPU reads it. Where the graph gives the whole cache back in the very layout
        and type that it reads, the two memories change places and no slot is copied (`swaps`). Where it gives it back
        otherwise, arrays of the host half's own are faster than strided float16 ones.
        """
        self.swaps = self._pairs() if kind.gives_back else []
        if not self.swaps and self.contract.returned_bytes() >= self.contract.history_bytes():
            bases, fields = (Side, kind), {"kind": kind}  # type: tuple[type, ...], dict[str, Any]
        else:
            bases, fields = (Side, Resident, kind), {"kind": kind, "engine": self}
        made: Host = type(kind.__name__, bases, fields)(self.contract, tables, mask)
        return made

    def beside(self, other: Host) -> Host:
        """The host half of this engine's part beside `other`, that of another part of the row, on the same cache.

        Each part's cache lies in its own engine's memory: they are two artifacts, whose layouts and types need not be
        equal. It is copied where a prompt begins and where it ends. Raises ValueError where the cache inputs differ.
        """
        shared = other.chunked(self.contract)
        if not isinstance(other, Side):  # of a decoder in pieces: arrays of the host half's own
            return shared
        made = self.host(other.kind, other.tables, other.mask_value)
        assert isinstance(made, Side)
        made.join(other)
        return made

    def swap(self) -> None:
        """Let the next step read what the last one returned. `views` are then other arrays, the same two by turns."""
        for read, returned in self.swaps:
            self.memories[read], self.memories[returned] = self.memories[returned], self.memories[read]
            for name in (read, returned):
                self._bind(name)
                self.views[name], self.others[name] = self.others[name], self.views[name]

    def _pairs(self) -> list[tuple[str, str]]:
        """All cache inputs with the outputs that replace them, or none."""
        inputs, outputs = self.contract.cache_inputs(), self.contract.cache_outputs()
        if len(inputs) != len(outputs):
            return []
        pairs = [(self.boundaries[i.name], self.boundaries[o.name]) for i, o in zip(inputs, outputs)]
        fits = all(i.plain and i.same_memory(o) for i, o in pairs)
        fits = fits and all(i.states == o.states for i, o in zip(inputs, outputs))
        return [(i.name, o.name) for i, o in zip(inputs, outputs)] if fits else []

    # Opening

    def _mask(self) -> int:
        mask, platform = int(self.job.get("core_mask", 0)), self.job["platform"]
        allowed = MASKS.get(platform, (0,))
        if mask not in allowed:
            raise EngineError("core_mask", "core mask: got {}, allowed on {}: {}".format(mask, platform, list(allowed)))
        return mask

    def _need(self) -> dict[str, Any]:
        """Bytes that the artifact's weights and internal tensors need, asked without taking them."""
        try:
            context = self.runtime.init(str(self.folder / ARTIFACT), capi.Flag.MODEL_INFO_ONLY)
            size = self.runtime.query(context, capi.Query.MEM_SIZE, capi.MemSize)
            self.runtime.call("destroy", context)
        except EngineError as error:  # the same error comes again where it matters
            return {"weights": None, "internal": None, "why": error.text}
        need, free = size.weights + size.internal, environment.available()
        if free is not None and need > free:
            text = "memory: needs {:.0f} MiB, {:.0f} MiB available".format(need / 2**20, free / 2**20)
            raise EngineError("memory", text)
        return {"weights": size.weights, "internal": size.internal}

    def _open(self, mask: int) -> None:
        self.context = self.runtime.init(str(self.folder / ARTIFACT), self.flags)
        self._check_custom()
        if mask:
            try:
                self.runtime.call("set_core_mask", self.context, mask)
            except EngineError as error:
                raise EngineError("core_mask", error.text) from None
        count = self.runtime.query(self.context, capi.Query.IN_OUT_NUM, capi.InOutNum)
        self._describe(self.contract.inputs, capi.Query.INPUT_ATTR, count.inputs)
        self._describe(self.contract.outputs, capi.Query.OUTPUT_ATTR, count.outputs)
        sizes = {name: boundary.size for name, boundary in self.boundaries.items()}
        for read, returned in self._pairs():  # either memory may be the other's
            sizes[read] = sizes[returned] = max(sizes[read], sizes[returned])
        for name, size in sizes.items():
            self.memories[name] = self.runtime.memory(self.context, size)
            ctypes.memset(self._address(name), 0, size)
            self._bind(name)
            self.views[name] = self.boundaries[name].view(self._address(name))
        for read, returned in self._pairs():
            self.others[read] = self.boundaries[read].view(self._address(returned))
            self.others[returned] = self.boundaries[returned].view(self._address(read))

    def _check_custom(self) -> None:
        wanted = self.job.get("custom_string", "")
        answer = self.runtime.query(self.context, capi.Query.CUSTOM_STRING, capi.CustomString)
        got = answer.text.decode(errors="replace")
        if got != wanted:
            raise EngineError("contract", "artifact's custom string: got {!r}, allowed: {!r}".format(got, wanted))

    def _describe(self, tensors: tuple[Tensor, ...], what: capi.Query, count: int) -> None:
        """Attributes by the contract's names. Names decide, not the order: K and V share a shape."""
        found = [self.runtime.query(self.context, what, capi.TensorAttr, i) for i in range(count)]
        named = {attr.name.decode(errors="replace"): attr for attr in found}
        if sorted(named) != sorted(t.name for t in tensors) or len(named) != count:
            text = "artifact's {}: got {}, allowed: {}"
            side = "inputs" if what == capi.Query.INPUT_ATTR else "outputs"
            names = [attr.name.decode(errors="replace") for attr in found]
            raise EngineError("contract", text.format(side, names, [t.name for t in tensors]))
        for t in states_first(tensors):
            self.attributes[t.name] = named[t.name]
            self.boundaries[t.name] = describe(named[t.name], t)

    def _bind(self, name: str) -> None:
        self.runtime.call("set_io_mem", self.context, self.memories[name], ctypes.byref(self.attributes[name]))

    def _address(self, name: str) -> int:
        return int(self.memories[name].contents.virt_addr)

    # A step

    def _feed(self, t: Tensor, array: np.ndarray | None) -> None:
        view = self.views[t.name]
        if array is view:
            return
        if array is None or tuple(array.shape) != t.shape or array.dtype != t.dtype:
            got = "nothing" if array is None else "{} {}".format(array.dtype, list(array.shape))
            text = "tensor {!r}: got {}, allowed: {} {}".format(t.name, got, t.dtype, list(t.shape))
            raise EngineError("contract", text)
        self.boundaries[t.name].write(view, array)

    def _run(self) -> None:
        self.run_us = None
        self.runtime.call("run", self.context, None)
        self.run_us = float(self.runtime.query(self.context, capi.Query.PERF_RUN, capi.PerfRun).microseconds)


def _installed() -> str:
    """The board's runtime, where environment.py looks for it; the usual path where there is none."""
    paths = [Path("/", x) for x in environment.RUNTIMES]
    return next((str(p) for p in paths if p.exists()), capi.LIBRARY)
