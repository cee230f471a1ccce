"""The C runtime's interface for ctypes: declarations of our own. Python 3.9, standard library only.

Sizes and offsets are those of 64-bit Linux; tests hold them to the structures inside the vendor's lite package. A
runtime newer than this file may write beyond a structure's end: those that it fills lie in `room`.
"""

from __future__ import annotations

import ctypes as ct
import re
from enum import IntEnum
from typing import Any

from kvgate.board.engine import EngineError

LIBRARY = "/usr/lib/librknnrt.so"
DIMS, NAME = 16, 256
Context = ct.c_uint64


class Query(IntEnum):
    IN_OUT_NUM = 0
    INPUT_ATTR = 1
    OUTPUT_ATTR = 2
    PERF_DETAIL = 3  # needs Flag.COLLECT_PERF
    PERF_RUN = 4
    SDK_VERSION = 5
    MEM_SIZE = 6
    CUSTOM_STRING = 7
    NATIVE_INPUT_ATTR = 8
    NATIVE_OUTPUT_ATTR = 9
    NATIVE_NHWC_INPUT_ATTR = 10
    NATIVE_NHWC_OUTPUT_ATTR = 11
    DEVICE_MEM_INFO = 12
    INPUT_DYNAMIC_RANGE = 13
    CURRENT_INPUT_ATTR = 14
    CURRENT_OUTPUT_ATTR = 15


class Flag(IntEnum):
    PRIOR_HIGH = 0
    PRIOR_MEDIUM = 1
    PRIOR_LOW = 2
    ASYNC = 0x4
    COLLECT_PERF = 0x8
    MEM_ALLOC_OUTSIDE = 0x10
    SHARE_WEIGHT_MEM = 0x20  # with InitExtend.context: of a context of the same net
    MODEL_INFO_ONLY = 0x100  # answers queries, takes no memory for weights


class Type(IntEnum):
    FLOAT32 = 0
    FLOAT16 = 1
    INT8 = 2
    UINT8 = 3
    INT16 = 4
    UINT16 = 5
    INT32 = 6
    UINT32 = 7
    INT64 = 8
    BOOL = 9
    INT4 = 10
    BFLOAT16 = 11


class Quant(IntEnum):
    NONE = 0
    DFP = 1  # real = stored * 2 ** -fl
    AFFINE = 2  # real = scale * (stored - zp); float tensors say this too, with scale 1


class Format(IntEnum):
    NCHW = 0
    NHWC = 1
    NC1HWC2 = 2
    UNDEFINED = 3  # any rank but 4, and rank 4 where the compiler knows no image: the contract's order


CODES = {
    0: "SUCC",
    -1: "ERR_FAIL",
    -2: "ERR_TIMEOUT",
    -3: "ERR_DEVICE_UNAVAILABLE",
    -4: "ERR_MALLOC_FAIL",
    -5: "ERR_PARAM_INVALID",
    -6: "ERR_MODEL_INVALID",
    -7: "ERR_CTX_INVALID",
    -8: "ERR_INPUT_INVALID",
    -9: "ERR_OUTPUT_INVALID",
    -10: "ERR_DEVICE_UNMATCH",
    -11: "ERR_INCOMPATILE_PRE_COMPILE_MODEL",
    -12: "ERR_INCOMPATILE_OPTIMIZATION_LEVEL_VERSION",
    -13: "ERR_TARGET_PLATFORM_UNMATCH",
    -14: "ERR_KEY_INVALID",
    -15: "ERR_DECRYPT_FAILED",
    -16: "ERR_SOC_BIND_FAILED",
}
KINDS = {-4: "memory", -10: "platform", -11: "version_mismatch", -12: "version_mismatch", -13: "platform"}


class InOutNum(ct.Structure):
    _fields_ = [("inputs", ct.c_uint32), ("outputs", ct.c_uint32)]


class TensorAttr(ct.Structure):
    _fields_ = [
        ("index", ct.c_uint32),
        ("n_dims", ct.c_uint32),
        ("dims", ct.c_uint32 * DIMS),  # in the order of fmt
        ("name", ct.c_char * NAME),
        ("n_elems", ct.c_uint32),
        ("size", ct.c_uint32),  # bytes without padding
        ("fmt", ct.c_int32),
        ("type", ct.c_int32),
        ("qnt_type", ct.c_int32),
        ("fl", ct.c_int8),
        ("zp", ct.c_int32),
        ("scale", ct.c_float),
        ("w_stride", ct.c_uint32),  # elements of a row, 0: as wide as the row
        ("size_with_stride", ct.c_uint32),  # bytes to allocate; may be 0
        ("pass_through", ct.c_uint8),
        ("h_stride", ct.c_uint32),  # rows of a plane, 0: as many as it has
    ]


class TensorMem(ct.Structure):
    _fields_ = [
        ("virt_addr", ct.c_void_p),
        ("phys_addr", ct.c_uint64),
        ("fd", ct.c_int32),
        ("offset", ct.c_int32),
        ("size", ct.c_uint32),
        ("flags", ct.c_uint32),
        ("priv_data", ct.c_void_p),
    ]


class InitExtend(ct.Structure):
    """136 bytes in runtimes of 2023 to 2025, 144 in 2.5.0: always handed over zeroed, with room behind."""

    _fields_ = [
        ("context", Context),
        ("real_model_offset", ct.c_int32),
        ("real_model_size", ct.c_uint32),
        ("model_buffer_fd", ct.c_int32),
        ("model_buffer_flags", ct.c_uint32),
        ("user_key", ct.c_void_p),
        ("reserved", ct.c_uint8 * 112),
    ]


class RunExtend(ct.Structure):
    _fields_ = [
        ("frame_id", ct.c_uint64),
        ("non_block", ct.c_int32),
        ("timeout_ms", ct.c_int32),
        ("fence_fd", ct.c_int32),
    ]


class MemSize(ct.Structure):
    """Bytes. total_sram and free_sram follow the 64-bit field."""

    _fields_ = [
        ("weights", ct.c_uint32),
        ("internal", ct.c_uint32),
        ("dma_allocated", ct.c_uint64),
        ("total_sram", ct.c_uint32),
        ("free_sram", ct.c_uint32),
        ("reserved", ct.c_uint32 * 10),
    ]


class SdkVersion(ct.Structure):
    _fields_ = [("api", ct.c_char * 256), ("driver", ct.c_char * 256)]


class CustomString(ct.Structure):
    _fields_ = [("text", ct.c_char * 1024)]


class PerfRun(ct.Structure):
    _fields_ = [("microseconds", ct.c_int64)]


class PerfDetail(ct.Structure):
    _fields_ = [("text", ct.c_char_p), ("length", ct.c_uint64)]


_POINTER = ct.c_void_p
_CALLS: dict[str, list[Any]] = {
    "init": [ct.POINTER(Context), ct.c_char_p, ct.c_uint32, ct.c_uint32, _POINTER],
    "dup_context": [ct.POINTER(Context), ct.POINTER(Context)],
    "destroy": [Context],
    "query": [Context, ct.c_int32, _POINTER, ct.c_uint32],
    "set_core_mask": [Context, ct.c_int32],
    "set_io_mem": [Context, ct.POINTER(TensorMem), ct.POINTER(TensorAttr)],
    "destroy_mem": [Context, ct.POINTER(TensorMem)],
    "run": [Context, _POINTER],
}
_ROOM = 256  # spare bytes behind every structure that the runtime reads or fills


def room(kind: type[Any]) -> Any:
    """A zeroed structure with spare bytes behind its end."""
    return kind.from_buffer(ct.create_string_buffer(ct.sizeof(kind) + _ROOM))


class Runtime:
    """The loaded library. Every call's code is looked at."""

    def __init__(self, path: str = LIBRARY) -> None:
        """Raises EngineError where the library is missing, broken, or too old for what is called."""
        try:
            self.library = ct.CDLL(path)
            for name, types in _CALLS.items():
                function = getattr(self.library, "rknn_" + name)
                function.argtypes, function.restype = types, ct.c_int
            self.library.rknn_create_mem.argtypes = [Context, ct.c_uint32]
            self.library.rknn_create_mem.restype = ct.POINTER(TensorMem)
        except (OSError, AttributeError) as error:
            raise EngineError("engine_missing", "runtime: {}".format(error)) from None

    def call(self, name: str, *arguments: Any) -> None:
        """Call rknn_{name}. Raises EngineError with the code's name on any code but 0."""
        code = getattr(self.library, "rknn_" + name)(*arguments)
        if code != 0:
            text = "rknn_{}: got {} (RKNN_{}), allowed: 0".format(name, code, CODES.get(code, "unknown code"))
            raise EngineError(KINDS.get(code, "error_line"), text)

    def init(self, path: str, flags: int = 0, share: int = 0) -> int:
        """A context of the artifact at `path`. share: another context whose weights it uses (SHARE_WEIGHT_MEM)."""
        context, extend = Context(0), room(InitExtend)
        extend.context = share
        # A size of 0 says that the model is a path: the runtime maps the file, we hold no second copy.
        self.call("init", ct.byref(context), path.encode(), 0, flags, ct.byref(extend))
        return context.value

    def duplicate(self, context: int) -> int:
        """A second context of the same artifact that shares the first one's weights."""
        source, copy = Context(context), Context(0)
        self.call("dup_context", ct.byref(source), ct.byref(copy))
        return copy.value

    def query(self, context: int, what: Query, kind: type[Any], index: int = 0) -> Any:
        """The answer as a `kind`; index: of the tensor, for attributes."""
        answer = room(kind)
        if kind is TensorAttr:
            answer.index = index
        self.call("query", context, int(what), ct.byref(answer), ct.sizeof(kind))
        return answer

    def memory(self, context: int, size: int) -> Any:
        """A pointer to a TensorMem of `size` bytes that the NPU can reach."""
        memory = self.library.rknn_create_mem(context, size)
        if not memory or not memory.contents.virt_addr or memory.contents.size < size:
            got = memory.contents.size if memory else "nothing"
            raise EngineError("memory", "rknn_create_mem: got {}, allowed: {} bytes".format(got, size))
        return memory

    def versions(self, context: int) -> dict[str, str]:
        """{"runtime", "driver"}: `2.3.2`, `0.9.8`, or the whole text where no number is in it."""
        answer = self.query(context, Query.SDK_VERSION, SdkVersion)
        texts = {"runtime": answer.api, "driver": answer.driver}
        return {name: number(text.decode(errors="replace")) for name, text in texts.items()}


def number(text: str) -> str:
    """The version number in a text such as `2.3.2 (429f97ae6b@2025-04-09T09:09:27)`."""
    found = re.search(r"\d+\.\d+\.\d+\w*", text)
    return found.group() if found else text.strip()
