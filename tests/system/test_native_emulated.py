"""The ctypes engine as a board runs it: on aarch64, its structures beside those inside the vendor's lite package."""

import json
from collections.abc import Iterator

import pytest
from system import rows
from system.rows import finding
from test_lite_emulated import assert_observed

pytestmark = pytest.mark.system

# Ours to theirs. The vendor's classes are read where they are; nothing of them is kept here.
PAIRS = {
    "InOutNum": "RKNNInputOutputNum",
    "TensorAttr": "RKNNRtTensorAttr",
    "InitExtend": "RKNNRtInitExtend",
    "RunExtend": "RKNNRtRunExtend",
    "SdkVersion": "RKNNSDKVersion",
    "PerfRun": "RKNNPerfRun",
    "PerfDetail": "RKNNPerfDetail",
}
COMPARE = """
import ctypes, json, sys
sys.path.insert(0, WORKFLOW)
from kvgate.board import capi
from rknnlite.api import rknn_runtime as theirs
def shape(kind):
    return [ctypes.sizeof(kind), [[getattr(kind, f[0]).offset, getattr(kind, f[0]).size] for f in kind._fields_]]
found = {ours: [shape(getattr(capi, ours)), shape(getattr(theirs, name))] for ours, name in PAIRS.items()}
numbers = {}
for ours, prefix in ((capi.Query, "RKNN_QUERY_"), (capi.Format, "RKNN_TENSOR_"), (capi.Flag, "RKNN_FLAG_")):
    for entry in ours:
        for name in (prefix + entry.name, prefix + entry.name + "_MASK"):
            if hasattr(theirs, name):
                numbers[name] = [int(entry), getattr(theirs, name)]
types = {name: [int(capi.Type[name.upper()]), n] for name, n in theirs.rknn_input_data_type.items()}
codes = {code: ["RKNN_" + capi.CODES[int(code)], name] for code, name in theirs.rknn_runtime_api_ret_code.items()}
print(json.dumps([found, numbers, types, codes, theirs.LIBRKNNRT_PATH == capi.LIBRARY]))
"""


@pytest.fixture(scope="module")
def board(emulated, runtime64):
    return emulated(runtime=runtime64)


@pytest.fixture(scope="module")
def row(board, tmp_path_factory) -> Iterator[rows.Row]:
    with rows.Row(board, "native", tmp_path_factory.mktemp("native")) as row:
        yield row


def test_structures_and_numbers_are_those_of_the_lite_package(board, pytestconfig):
    workflow = str(pytestconfig.rootpath / "workflow")
    ran = board.run("-c", COMPARE.replace("WORKFLOW", repr(workflow)).replace("PAIRS", repr(PAIRS)))
    assert ran.returncode == 0, ran.stderr
    structures, numbers, types, codes, path = json.loads(ran.stdout)
    assert set(structures) == set(PAIRS) and path
    for name, (ours, theirs) in structures.items():
        assert ours == theirs, name
    assert structures["TensorAttr"][0][0] == 376 and len(structures["TensorAttr"][0][1]) == 16
    assert len(numbers) >= 20 and all(ours == theirs for ours, theirs in numbers.values()), numbers
    assert len(types) == 10 and all(ours == theirs for ours, theirs in types.values()), types
    assert len(codes) == 17 and all(ours == theirs for ours, theirs in codes.values()), codes


def test_a_row_gives_what_its_artifact_computes(row):
    status = row.run("run_us 321", "memory 1000 500", *TABLE)
    assert status["ok"], status["reason"]
    assert status["findings"] == [] and status["core_mask"] == 0
    assert status["versions"]["runtime"] == "2.5.0" and status["versions"]["driver"] == "0.9.8"
    ledger = status["ledger"]
    assert ledger["run_us"] == 321 and ledger["overhead_us"] == pytest.approx(ledger["inference_us"] - 321, abs=0.2)
    assert (ledger["npu_us"], ledger["cpu_us"], ledger["source"]) == (120, 30, "RKNN_QUERY_PERF_DETAIL")
    assert ledger["layers"][0] == {"operator": "exNorm", "target": "NPU", "us": 120}
    assert_observed(row.folder / "results/observations/chat.npz")


TABLE = (
    "detail ID   OpType   DataType Target InputShape  OutputShape  Cycles(DDR/NPU/Total)  Time(us)  FullName",
    "detail 1    exNorm   FLOAT16  NPU    (1,64)      (1,64)       12/34/34               120       Norm:/norm",
    "detail 2    Gather   FLOAT16  CPU    (1,64)      (1,64)       0/0/0                  30        Gather:/g",
    "detail Total Operator Elapsed Per Frame Time(us): 150",
)


def test_a_crash_is_found_with_its_place(row):
    status = row.run("crash run 5 x")
    found = finding(status, "segfault")
    assert (status["signal"], found["phase"], found["step"]) == ("SIGSEGV", "chat forced", 2)


def test_a_code_of_run_is_an_error(row):
    status = row.run("code run 4 -2")
    assert (status["ok"], status["phase"]) == (False, "chat forced")
    assert "rknn_run: got -2" in status["reason"] and finding(status, "error_line")["step"] == 1


def test_what_it_refuses_to_open(row):
    status = row.run("code set_core_mask 0 -5", core_mask=1)
    assert not status["ok"] and "rknn_set_core_mask: got -5" in finding(status, "core_mask")["text"]
