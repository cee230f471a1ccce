"""The lite engine against a double of the vendor's package, and its calls against that package's own source.

The package itself runs under emulation in tests/system.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rig
from kvgate import contract as c
from kvgate.board import lite
from kvgate.board.engine import EngineError

CACHE = Path(os.environ.get("KVGATE_TEST_CACHE") or Path(__file__).parents[1] / ".cache") / "wheels"
VERSION = "2.5.0"
INPUTS = (
    c.Tensor("key", c.STATE, (2, 3, 1, 4)),
    c.Tensor("mask", c.MASK, (1, 5)),
    c.Tensor("slot", c.SLOT, (1,), "int64"),
    c.Tensor("write", c.WRITE, (1, 4), "bool"),
)
OUTPUTS = (c.Tensor("logits", c.LOGITS, (1, 1, 7)), c.Tensor("key.out", c.STATE, (2, 3, 1, 1)))
CONTRACT = c.Contract("s", "decode", "plain", "", 7, 4, c.Cache(4), (), (), (), INPUTS, OUTPUTS, "")


class Double:
    """A double of RKNNLite: records calls, answers as the test says, and as the package does."""

    NPU_CORE_0, NPU_CORE_0_1 = 1, 3
    answers: dict[str, Any]
    calls: list[tuple[str, dict[str, Any]]]
    prints = ""
    code = 0

    def __init__(self, verbose: bool = False) -> None:
        self.rknn_runtime: Any = types.SimpleNamespace(run=lambda get_frame_id: self.code, get_run_perf=lambda: 1234)

    def _called(self, name: str, **arguments: Any) -> Any:
        self.calls.append((name, arguments))
        if name in self.prints:
            os.write(2, self.prints.partition(":")[2].encode())
        answer = self.answers.get(name, 0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def load_rknn(self, path: str) -> Any:
        return self._called("load_rknn", path=path)

    def init_runtime(self, core_mask: int) -> Any:
        return self._called("init_runtime", core_mask=core_mask)

    def get_sdk_version(self) -> Any:
        return "RKNN VERSION:\n  API: 2.3.2 (429f97ae6b@2025-04-09T09:09:27)\n  DRV: 0.9.8\n"

    def inference(self, inputs: list[np.ndarray], data_format: list[Any]) -> Any:
        self.calls.append(("inference", {"inputs": [x.copy() for x in inputs], "data_format": list(data_format)}))
        for i, name in enumerate(data_format):  # as the package does: a list can be used once
            if name != "nchw":
                raise AssertionError(f"Unsupport data format: {name}")
            data_format[i] = 1
        if "inference" in self.prints:
            os.write(2, self.prints.partition(":")[2].encode())
        self.rknn_runtime.run(False)
        return self.answers.get("inference", [np.zeros(t.shape, np.float32) for t in OUTPUTS])

    def release(self) -> None:
        self._called("release")


@pytest.fixture
def double(monkeypatch):
    """The class, in the place of the vendor's."""
    kind = type("Double", (Double,), {"answers": {}, "calls": [], "prints": ""})
    package, api = types.ModuleType("rknnlite"), types.ModuleType("rknnlite.api")
    api.RKNNLite = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rknnlite", package)
    monkeypatch.setitem(sys.modules, "rknnlite.api", api)
    return kind


def opened(mask: int = 0) -> tuple[lite.Engine, dict[str, Any]]:
    engine = lite.Engine({"platform": "rk3576", "core_mask": mask}, Path("job"), CONTRACT)
    return engine, engine.open(lambda phase: None)


def feeds() -> dict[str, np.ndarray]:
    return {t.name: np.arange(np.prod(t.shape)).reshape(t.shape).astype(t.dtype) for t in INPUTS}


def failure(call: Any) -> tuple[str, str]:
    with pytest.raises(EngineError) as error:
        call()
    return error.value.kind, error.value.text


def test_opens_and_says_its_phases(double):
    said: list[str] = []
    engine = lite.Engine({"platform": "rk3576", "core_mask": 3}, Path("job"), CONTRACT)
    found = engine.open(said.append)
    assert said == ["load", "init"]
    assert double.calls == [("load_rknn", {"path": "job/model.rknn"}), ("init_runtime", {"core_mask": 3})]
    assert found == {"versions": {"runtime": "2.3.2", "driver": "0.9.8"}, "core_mask": 3, "findings": []}


def test_a_step_is_the_contract_s(double):
    engine, _ = opened()
    fed = feeds()
    fed["key"] = np.asfortranarray(fed["key"])
    for _ in range(2):
        out = engine.step(fed)
    assert [list(x) for x in (fed, out)] == [[t.name for t in INPUTS], ["logits", "key.out"]]
    call = double.calls[-1][1]
    for t, array in zip(INPUTS, call["inputs"], strict=True):
        assert array.flags.c_contiguous and array.dtype == t.dtype and np.array_equal(array, feeds()[t.name])
    assert call["data_format"][0] == "nchw"  # the only input with a layout
    assert engine.last_us() == {"run_us": 1234.0}


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("key", np.zeros((2, 1, 4, 3), np.float32)),
        ("key", np.zeros((2, 3, 1, 4))),
        ("slot", np.zeros((1,), np.int32)),
        ("write", np.zeros((1, 4), np.float32)),
        ("mask", np.zeros((5,), np.float32)),
        ("mask", None),
    ],
)
def test_nothing_else_reaches_the_package(double, name, array):
    engine, _ = opened()
    fed = {**feeds(), name: array} if array is not None else {k: v for k, v in feeds().items() if k != name}
    kind, text = failure(lambda: engine.step(fed))
    assert kind == "contract" and text.startswith(f"tensor '{name}': got ") and double.calls[-1][0] != "inference"
    assert failure(lambda: engine.step({**feeds(), "more": np.zeros(1)}))[0] == "contract"


def test_outputs_take_the_contract_s_shape(double):
    engine, _ = opened()
    values = [np.arange(7, dtype=np.float32), np.arange(6, dtype=np.float32).reshape(1, 2, 3)]
    double.answers["inference"] = values
    out = engine.step(feeds())
    assert out["key.out"].shape == (2, 3, 1, 1) and out["key.out"].ravel().tolist() == list(range(6))
    double.answers["inference"] = [values[0], values[1][:, :1]]
    assert failure(lambda: engine.step(feeds())) == (
        "contract",
        "output 'key.out': got float32 [1, 1, 3], allowed: float32 [2, 3, 1, 1]",
    )
    double.answers["inference"] = values[:1]
    assert failure(lambda: engine.step(feeds())) == ("contract", "got 1 outputs, allowed: 2")


@rig.printing
def test_no_outputs(double):
    engine, _ = opened()
    double.answers["inference"] = None
    assert failure(lambda: engine.step(feeds())) == ("error_line", "inference returned None: ")
    double.prints = "inference:E Catch exception when getting outputs.\nException: error code: RKNN_ERR_TIMEOUT\n"
    double.answers["inference"] = None
    assert failure(lambda: engine.step(feeds()))[1].endswith("None: error code: RKNN_ERR_TIMEOUT")


@rig.printing
def test_the_code_of_run_that_the_package_drops(double):
    engine, _ = opened()
    engine.step(feeds())
    double.code = -1
    assert failure(lambda: engine.step(feeds())) == (
        "ignored_run_error",
        "arrays came back, but rknn_run returned -1",
    )
    double.prints = "inference:E RKNN: [1:2] failed to submit!, op id: 7\n"
    assert failure(lambda: engine.step(feeds())) == (
        "failed_to_submit",
        "arrays came back, but rknn_run returned -1; failed to submit!, op id: 7",
    )
    double.code = 0
    engine.step(feeds())


def test_a_package_without_these_private_parts(double):
    class Other(double):  # type: ignore[misc]
        def __init__(self, verbose: bool = False) -> None:
            class Runtime:
                __slots__ = ()

                def run(self, get_frame_id):
                    return 0

            self.rknn_runtime = Runtime()

    sys.modules["rknnlite.api"].RKNNLite = Other  # type: ignore[attr-defined]
    engine, _ = opened()
    engine.step(feeds())
    assert engine.last_us() == {"run_us": None}


@rig.printing
def test_minus_one_is_final(double):
    double.answers["init_runtime"] = -1
    assert failure(lambda: opened(mask=3)) == ("core_mask", "init_runtime returned -1: nothing was said")
    assert failure(lambda: opened()) == ("error_line", "init_runtime returned -1: nothing was said")
    double.prints = "init_runtime:E The core mode 5 is not supported.\nE Catch exception when set npu core mode.\n"
    assert failure(lambda: opened(mask=5))[0] == "core_mask"
    double.prints = "init_runtime:Exception: RKNN init failed. error code: RKNN_ERR_INCOMPATILE_PRE_COMPILE_MODEL\n"
    assert failure(lambda: opened(mask=3))[0] == "version_mismatch"
    double.answers["load_rknn"] = -1
    assert failure(lambda: opened())[1].startswith("load_rknn returned -1")


def test_a_package_that_raises(double):
    double.answers["init_runtime"] = AttributeError("undefined symbol: rknn_set_input_shapes")
    assert failure(lambda: opened()) == (
        "error_line",
        "init_runtime: AttributeError: undefined symbol: rknn_set_input_shapes",
    )


@rig.printing
def test_a_mask_that_was_replaced(double):
    double.prints = (
        'init_runtime:W The RK3576 platform has only two NPU cores. "NPU_CORE_0_1_2" is not supported and will be '
        'automatically replaced with "NPU_CORE_0_1".\n'
    )
    _, found = opened(mask=7)
    assert found["core_mask"] == 3
    assert [x["text"] for x in found["findings"]] == ["core mask: got 7, the lite package took 3"]
    assert found["findings"][0]["kind"] == "core_mask"


def test_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rknnlite", None)
    assert failure(lambda: opened())[0] == "engine_missing"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("  API: 1.5.2 (c6b7b351a@2023)\n  DRV: rknn_server: 2.0.0 (abc), driver: 0.8.2\n", ("1.5.2", "0.8.2")),
        ("  API: 2.3.2\n", ("2.3.2", None)),
        (None, (None, None)),
    ],
)
def test_versions_are_read_from_a_text(text, found):
    versions = lite._versions(text)
    assert (versions.get("runtime"), versions.get("driver")) == found


# The vendor's own source


@pytest.fixture(scope="module")
def source() -> ast.ClassDef:
    """The class RKNNLite as the vendor wrote it. The wheel comes from the package index once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not list(CACHE.glob(f"*lite2-{VERSION}-*.whl")):
        target = ["--platform", "manylinux2014_aarch64", "--python-version", "3.11", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", *target, "--dest", str(CACHE)]
        try:
            subprocess.run([*command, f"rknn-toolkit-lite2=={VERSION}"], check=True, capture_output=True, timeout=60)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pytest.skip(f"no package index with rknn-toolkit-lite2 {VERSION}")
    with zipfile.ZipFile(next(CACHE.glob(f"*lite2-{VERSION}-*.whl"))) as wheel:
        tree = ast.parse(wheel.read("rknnlite/api/rknn_lite.py"))
    return next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "RKNNLite")


def methods(source: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {x.name: x for x in source.body if isinstance(x, ast.FunctionDef)}


def test_every_call_fits_the_package_s_signatures(source):
    """Names and keywords of our calls, read from our source, are the package's."""
    ours = ast.parse(inspect.getsource(lite))
    found = set()
    for node in ast.walk(ours):
        if not isinstance(node, ast.Call):
            continue
        function, arguments, keywords = node.func, node.args, node.keywords
        if isinstance(function, ast.Attribute) and function.attr == "_call":
            function, arguments = arguments[1], arguments[2:]  # type: ignore[assignment]
        name = ast.unparse(function)
        if re.fullmatch(r"self\.lite\.\w+|RKNNLite", name):
            name = name.rpartition(".")[2] if name != "RKNNLite" else "__init__"
            allowed = [x.arg for x in methods(source)[name].args.args][1:]
            assert {x.arg for x in keywords} <= set(allowed) and len(arguments) <= len(allowed), name
            found.add(name)
    assert found == {"__init__", "load_rknn", "init_runtime", "inference", "get_sdk_version", "release"} - {
        x for x in ("get_sdk_version", "release") if x not in found
    }
    assert {"load_rknn", "init_runtime", "inference"} <= found


def test_the_double_has_the_package_s_parameters(source):
    for name, function in methods(source).items():
        mine = getattr(Double, name, None)
        if mine is not None:
            allowed = [x.arg for x in function.args.args]
            assert [x for x in inspect.signature(mine).parameters if x not in allowed] == [], name


def test_the_package_still_drops_the_code_of_run(source):
    """Why `_watch_run` is there. Where this fails, the package may have learned to look."""
    text = ast.unparse(methods(source)["inference"])
    assert "ret = self.rknn_runtime.run(get_frame_id)" in text and "ret !=" not in text


def test_core_masks_are_the_package_s(source):
    constants = {
        target.id: ast.literal_eval(x.value)
        for x in source.body
        if isinstance(x, ast.Assign)
        for target in x.targets
        if isinstance(target, ast.Name)
    }
    assert constants["NPU_CORE_0_1"] == Double.NPU_CORE_0_1 == 3 and constants["NPU_CORE_AUTO"] == 0
