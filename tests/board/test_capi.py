"""Our declarations of the C runtime's interface: numbers from boards.md, and the layer table's parser.

tests/system holds the same declarations to the structures inside the vendor's package.
"""

import ctypes as ct
from pathlib import Path

import pytest
from kvgate.board import capi, layertable
from kvgate.board.engine import EngineError

SIZES = {
    capi.InOutNum: 8,
    capi.TensorAttr: 376,
    capi.TensorMem: 40,
    capi.InitExtend: 144,
    capi.RunExtend: 24,
    capi.MemSize: 64,
    capi.SdkVersion: 512,
    capi.CustomString: 1024,
    capi.PerfRun: 8,
    capi.PerfDetail: 16,
}


def test_sizes_and_offsets():
    assert {kind: ct.sizeof(kind) for kind in SIZES} == SIZES
    at = {"dims": 8, "name": 72, "n_elems": 328, "size": 332, "fmt": 336, "type": 340, "qnt_type": 344, "fl": 348}
    at |= {"zp": 352, "scale": 356, "w_stride": 360, "size_with_stride": 364, "pass_through": 368, "h_stride": 372}
    assert {name: getattr(capi.TensorAttr, name).offset for name in at} == at
    at = {"virt_addr": 0, "phys_addr": 8, "fd": 16, "offset": 20, "size": 24, "flags": 28, "priv_data": 32}
    assert {name: getattr(capi.TensorMem, name).offset for name in at} == at
    assert capi.InitExtend.user_key.offset == 24 and capi.RunExtend.fence_fd.offset == 16
    assert capi.MemSize.dma_allocated.offset == 8


def test_a_structure_has_room_for_a_newer_runtime():
    """What a runtime writes behind the end that we know does not touch the heap."""
    for kind in SIZES:
        made = capi.room(kind)
        ct.memset(ct.addressof(made), 0x55, ct.sizeof(kind) + 256)
    assert bytes(capi.room(capi.InitExtend)) == bytes(144)


def test_every_code_has_a_name():
    assert sorted(capi.CODES) == list(range(-16, 1))
    assert capi.CODES[-6] == "ERR_MODEL_INVALID"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2.3.2 (429f97ae6b@2025-04-09T09:09:27)", "2.3.2"),
        ("0.9.8", "0.9.8"),
        ("  API: 2.0.0b0 (18eacd0 build@2024-03-22T06:07:59)", "2.0.0b0"),
        (" unknown ", "unknown"),
    ],
)
def test_version_numbers(text, number):
    assert capi.number(text) == number


def test_a_library_of_another_kind(tmp_path: Path):
    with pytest.raises(EngineError, match=r"runtime: .*rknn_init") as error:
        capi.Runtime("libc.so.6")
    assert error.value.kind == "engine_missing"


# The layer table. Shapes of two published tables, with numbers of our own.

OLD = """\
===================================================================================================================
                            Performance
      #### The performance result is just for debugging, ####
===================================================================================================================
ID   OpType           DataType Target InputShape                OutputShape     DDR Cycles     NPU Cycles     Total Cycles   Time(us)       MacUsage(%)    WorkLoad(0/1/2)-ImproveTherical        Task Number    Lut Number     RW(KB)         FullName
1    InputOperator    UINT8    CPU    \\                         (1,3,8,8)       0              0              0              7              \\              0.0%/0.0%/0.0% - Up:0.0%               0              0              147.00         InputOperator:data
2    ConvRelu         UINT8    NPU    (1,3,8,8),(4,3,3,3),(4)   (1,4,8,8)       94150          10584          94150          428            2.47           100.0%/0.0%/0.0% - Up:0.0%             3              0              543.75         conv1
3    Gather           FLOAT16  CPU    (1,4,8,8)                 (1,4,8,8)       0              0              0              12.5           \\              0.0%/0.0%/0.0% - Up:0.0%               0              0              1.00           g

Total Operator Elapsed Time(us): 447
"""  # noqa: E501
NEW = """\
D RKNN: [02:10:00.001] ID   OpType           DataType Target InputShape                OutputShape       Cycles(DDR/NPU/Total)    Time(us)     MacUsage(%)          WorkLoad(0/1)        RW(KB)       FullName
D RKNN: [02:10:00.001] ------------------------------------------------------------
D RKNN: [02:10:00.001] 1    InputOperator    FLOAT16  CPU    \\                         (1,64)            0/0/0                    4            \\                    0.0%/0.0%            0            InputOperator:in0
D RKNN: [02:10:00.001] 2    exNorm           FLOAT16  NPU    (1,64),(64)               (1,64)            12/34/34                 120          0.00/0.00            100.0%/0.0%          4            Norm:/norm
D RKNN: [02:10:00.001] 3    exNorm           FLOAT16  NPU    (1,64),(64)               (1,64)            12/34/34                 80           0.00/0.00            100.0%/0.0%          4            Norm:/norm_1
D RKNN: [02:10:00.001] 4    OutputOperator   FLOAT16  CPU    (1,64)                    \\                 0/0/0                    6            \\                    0.0%/0.0%            0            OutputOperator:out0
D RKNN: [02:10:00.001] Total Operator Elapsed Per Frame Time(us): 210
D RKNN: [02:10:00.001] Total Memory Read/Write Per Frame Size(KB): 8
OpType             CallNumber   CPUTime(us)  GPUTime(us)  NPUTime(us)  TotalTime(us)  TimeRatio(%)
exNorm             2            0            0            200          200            95.24%
"""  # noqa: E501


def test_tables_of_older_and_newer_runtimes():
    old, new = layertable.summary(OLD), layertable.summary(NEW)
    assert (old["npu_us"], old["cpu_us"], old["boundary_us"], old["why"]) == (428, 12.5, 7, None)
    assert [r["kind"] for r in old["operators"]] == ["InputOperator", "ConvRelu", "Gather"]
    assert (new["npu_us"], new["cpu_us"], new["boundary_us"], new["why"]) == (200, 0, 10, None)
    assert new["layers"][0] == {"operator": "exNorm", "target": "NPU", "us": 200}
    assert new["operators"][1] == {"kind": "exNorm", "target": "NPU", "us": 120, "name": "/norm"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "layer table: got 0 lines, allowed: a line with OpType, Target, Time(us)"),
        ("Total Time(us): 17219", "layer table: got 1 lines"),
        (NEW.replace("120 ", "920 "), "layer table: got rows of 1010 us, allowed: the total of 210 us below it"),
        (NEW.replace(" NPU ", " DSP ").replace(" CPU ", " DSP "), "layer table: got no row that fits the columns"),
        (NEW.splitlines()[0], "layer table: got no row"),
    ],
)
def test_a_table_that_is_not_understood_gives_no_times(text, why):
    found = layertable.summary(text)
    assert found["npu_us"] is found["cpu_us"] is found["operators"] is None
    assert found["why"].startswith(why)
