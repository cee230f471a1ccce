"""model.onnx and its contract: reproducible, whole, nothing of this machine in it; wrong feeds change the result."""

import subprocess
import sys
from pathlib import Path

import families
import graphs
import numpy as np
import onnx
import pytest
import safetensors.numpy
import torch
from graphs import Graph, Model
from kvgate import contract as c
from kvgate.export import decoder, onnx_file, residual
from kvgate.jobs import record
from kvgate.jobs.record import Blocked
from kvgate.observe import observe
from kvgate.prepare.spec import Spec
from tiny import edit, relist

CAPACITY = 8
FILES = ("graph.json", "model.onnx", "contract.json", "host.npz", "weights.bin")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Model:
    return Model.of(tmp_path_factory.mktemp("exported"), "llama")


@pytest.fixture(scope="module")
def graph(llama) -> Graph:
    return llama.export("cpu_managed", capacity=CAPACITY)


def loaded(graph: Graph) -> onnx.ModelProto:
    return onnx.load(graph.folder / "model.onnx", load_external_data=False)


def test_the_same_bytes_in_another_folder_and_process(graph, llama, tmp_path):
    """Another process with other hashes, a longer path, another working folder."""
    far = tmp_path / "a folder with a longer name"
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from graphs import Model
import shutil
shutil.copytree({str(llama.checkpoint)!r}, {str(far / "models/llama/checkpoint")!r})
Model(Path({str(far)!r}), "llama").export("cpu_managed", capacity={CAPACITY})
"""
    env = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=env, capture_output=True)
    other = far / graph.folder.relative_to(llama.results)
    for name in FILES:
        assert (graph.folder / name).read_bytes() == (other / name).read_bytes(), name


def test_nothing_of_this_machine_is_in_it(graph):
    data = (graph.folder / "model.onnx").read_bytes()
    for word in (b"/home", b"/root", b"/tmp", b".py", b"site-packages", b"pytorch", onnx.__version__.encode()):
        assert word not in data, word
    model = loaded(graph)
    assert (model.producer_name, model.producer_version) == ("kvgate", "")
    assert [x.version for x in model.opset_import] == [17]


def test_weights_stay_in_their_file(graph, llama):
    """One file for all graphs of a form, by hard link; the graph itself is small."""
    names = {x.name.removeprefix("model.") for x in loaded(graph).graph.initializer} - {"logits.shift"}
    assert names == set(llama.prepare("recipe")["tensors"]) - {"model.rotary_emb.inner.inv_freq"} - {
        "model.rotary_emb.inner.original_inv_freq"
    }
    for x in loaded(graph).graph.initializer:
        if x.name == "logits.shift":
            continue  # one number, said V times
        entries = {e.key: e.value for e in x.external_data}
        assert entries["location"] == "weights.bin" and int(entries["offset"]) % 64 == 0
    prepared = llama.results / "models/llama/weights/plain/recipe/weights.bin"
    assert (graph.folder / "weights.bin").samefile(prepared)
    assert (graph.folder / "model.onnx").stat().st_size < 60_000
    onnx.checker.check_model(str(graph.folder / "model.onnx"))


@pytest.mark.parametrize("form", ["recipe", "plain"])
@pytest.mark.parametrize("module", graphs.STRATEGIES)
def test_the_graph_has_what_the_contract_says(llama, module, form):
    """Every input and output by name, order, shape and dtype, and nothing more; every input is used."""
    graph = llama.export(module, form, CAPACITY)
    model = loaded(graph)
    for values, declared in ((model.graph.input, graph.contract.inputs), (model.graph.output, graph.contract.outputs)):
        got = [
            (v.name, tuple(d.dim_value for d in v.type.tensor_type.shape.dim), v.type.tensor_type.elem_type)
            for v in values
        ]
        want = [(t.name, t.shape, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(t.dtype))) for t in declared]
        assert got == want
    used = {name for node in model.graph.node for name in node.input}
    assert {v.name for v in model.graph.input} <= used
    assert graph.contract.host_sha256 == record.sha256(graph.folder / "host.npz")
    assert graph.record["contract"] == graph.contract.digest
    assert all(len(n) <= onnx_file.NAME_LIMIT for node in model.graph.node for n in node.output)


def spec_of(model: Model) -> Spec:
    return Spec.from_dict(model.prepare("recipe")["spec"])


def test_a_window_that_the_capacity_never_reaches_is_no_mask_of_its_own(tmp_path):
    """gemma2 has two masks while its window (5) is shorter than the cache, else one."""
    spec = spec_of(Model.of(tmp_path, "gemma2"))
    short, long = (decoder.contract(spec, "cpu_managed", c.Cache(n)) for n in (5, 6))
    assert short.windows == (None,) and [t.name for t in short.inputs].count("mask.0") == 1
    assert long.windows == (None, 5) and [x.mask for x in long.layers] == [1, 0]


def test_masks_have_the_strategy_s_columns(llama):
    columns = {m: decoder.contract(spec_of(llama), m, c.Cache(8)).inputs[1].shape for m in graphs.STRATEGIES}
    assert columns == dict.fromkeys(graphs.STRATEGIES[:2], (1, 9)) | dict.fromkeys(graphs.STRATEGIES[2:], (1, 8))


def test_an_unknown_strategy_lists_the_known():
    with pytest.raises(ValueError, match="strategy module: got 'static', known: cpu_managed, dynamic_concat, fixed"):
        decoder.strategy("static")


def test_layers_of_different_sizes_cannot_be_one_tensor(llama, monkeypatch):
    raw = llama.prepare("recipe")
    raw["spec"]["layers"][1]["kv_heads"] = 1
    monkeypatch.setattr(Model, "prepare", lambda self, form: raw)
    real = record.held
    monkeypatch.setattr("kvgate.jobs.job.record.held", lambda path: raw if path.name == "weights.json" else real(path))
    with pytest.raises(Blocked, match="packing: got 'model' for layers of different sizes"):
        llama.export("dynamic_concat", capacity=CAPACITY, packing="model", rank=3)


def rotated(graph: Graph, offset: int) -> np.ndarray:
    """Logits of a short text with the rotation of position + offset."""
    trace_tokens = families.random_tokens(4)

    class Shifted:
        def _rotation(self, index: int) -> np.ndarray:
            self.length += offset
            try:
                return super()._rotation(index)  # type: ignore[misc]
            finally:
                self.length -= offset

    host = graph.host(Shifted)
    return np.stack([host.take(graph.engine.step(host.feeds([int(t)]))).logits for t in trace_tokens])


def test_positions_come_from_the_host_and_are_not_baked_in(graph):
    """Rotary attention sees distances: the same shift for all changes nothing, one for each token does."""
    first = rotated(graph, 0)
    assert graphs.relative(rotated(graph, 3), first) < 1e-5
    tokens = families.random_tokens(4)
    host = graph.host()
    fixed = {}
    logits = []
    for token in tokens:
        feeds = dict(host.feeds([int(token)]))
        feeds["rotation.0"] = fixed.setdefault("rotation", feeds["rotation.0"].copy())
        logits.append(host.take(graph.engine.step(feeds)).logits)
    assert graphs.relative(np.stack(logits), first) > 1e-3


@pytest.mark.parametrize("family", ["llama", "cohere", "phi"])
def test_rotary_tables_reach_to_the_capacity(tmp_path, family):
    """The last position's matrix is the model's own rotation there."""
    model = Model.of(tmp_path, family)
    trace = model.text(30)
    found = observe((g := model.export("cpu_managed", capacity=30)).engine, g.host(), trace, ["isolated"], 3)
    assert found["isolated/positions"].tolist() == [0, 14, 29]
    assert max(graphs.worst(found, trace, "isolated")) < 1e-5
    assert g.tables["turn.0"].shape == (16, 16) and g.tables["cosine.0"].shape == (30, 16)


def test_a_foreign_parameter_is_refused():
    """A constant that the exporter folded would have no values in the weights file."""
    index = {"only": {"shape": [1], "offset": 0}}
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Add", ["x", "model.other"], ["y"])],
            "g",
            [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1]) for n in ("x", "model.other")],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])],
        )
    )
    with pytest.raises(ValueError, match="got a parameter 'other', allowed: those of the weights file"):
        onnx_file._attach(model, {"x"}, index, "weights.bin")
    with pytest.raises(ValueError, match="got no input 'z'"):
        onnx_file._attach(model, {"x", "z"}, index, "weights.bin")


def test_names_too_long_for_the_compiler_are_refused():
    node = onnx.helper.make_node("Relu", ["x"], ["y" * 128])
    with pytest.raises(ValueError, match="got a name of 128 characters"):
        onnx_file._check_names(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [])))


def test_the_stage_hands_exporter_rows_on(llama, monkeypatch):
    import types

    from kvgate.stages import export

    monkeypatch.setitem(sys.modules, "kvgate.export.exporter", types.SimpleNamespace(run=lambda job: {"form": "it"}))
    job = llama._job("export", {"strategy": "x"}, {"strategy": {"module": "hf_export", "form": "exporter"}}, {})
    assert export.run(job) == {"form": "it"}


def test_folder_of_a_graph_is_complete(graph):
    assert sorted(p.name for p in graph.folder.iterdir()) == sorted(FILES)
    assert set(graph.record["files"]) == set(FILES) - {"graph.json"}
    for name, digest in graph.record["files"].items():
        assert record.sha256(Path(graph.folder / name)) == digest


def test_logits_stand_around_zero_in_the_graph_and_the_host_adds_what_was_taken(tmp_path):
    """float16 is fine around 0: the graph's logits are shifted by about the largest, inside the head's product."""
    model = Model.of(tmp_path, "llama")
    head = safetensors.numpy.load_file(model.checkpoint / "model.safetensors")
    head["lm_head.weight"] = head["lm_head.weight"] * 400
    safetensors.numpy.save_file(head, model.checkpoint / "model.safetensors", {"format": "pt"})
    relist(model.checkpoint / "manifest.json")
    trace, graph = model.text(5), model.export("cpu_managed")
    assert graph.contract.shift > 5
    host = graph.host()
    seen = []
    for position, token in enumerate(trace.tokens):
        outputs = graph.engine.step(host.feeds([int(token)]))
        seen.append(outputs["logits"].max())
        np.testing.assert_allclose(host.take(outputs).logits, trace.logits[position], rtol=1e-4, atol=1e-3)
    assert abs(np.mean(seen)) < np.mean(np.max(trace.logits, axis=1)) / 2


def test_compensation_of_a_graph_without_a_stream_is_blocked(tmp_path, monkeypatch):
    """A model that norms after each sum has no chain of sums; the row would not be what its name says."""
    monkeypatch.setattr(residual, "sums", lambda graph: [])
    with pytest.raises(Blocked, match="compensate: got no residual stream of at least two sums"):
        Model.of(tmp_path, "llama").export("cpu_managed", steps=["compensate"])


def test_angles_that_depend_on_the_length_are_refused_where_the_capacity_crosses_it(tmp_path):
    """longrope (phi3): up to the original length one table is right, beyond none is. Else shorter texts were wrong."""
    size = 16 // 2
    longrope = {"rope_type": "longrope", "long_factor": [8.0] * size, "short_factor": [1.0] * size, "rope_theta": 1e4}
    model = Model.of(tmp_path, "phi3")
    path = model.checkpoint / "config.json"
    edit(path, rope_parameters=longrope, original_max_position_embeddings=8)
    with pytest.raises(Blocked, match="rotary_emb: got other angles in a text of 9 tokens than in one of 2, "):
        model.export("cpu_managed", capacity=9)
    graph = model.export("cpu_managed", capacity=8)
    for length in (3, 8):
        trace = model.text(length)
        found = observe(graph.engine, graph.host(), trace, ["forced"])
        assert max(graphs.worst(found, trace, "forced")) < 1e-5
    wrong, own = (families.trace(model.checkpoint, model.text(9).tokens[:n]).states["layers.1.key"] for n in (9, 8))
    assert graphs.relative(wrong[:8], own) > 0.1  # what the guard is for


def test_expm1_keeps_what_a_difference_loses():
    """xIELU's own, where float32's exp(x) - 1 has one digit left, and at both ends."""
    x = torch.tensor([-1e-6, -3e-5, -1e-2, -0.7, -20.0, -200.0, 1e-6, 3.0, 80.0])
    exact = torch.expm1(x.double())
    assert ((onnx_file.expm1(x).double() - exact) / exact).abs().max() < 1e-6
    assert (((x.exp() - 1).double() - exact) / exact).abs().max() > 1e-2  # the plain spelling
