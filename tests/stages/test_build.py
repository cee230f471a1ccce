"""The build stage with the real toolkit on a tiny decoder: records, gates, faults, the store, reproducibility."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import tinygraph
from kvgate import contract as c
from kvgate.compiler import artifact, toolkit
from kvgate.compiler.request import Request
from kvgate.contract import Contract
from kvgate.jobs import record, store
from kvgate.jobs.job import Job
from kvgate.observe import Trace
from kvgate.stages import build
from onnx import external_data_helper
from tiny import relist

W8A8: dict[str, Any] = {"mask": -100, "calibrate": True, "config": {"quantized_dtype": "w8a8"}}


def error(job: Job, history: str, name: str) -> float:
    """L2 of an observed array against the trace, normalized."""
    trace = Trace.load(str(job.inputs["trace.text"].with_name("trace.npz")))
    with np.load(job.folder / "observations" / "text.npz") as seen:
        at, got = seen[f"{history}/positions"], seen[f"{history}/{name}"].astype(np.float64)
    true = trace.logits if name == "logits" else trace.states[name]
    assert true is not None
    return float(np.linalg.norm(got - true[at]) / np.linalg.norm(true[at]))


def blocked(job: Job, match: str) -> record.Blocked:
    with pytest.raises(record.Blocked, match=match) as caught:
        build.run(job)
    assert not (job.folder / ".work").exists() and not (job.folder / "model.rknn").exists()
    assert "\n" not in caught.value.reason
    return caught.value


@pytest.fixture(scope="module")
def fp16(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, dict[str, Any]]:
    job = tinygraph.prepare(tmp_path_factory.mktemp("fp16"), {})
    return job, build.run(job)


@pytest.mark.slow
def test_the_record(fp16: tuple[Job, dict[str, Any]]) -> None:
    job, body = fp16
    assert body["rows"] == 44 and body["operators"]["exSDPAttention@NPU"] == tinygraph.LAYERS
    assert body["cpu_operators"] == {} and body["cycles"] > 1000 and body["traffic_bytes"] > 10_000
    assert body["artifact_bytes"] == (job.folder / "model.rknn").stat().st_size
    assert body["sha256"] == record.sha256(job.folder / "model.rknn") == body["files"]["model.rknn"]
    for name, digest in body["files"].items():
        assert record.sha256(job.folder / name) == digest
    assert set(body["files"]) == {"model.rknn", "contract.json", "table.txt", "observations/text.npz"}
    assert [x.split()[0] for x in body["risks"]] == ["F1", "F3", "F4", "F9", "F10"]
    assert body["boundary"]["inputs"][2]["layout"] == "NHWC" and body["boundary"]["inputs"][2]["dtype"] == "float16"
    record.write(job.record, body)
    assert str(job.results) not in job.record.read_text()


@pytest.mark.slow
def test_the_artifact_names_its_contract(fp16: tuple[Job, dict[str, Any]]) -> None:
    job, _ = fp16
    contract = record.read(job.folder / "contract.json")
    assert artifact.read(job.folder / "model.rknn").custom == contract["custom_string"]
    graph = Contract.from_json((job.inputs["export"].parent / "contract.json").read_text())
    assert contract["identity"]["graph"] == graph.digest and contract["identity"]["mask_value"] == -1e4


@pytest.mark.slow
def test_what_the_simulator_returned(fp16: tuple[Job, dict[str, Any]]) -> None:
    """Each tensor against its own values: K and V share their shape, so a swapped slot would be seen here (F5)."""
    job, _ = fp16
    for history in ("isolated", "forced"):
        for name in ("logits", *(f"layers.{i}.{kind}" for i in range(2) for kind in ("key", "value"))):
            assert error(job, history, name) < 0.003, (history, name)
    with np.load(job.folder / "observations" / "text.npz") as seen:
        assert seen["isolated/positions"][[0, -1]].tolist() == [0, tinygraph.SLOTS - 1]  # first token, last slot
        assert len(seen["forced/positions"]) == tinygraph.SLOTS
        keys, values = seen["forced/layers.0.key"], seen["forced/layers.0.value"]
    assert np.linalg.norm(keys - values) > np.linalg.norm(keys)


@pytest.mark.slow
def test_equal_work_is_linked_back(fp16: tuple[Job, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    job, body = fp16

    def none(*args: object) -> None:
        raise AssertionError("compiled again")

    for name in body["files"]:
        (job.folder / name).unlink()
    with monkeypatch.context() as m:
        m.setattr(toolkit, "compile", none)
        assert build.run(job) == body
        other = tinygraph.prepare(job.results, {}, weights="renamed")
        assert build.run(other) == body  # a name is no work
        for change in ({"isolated": 6}, {"quant": {**job.config["quant"], "mask": -9e3}}):
            changed = Job("build", job.wildcards, job.config | change, job.inputs, job.results)
            with pytest.raises(AssertionError, match="compiled again"):
                build.run(changed)


@pytest.mark.slow
def test_the_same_content_in_another_folder(fp16: tuple[Job, dict[str, Any]], tmp_path: Path) -> None:
    """Also with a space in its path, and quantized: calibration files cannot lie on such a path for the toolkit."""
    _, body = fp16
    far = tmp_path / ("a much longer name " * 4).strip()
    again = build.run(tinygraph.prepare(far, {}))
    assert again["content_digest"] == body["content_digest"] and len(body["content_digest"]) == 64
    assert again["sha256"] != body["sha256"] != body["content_digest"]  # a heap address, another in each build
    assert {**again["files"], "model.rknn": ""} == {**body["files"], "model.rknn": ""}
    quantized = [build.run(tinygraph.prepare(folder, W8A8)) for folder in (tmp_path / "near", far)]
    assert quantized[0]["content_digest"] == quantized[1]["content_digest"]
    assert quantized[0]["content_digest"] != body["content_digest"]


@pytest.mark.slow
def test_w8a8_and_its_mask(tmp_path: Path) -> None:
    """float states become int8 without being asked (F14), and a mask of -1e4 leaves the scores no resolution (F11)."""
    near = tinygraph.prepare(tmp_path / "near", W8A8)
    body = build.run(near)
    assert {t["dtype"] for t in body["boundary"]["inputs"]} == {"int8"}
    assert body["boundary"]["inputs"][1]["low"] == -100 and body["boundary"]["inputs"][1]["scale"] > 0.39
    assert next(x for x in body["findings"] if x["kind"] == "dtype_changed")["count"] == 11
    assert len(body["calibration"]["samples"]) == 8 and body["calibration"]["samples"][0][1] == 0
    far = tinygraph.prepare(tmp_path / "far", {**W8A8, "mask": -1e4})
    build.run(far)
    assert error(far, "isolated", "layers.1.key") > 1.2 * error(near, "isolated", "layers.1.key") > 0.01


@pytest.mark.slow
def test_a_calibration_holds_its_own_samples_or_is_said_to_saturate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toolkit's ranges are those of the samples; narrower ones, as if it had clipped, are a finding."""
    job = tinygraph.prepare(tmp_path, W8A8)
    body = build.run(job)
    tensors = [f"{role}.{layer}" for layer in range(tinygraph.LAYERS) for role in ("key", "value")]
    assert body["calibration"]["outside"] == dict.fromkeys([*tensors, *(f"{t}.out" for t in tensors)], 0.0)
    assert not [f for f in body["findings"] if f["kind"] == "saturated"]
    whole = build._boundary

    def narrow(built: artifact.Artifact) -> dict[str, Any]:
        made = whole(built)
        for t in made["inputs"]:
            if t["name"] == "value.1":
                t |= {"low": t["low"] / 4, "high": t["high"] / 4}
        return made

    monkeypatch.setattr(build, "_boundary", narrow)
    again = build.run(job)  # linked back from the store
    (found,) = [f for f in again["findings"] if f["kind"] == "saturated"]
    assert found["tensor"] == "value.1" and found["share"] == again["calibration"]["outside"]["value.1"] > 0.05
    assert found["text"].startswith("calibration: value.1 saturates: ") and found["text"].endswith("try more samples")


def test_a_build_of_other_packages_is_not_taken_from_the_store(tmp_path: Path) -> None:
    """As its key says: onnxruntime's version, say, may change what the simulator was fed."""
    job = tinygraph.prepare(tmp_path, {})
    one, other = (replace(job, key={"versions": {"onnxruntime": x}}) for x in ("1.0", "2.0"))
    source = build.opened(job)
    assert build._identity(one, source) == build._identity(one, source) != build._identity(other, source)


@pytest.mark.parametrize(("artifacts", "contracts"), [("right", "right"), ("right", "other"), ("other", "right")])
def test_a_store_hit_is_held_to_the_custom_string_that_it_should_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifacts: str, contracts: str
) -> None:
    """An entry that is whole, and says its key."""
    job = tinygraph.prepare(tmp_path, {})
    source = build.opened(job)
    custom, key = {"right": build._custom(source), "other": "{}"}, store.key(build._identity(job, source))
    for name in (*build._files(job), build._LOG):
        record.write_bytes(tmp_path / "entry" / name, name.encode())
    record.write(tmp_path / "entry/contract.json", {"custom_string": custom[contracts]})
    files = {x: record.sha256(tmp_path / "entry" / x) for x in (*build._files(job), build._LOG)}
    store.put(tmp_path, key, tmp_path / "entry", files)
    monkeypatch.setattr(artifact, "read", lambda *_, **__: SimpleNamespace(custom=custom[artifacts]))
    right = artifacts == contracts
    assert build._stored(job, source, key) is right
    assert (job.folder / "model.rknn").exists() is right and len(store.entries(tmp_path)) == right


def test_a_calibration_by_what_is_verified_is_refused(tmp_path: Path) -> None:
    job = tinygraph.prepare(tmp_path, W8A8)
    drawn, verified = (job.inputs[x].with_name("trace.npz") for x in ("calibration.b", "trace.text"))
    text, program = Trace.load(str(drawn)), Trace.load(str(verified))
    tokens = np.concatenate([program.tokens[:6], text.tokens[6:]])
    replace(text, tokens=tokens, prompt=6).save(str(drawn))  # another text, but for what it was drawn after
    relist(job.inputs["calibration.b"])
    blocked(job, "calibration text b: got the first 6 tokens of program text, allowed: another text")


def test_a_calibration_beyond_float16_is_refused(tmp_path: Path) -> None:
    job = tinygraph.prepare(tmp_path, W8A8)
    path = job.inputs["calibration.a"].with_name("trace.npz")
    trace = Trace.load(str(path))
    trace.states["layers.0.value"][0] = 1e5
    trace.save(str(path))
    relist(job.inputs["calibration.a"])
    blocked(job, r"calibration: sample \(a, \d+\), input 'value.0': got 1e\+05, allowed: at most 65504 \(float16\)")


@pytest.mark.slow
def test_hybrid_quantization(tmp_path: Path) -> None:
    body = build.run(tinygraph.prepare(tmp_path / "a", {**W8A8, "hybrid": {"*sdpa*": "float16"}}))
    assert body["operators"]["exDataConvert@NPU"] > 0
    blocked(tinygraph.prepare(tmp_path / "b", {**W8A8, "hybrid": {"nothing*": "float16"}}), "fits none of")


# What the toolkit drops, merges and fills in, silently (F29, F30)


def merged_outputs(model: Any) -> None:
    for node in model.graph.node:
        if node.output[0] == "value.1.out":
            node.op_type = "Identity"
            node.input[:] = ["value.0.out"]


def constant_output(model: Any) -> None:
    for node in model.graph.node:
        if node.output[0] == "value.1.out":
            node.input[0] = "fixed"
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.ones((1, 1, tinygraph.HEADS * tinygraph.SIZE), np.float32), "fixed")
    )


def whole(model: Any) -> None:
    """Nothing to change: the contract of this case has an input more."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (whole, "input 'unused': not in the artifact, nothing uses it"),
        (merged_outputs, "output 'value.0.out': not in the artifact, .* equal to another output"),
        (constant_output, "output 'value.1.out': not in the artifact, it is a constant"),
    ],
)
def test_lost_inputs_and_outputs_block(change: Callable[[Any], None], match: str, tmp_path: Path) -> None:
    boundary = tinygraph.contract()
    if change is whole:
        unused = c.Tensor("unused", c.EMBEDDING, (1, 1, tinygraph.HIDDEN))  # shaped as the next: indexes would shift
        boundary = replace(boundary, inputs=(unused, *boundary.inputs))
    caught = blocked(tinygraph.prepare(tmp_path, {}, change, boundary), match)
    assert caught.findings[0]["kind"] == "missing"
    assert not list(tmp_path.rglob("observations"))  # nothing was fed by shifted indexes


def external(model: Any) -> None:
    external_data_helper.convert_model_to_external_data(model, location="weights.bin", size_threshold=1024)


def test_missing_and_short_weights_block_before_the_toolkit_fills_them_in(tmp_path: Path) -> None:
    job = tinygraph.prepare(tmp_path, {}, external)
    weights = job.inputs["export"].with_name("weights.bin")
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    blocked(job, f"weights weights.bin: got {size - 1} bytes, allowed: at least {size} bytes")
    weights.unlink()
    blocked(job, "weights weights.bin: got no file")


@pytest.mark.slow
def test_random_weights_block_even_if_the_check_before_misses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tinygraph.prepare(tmp_path, {}, external)
    job.inputs["export"].with_name("weights.bin").unlink()
    monkeypatch.setattr(build.requirements, "graph", lambda *args: [])
    blocked(job, "weights of .* were not found: built with random ones")


@pytest.mark.slow
def test_external_weights_beside_the_graph_are_right(tmp_path: Path) -> None:
    job = tinygraph.prepare(tmp_path, {}, external)
    build.run(job)
    assert error(job, "isolated", "logits") < 0.003


# Refusals


@pytest.mark.parametrize("length", [128, 300])
def test_a_long_name_blocks(length: int, tmp_path: Path) -> None:
    boundary = tinygraph.contract("m" * length)
    blocked(tinygraph.prepare(tmp_path, {}, boundary=boundary), f"got {length} characters, allowed: at most 127")


@pytest.mark.slow
def test_the_longest_name_builds(tmp_path: Path) -> None:
    body = build.run(tinygraph.prepare(tmp_path, {}, boundary=tinygraph.contract("m" * 127)))
    assert body["boundary"]["inputs"][1]["name"] == "m" * 127


def opset(model: Any) -> None:
    model.opset_import[0].version = 20


def runtime_slice(model: Any) -> None:
    """A window that begins where a runtime value says: symbolic for the compiler."""
    for node in model.graph.node:
        if node.output[0] == "masked0":
            node.input[1] = "window"
    nodes = [
        onnx.helper.make_node("ReduceMax", ["mask.0"], ["top"], keepdims=0, axes=[0, 1]),
        onnx.helper.make_node("Cast", ["top"], ["begin"], to=onnx.TensorProto.INT64),
        onnx.helper.make_node("Unsqueeze", ["begin", "axis0"], ["begins"]),
        onnx.helper.make_node("Slice", ["mask.0", "begins", "ends", "axis1"], ["window"]),
    ]
    for n, node in enumerate(nodes):
        model.graph.node.insert(n, node)
    for name, value in (("axis0", 0), ("axis1", 1), ("ends", tinygraph.SLOTS + 1)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "quant", "match"),
    [
        (opset, {}, r"load_onnx: .*Unsupport onnx opset 20, need <= 19"),
        (runtime_slice, {}, r"build: .*need to be constant"),
        (lambda model: None, {"config": {"optimisation": 3}}, "config: "),
        (lambda model: None, {**W8A8, "config": {"quantized_dtype": "w8a8", "quantized_method": "group32"}}, ": "),
    ],
)
def test_refusals_keep_the_toolkits_own_reason(
    change: Callable[[Any], None], quant: dict[str, Any], match: str, tmp_path: Path
) -> None:
    job = tinygraph.prepare(tmp_path, quant, change)
    caught = blocked(job, match)
    assert caught.findings[0]["kind"] == "refused"
    assert (job.folder / "toolkit.log").stat().st_size > 100


def test_unsupported_dtype_blocks(tmp_path: Path) -> None:
    quant = {**W8A8, "config": {"quantized_dtype": "w8a16"}}
    blocked(tinygraph.prepare(tmp_path, quant), "rk3576: got w8a16, supported: fp16, w8a8, w4a16")


@pytest.mark.slow
def test_a_time_limit_blocks(tmp_path: Path) -> None:
    job = tinygraph.prepare(tmp_path, {}, timeout=0.5)
    (job.folder / "model.rknn").write_text("of an earlier run")  # `blocked` wants it gone: a blocked row ships nothing
    caught = blocked(job, "no end after 0 s, in phase")
    assert caught.findings[0]["kind"] == "hang"


@pytest.mark.slow
def test_no_memory_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tinygraph.prepare(tmp_path, {})
    make = build.asked

    def limited(*args: Any) -> Request:
        return replace(make(*args), memory=150 << 20)

    monkeypatch.setattr(build, "asked", limited)
    caught = blocked(job, "out of memory: ")
    assert caught.findings[0]["kind"] == "memory"


@pytest.mark.slow
def test_a_comparison_of_nothing_is_no_success(tmp_path: Path) -> None:
    job = tinygraph.prepare(tmp_path, {})
    job.config["programs"]["text"]["histories"] = []
    blocked(job, r"simulate text: histories: got \[\], known: isolated, forced, free")
