"""The toolkit's accuracy analysis of a tiny decoder: what it gives, that it is the row's, and two planted causes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tinygraph
from kvgate.compiler import toolkit
from kvgate.engines.onnxruntime import Engine
from kvgate.jobs import record
from kvgate.jobs.job import Job, record_path
from kvgate.judging import operator_errors
from kvgate.stages import accuracy, build, verify
from kvgate.strategies.cpu_managed.host import Host
from onnx import numpy_helper

LIMIT = 0.05
W8A8: dict[str, Any] = {"mask": -100, "calibrate": True, "config": {"quantized_dtype": "w8a8"}}


@pytest.fixture(autouse=True)
def may_see_what_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no value lies outside its range, which would come before the causes that are planted here."""
    monkeypatch.setattr(build.calibration, "refuse_verified", lambda *_: None)


def prepared(root: Path, quant: dict[str, Any], change: Callable[[Any], None] = lambda model: None) -> Job:
    """An accuracy job of a row that is built and verified. Quantized ones are calibrated with what they are shown."""
    built = tinygraph.prepare(root, quant, change, samples=tinygraph.SLOTS)
    if quant.get("calibrate"):
        del built.inputs["calibration.b"]
        built.inputs["calibration.a"] = built.inputs["trace.text"]
    record.write(built.record, {"status": "ok", **build.run(built)})
    names = {k: v for k, v in built.wildcards.items() if k != "part"} | {"backend": "simulator"}
    inputs = {"export": built.inputs["export"], "observed": built.record, "build": built.record}
    inputs["trace.text"] = built.inputs["trace.text"]
    verified = Job("verify", names, {k: built.config[k] for k in ("programs", "isolated")}, inputs, root)
    record.write(verified.record, {"status": "ok", **verify.run(verified)})
    inputs = built.inputs | {"build": built.record, "verify": verified.record}
    return Job("accuracy", names, built.config, inputs, root)


def off(body: dict[str, Any], mask: float) -> operator_errors.Off:
    first = operator_errors.first(body["operators"], LIMIT)
    assert first is not None
    return operator_errors.Off(first, {x["tensor"]: x for x in body["operators"]}, ["mask.0"], mask)


def row(body: dict[str, Any], tensor: str) -> dict[str, Any]:
    return next(x for x in body["operators"] if x["tensor"] == tensor)


@pytest.mark.slow
def test_float16(tmp_path: Path) -> None:
    job = prepared(tmp_path, {})
    body = accuracy.run(job)
    assert body["artifact"] == "equal" and body["fed"] == ""
    assert body["golden"]["kv_l2"] < 1e-5 and body["golden"]["logits_l2"] < 1e-5  # their float32 run is the reference
    # The state is the row's worst, and the analysis' simulator makes the same error there.
    assert body["state"]["history"] == "isolated" and body["state"]["error"] > 1e-5
    assert body["simulator"]["kv_l2"] == pytest.approx(body["state"]["error"], rel=0.01)
    assert operator_errors.first(body["operators"], LIMIT) is None and "no ranges" in body["ranges"]
    assert row(body, "logits")["saturated"] is None and row(body, "logits")["scale"] is None
    assert max(x["isolated_l2"] for x in body["operators"]) < 0.005
    assert not (job.folder / ".analysis").exists()
    record.write(job.record, body)
    assert str(tmp_path) not in job.record.read_text()
    again = accuracy.run(job)
    assert again == body


@pytest.mark.slow
def test_a_mask_in_one_tensor_with_the_scores(tmp_path: Path) -> None:
    """The same graph with -100 has attention below the limit: it is the mask."""
    wide = accuracy.run(prepared(tmp_path / "wide", {**W8A8, "mask": -1e4}))
    attention = next(x for x in wide["operators"] if x["operator"] == "exSDPAttention")
    near = accuracy.run(prepared(tmp_path / "near", W8A8))
    assert attention["isolated_l2"] > 3 * row(near, attention["tensor"])["isolated_l2"]
    kind = operator_errors.explain(off(wide, -1e4))
    assert kind is not None and kind.kind == "mask", (kind, off(wide, -1e4).row)
    # The list of ranges is another run of the calibration than the artifact's, and has the same ranges.
    built = record.read(next((tmp_path / "near").rglob("build.json")))["boundary"]["inputs"]
    key, boundary = row(near, "key.0_int8"), next(t for t in built if t["name"] == "key.0")
    assert [key[x] for x in ("low", "high", "scale")] == pytest.approx([boundary[x] for x in ("low", "high", "scale")])


def outlier(model: Any) -> None:
    """One channel of the first norm a thousand times as large, taken back by the products that read it."""
    for x in model.graph.initializer:
        array = numpy_helper.to_array(x).copy()
        if x.name == "norm0.gain":
            array[3] *= 1000
        elif x.name in ("q0.weight", "key0.weight", "value0.weight"):
            array[3] /= 1000
        else:
            continue
        x.CopyFrom(numpy_helper.from_array(array, x.name))


@pytest.mark.slow
def test_an_outlier_channel(tmp_path: Path) -> None:
    body = accuracy.run(prepared(tmp_path, W8A8, outlier))
    assert body["golden"]["kv_l2"] < 1e-4  # the function is the same
    found = off(body, -100)
    # The worst step is one where the channel is small: its range is wide there too, and that is told first.
    kind = operator_errors.outlier_channel(found)
    assert kind is not None, (operator_errors.explain(found), found.row, found.inputs)
    assert "rotate" in kind.remedy.text


@pytest.mark.slow
def test_a_hybrid_row_is_analysed_as_it_was_built(tmp_path: Path) -> None:
    body = accuracy.run(prepared(tmp_path, {**W8A8, "hybrid": {"*sdpa*": "float16"}}))
    assert body["artifact"] == "equal" and body["ranges"] == ""
    assert {x["dtype"] for x in body["operators"] if x["operator"] == "exSDPAttention"} == {"float16"}


@pytest.mark.slow
def test_a_row_with_headroom_is_analysed_as_it_was_built(tmp_path: Path) -> None:
    """The toolkit's list keeps the calibration's scales, and the artifact has wider ones."""
    body = accuracy.run(prepared(tmp_path, {**W8A8, "headroom": 4}))
    assert body["artifact"] == "equal"
    built = record.read(next(tmp_path.rglob("build.json")))["boundary"]
    for name, tensors in (("key.0_int8", built["inputs"]), ("key.0.out_int8", built["outputs"])):
        boundary = next(t for t in tensors if t["name"] == name.removesuffix("_int8"))
        made = row(body, name)
        assert [made[x] for x in ("low", "high", "scale")] == pytest.approx(
            [boundary[x] for x in ("low", "high", "scale")], rel=1e-3
        )
    # A quarter of each range is used; the masks and softmax have values at its very end.
    assert max(x["saturated"] for x in body["operators"] if x["operator"] == "Conv" and x["scale"]) == 0


@pytest.mark.parametrize("broken", ["key.0.out", "value.1.out"])
def test_a_layer_that_is_not_finite_is_no_small_error(tmp_path: Path, broken: str) -> None:
    """Whichever of the layers it is, the first one or the last."""

    class Dumps:
        def tensor(self, name: str, run: str) -> np.ndarray:
            return np.full_like(outputs[name], np.nan) if (name, run) == (broken, "golden") else outputs[name]

    boundary, graph = tinygraph.contract(), tmp_path / "model.onnx"
    onnx.save(tinygraph.decoder(boundary).model(boundary), str(graph))
    trace = tinygraph.trace(graph, boundary, np.arange(tinygraph.SLOTS), tinygraph.SLOTS)
    host = Host(boundary, tinygraph.tables(), -1e4)
    feeds = accuracy.calibration.feeds(boundary, host, trace, 5, "state")
    outputs = dict(Engine(graph, boundary).step(feeds))
    seen = {run: accuracy._compared(Dumps(), boundary, host, trace, feeds, run) for run in ("golden", "simulator")}
    assert seen["golden"]["kv_l2"] is None and seen["simulator"]["kv_l2"] < 1e-6


@pytest.mark.slow
def test_what_the_toolkit_refuses_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepared(tmp_path, {})
    monkeypatch.setattr(accuracy.calibration, "feeds", lambda *a: {"embedding": np.zeros((1, 1, 3), np.float32)})
    with pytest.raises(record.Blocked, match="accuracy analysis: ") as caught:
        accuracy.run(job)
    assert "\n" not in caught.value.reason and not (job.folder / ".analysis").exists()


@pytest.mark.slow
def test_what_the_toolkit_left_in_float16_is_judged_as_float16(tmp_path: Path) -> None:
    """Chosen by itself: its list has those tensors as int8, with a scale."""
    config = {"quantized_dtype": "w8a8", "auto_hybrid_cos_thresh": 0.9999}
    job = prepared(tmp_path, {**W8A8, "config": config, "build": {"auto_hybrid": True}})
    body, left = accuracy.run(job), job.read("build")["hybrid"]
    assert body["artifact"] == "equal" and "logits" in left
    rows = {x["tensor"]: x for x in body["operators"]}
    assert {rows[x]["dtype"] for x in [*left, "logits_int8"] if x in rows} <= {"float16", None}
    assert not any(rows[x]["scale"] for x in [*left, "logits_int8"] if x in rows)
    assert row(body, "embedding_int8")["dtype"] == "int8" and row(body, "embedding_int8")["scale"]


def measured(verified: Path, kv: dict[str, Any], positions: list[int]) -> None:
    """Write the metrics of programs, and the record that lists them."""
    files = {f"{name}/metrics.npz": verified.parent / name / "metrics.npz" for name in kv}
    for path, values in zip(files.values(), kv.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{"isolated/kv": values, "isolated/positions": positions})
    record.write(verified, {"status": "ok", "files": {name: record.sha256(path) for name, path in files.items()}})


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """An accuracy job without the toolkit: its child leaves a dump in which every output is zeros."""
    built = tinygraph.prepare(tmp_path, {})
    names = {k: v for k, v in built.wildcards.items() if k != "part"} | {"backend": "simulator"}
    record.write(built.record, {"status": "ok"})
    verified = tmp_path / record_path("verify", names)
    measured(verified, {"text": [[[0.1, 0.2]]]}, [3])

    def analyse(job: Job, source: build.Source, feeds: Any, work: Path) -> dict[str, Any]:
        for run in ("golden", "simulator"):
            (work / "snapshot" / run / "npy").mkdir(parents=True)
            for t in source.contract.outputs:
                np.save(work / "snapshot" / run / "npy" / f"{t.name}.npy", np.zeros(t.shape, np.float32))
        files = "".join(f"{t.name} {t.name}.txt\n" for t in source.contract.outputs)
        (work / "snapshot" / "map_name_to_file.txt").write_text(files)
        line = "[Conv] logits  1.00000 | 0.00000   1.00000 | 0.00000\n"
        (work / "snapshot" / "error_analysis.txt").write_text(line)
        return {"ranges": "none"}

    monkeypatch.setattr(accuracy, "_analyse", analyse)
    monkeypatch.setattr(accuracy, "_artifact", lambda *_: "equal")
    inputs = built.inputs | {"build": built.record, "verify": verified}
    return Job("accuracy", names, built.config, inputs, tmp_path)


def test_an_error_of_ours_fails_the_job_and_blocks_no_row(unbuilt: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> None:
        raise ValueError("a bug")

    assert accuracy.run(unbuilt)["golden"]["kv_l2"] == 1.0  # zeros
    monkeypatch.setattr(tinygraph.Host, "take", wrong)
    with pytest.raises(ValueError, match=r"^a bug$"):
        accuracy.run(unbuilt)
    assert not (unbuilt.folder / ".analysis").exists()


def test_an_analysis_that_cannot_be_read_blocks(unbuilt: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    left = accuracy._analyse

    def other(job: Job, source: build.Source, feeds: Any, work: Path) -> dict[str, Any]:
        facts = left(job, source, feeds, work)
        (work / "snapshot" / "error_analysis.txt").write_text("another form\n")
        return facts

    monkeypatch.setattr(accuracy, "_analyse", other)
    with pytest.raises(record.Blocked, match=r"^accuracy analysis: error_analysis\.txt: got no line of an operator"):
        accuracy.run(unbuilt)


def test_a_state_that_cannot_be_fed_is_named_as_the_programs(unbuilt: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy.calibration, "FLOAT16", 0.0)
    with pytest.raises(record.Blocked) as caught:
        accuracy.run(unbuilt)
    assert caught.value.reason.startswith("accuracy analysis: state (text, 3), input 'embedding': got ")


def test_the_worst_isolated_step_is_chosen(tmp_path: Path) -> None:
    config, verified = {"programs": {"a": {}, "b": {}}}, tmp_path / "metrics.json"

    def state() -> accuracy.State:
        measured(verified, kv, [0, 7])
        return accuracy._state(Job("accuracy", {}, config, {"verify": verified}, tmp_path))

    kv = {"a": [[[0.1, 0.2]], [[0.3, 0.1]]], "b": [[[0.1, 0.25]], [[0.1, 0.1]]]}
    assert state() == accuracy.State("a", 7, "isolated", 0.3)
    kv["b"][0][0][1] = float("nan")  # worse than any number
    assert state() == accuracy.State("b", 0, "isolated", None)


@pytest.mark.parametrize("kind", ["crash", "memory", "hang", "refused"])
@pytest.mark.parametrize("analysed", [False, True])
def test_how_the_child_ended(unbuilt: Job, monkeypatch: pytest.MonkeyPatch, kind: str, analysed: bool) -> None:
    """In the list of ranges: the analysis stands. Before: what may end well the next time is taken up again then."""
    left = accuracy._analyse
    monkeypatch.undo()
    monkeypatch.setattr(accuracy, "_artifact", lambda *_: "equal")

    def ended(request: Any, work: Path, log: Path, *_: Any, **__: Any) -> toolkit.Outcome:
        if analysed:
            left(unbuilt, build.opened(unbuilt), {}, work)
            (work / accuracy.analysis.ANALYSED).touch()
        return toolkit.Outcome("signal 11", kind, [record.finding(kind, "signal 11")])

    monkeypatch.setattr(toolkit, "compile", ended)
    if analysed:
        body = accuracy.run(unbuilt)
        assert body["ranges"] == "signal 11" and len(body["operators"]) == 1
        return
    with pytest.raises(record.Blocked, match=r"^accuracy analysis: signal 11$") as caught:
        accuracy.run(unbuilt)
    assert caught.value.facts == ({} if kind == "refused" else {"again": True})


def test_a_scratch_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / ".work").mkdir()
    toolkit.scratch(tmp_path, ".analysis")
    assert (tmp_path / ".work").is_dir()
