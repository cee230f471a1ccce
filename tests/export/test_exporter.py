"""The libraries' own exporters: their graph untouched, the same bytes each time, right in ONNX Runtime."""

import os
import subprocess
import sys
from pathlib import Path

import families
import numpy as np
import onnx
import pytest
from kvgate import contract as c
from kvgate.contract import Contract
from kvgate.engines.onnxruntime import Engine
from kvgate.export import exporter
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.observe import observe
from kvgate.strategies.dynamic_concat.host import Host as ConcatHost
from kvgate.strategies.hf_export.host import Host as HfHost
from kvgate.strategies.recompute.host import Host as RecomputeHost

CAPACITY = 12
HOSTS = {"hf_export": HfHost, "dynamic_concat": ConcatHost, "recompute": RecomputeHost}


def job(manifest: Path, module: str, results: Path) -> Job:
    strategy = {"module": module, "capacity": CAPACITY, "layout": "rows", "rank": 4, "packing": "apart"}
    wildcards = {"model": "m", "weights": "plain", "strategy": module, "part": "decode"}
    return Job("export", wildcards, {"strategy": strategy | {"form": "exporter"}}, {"fetch": manifest}, results)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """A model with a window of 5 tokens, exported in each way; and its trace over one token more than the capacity."""
    folder = tmp_path_factory.mktemp("mistral")
    manifest = families.checkpoint(folder / "checkpoint", "mistral")
    jobs = {module: job(manifest, module, folder / "results") for module in HOSTS}
    bodies = {module: exporter.run(x) for module, x in jobs.items()}
    return folder, jobs, bodies, families.generation(folder / "checkpoint", [5, 6, 7], CAPACITY - 2)


def opened(run: Job) -> tuple[Contract, RecomputeHost | ConcatHost, Engine]:
    contract = Contract.from_json((run.folder / "contract.json").read_text())
    host = HOSTS[contract.strategy](contract, np.load(run.folder / "host.npz"), -1e4)
    return contract, host, Engine(run.folder / "model.onnx", contract)


@pytest.mark.parametrize("module", HOSTS)
def test_right_in_every_history(mistral, module):
    """A whole generation, past the window, first token to last slot; then a full cache stops it."""
    _, jobs, _, trace = mistral
    _, host, engine = opened(jobs[module])
    found = observe(engine, host, trace, ["isolated", "forced", "free"])
    assert found["forced/positions"].tolist() == list(range(CAPACITY))
    for history in ("isolated", "forced"):
        np.testing.assert_allclose(found[f"{history}/logits"], trace.logits[:CAPACITY], rtol=1e-3, atol=1e-4)
        for name, rows in trace.states.items() if module != "recompute" else ():
            np.testing.assert_allclose(found[f"{history}/{name}"], rows[:CAPACITY], rtol=1e-3, atol=1e-4)
    assert found["free/diverged"] == -1 and not found["forced/disturbed"].any()
    with pytest.raises(ValueError, match="cache full"):
        host.feeds([1])


@pytest.mark.parametrize("module", HOSTS)
def test_garbage_and_earlier_prompts_do_not_matter(mistral, module):
    _, jobs, _, trace = mistral
    _, host, engine = opened(jobs[module])

    def run(garbage: float) -> list[np.ndarray]:
        host.reset(garbage)
        return [host.take(engine.step(host.feeds([int(t)]))).logits for t in trace.tokens[:6]]

    clean = run(0.0)
    np.testing.assert_allclose(run(1e3), clean, rtol=1e-5, atol=1e-5)
    state = host.snapshot()
    again = host.take(engine.step(host.feeds([9]))).logits
    host.restore(state)
    assert np.array_equal(host.take(engine.step(host.feeds([9]))).logits, again)


def test_a_shifted_mask_is_wrong(mistral):
    """With padding between history and own token the window is counted from the wrong column."""

    class Wrong(HfHost):
        def extra(self, tensor):
            return np.roll(super().extra(tensor), -1, axis=1)

    _, jobs, _, trace = mistral
    contract, _, engine = opened(jobs["hf_export"])
    wrong = Wrong(contract, {}, -1e4)
    found = observe(engine, wrong, trace, ["isolated"])
    assert np.abs(found["isolated/logits"] - trace.logits[found["isolated/positions"]]).max() > 0.1


def test_the_graph_is_transformers_own(mistral, tmp_path):
    """Same nodes, names, shapes and weights as OnnxExporter's file; only doc strings and metadata are gone."""
    import torch
    import transformers
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    folder, jobs, _, _ = mistral
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint").eval()
    cache = transformers.DynamicCache()
    for i in range(2):
        cache.update(torch.zeros(1, 2, CAPACITY, 16), torch.zeros(1, 2, CAPACITY, 16), i)
    example = {
        "input_ids": torch.tensor([[3]]),
        "position_ids": torch.tensor([[CAPACITY]]),
        "attention_mask": torch.ones(1, CAPACITY + 1, dtype=torch.int64),
        "cache": cache,
        "use_cache": True,
    }
    OnnxExporter().export(model, example, OnnxConfig(dynamic=False, opset_version=18)).save_pretrained(tmp_path)
    theirs, ours = onnx.load(tmp_path / "model.onnx"), onnx.load(jobs["hf_export"].folder / "model.onnx")
    assert ours.opset_import == theirs.opset_import and 11 <= ours.opset_import[0].version <= 19
    assert [(n.op_type, *n.input, *n.output) for n in ours.graph.node] == [
        (n.op_type, *n.input, *n.output) for n in theirs.graph.node
    ]
    array = onnx.numpy_helper.to_array
    for mine, other in zip(ours.graph.initializer, theirs.graph.initializer, strict=True):
        assert mine.name == other.name and np.array_equal(array(mine), array(other))
    for side in ("input", "output"):
        for mine, other in zip(getattr(ours.graph, side), getattr(theirs.graph, side), strict=True):
            assert mine.name == other.name and mine.type == other.type


def test_the_contract_names_every_role(mistral):
    _, jobs, bodies, _ = mistral
    contract, *_ = opened(jobs["hf_export"])
    assert [t.role for t in contract.inputs] == [c.IDS, c.POSITION, c.ATTENTION_MASK, *[c.STATE] * 4]
    assert [t.role for t in contract.outputs] == [c.LOGITS, *[c.STATE] * 4]
    assert [t.states for t in contract.cache_inputs()] == [(x.name,) for x in contract.states]
    assert {t.shape for t in contract.cache_inputs()} == {(1, 2, CAPACITY, 16)}
    assert {t.shape for t in contract.cache_outputs()} == {(1, 2, CAPACITY + 1, 16)}
    assert len({t.name for t in (*contract.inputs, *contract.outputs)}) == 12
    assert contract.layers == (c.Layer(rotation=None),) * 2 and contract.form == "exporter"
    whole, *_ = opened(jobs["recompute"])
    assert [t.shape for t in whole.inputs] == [(1, CAPACITY)] and whole.outputs[0].shape == (1, CAPACITY, 97)
    for module, run in jobs.items():
        assert set(bodies[module]["files"]) == {"model.onnx", "weights.bin", "contract.json", "host.npz"}
        for name, digest in bodies[module]["files"].items():
            assert record.sha256(run.folder / name) == digest
        assert sorted(p.name for p in run.folder.iterdir()) == sorted(bodies[module]["files"])


@pytest.mark.parametrize("module", HOSTS)
def test_weights_lie_beside_the_graph(mistral, module):
    """Every outside tensor is in weights.bin in the same folder, and the file holds no path of a machine."""
    _, jobs, _, _ = mistral
    folder = jobs[module].folder
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    outside = [t for t in graph.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert outside and {x.value for t in outside for x in t.external_data if x.key == "location"} == {"weights.bin"}
    data = (folder / "model.onnx").read_bytes()
    assert b"site-packages" not in data and b".py" not in data and os.fsencode(Path.cwd()) not in data


_CHILD = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from export.test_exporter import exporter, job
for module in ("hf_export", "recompute"):
    print(sorted(exporter.run(job(Path(sys.argv[3]), module, Path(sys.argv[4])))["files"].items()), file=sys.stderr)
"""


@pytest.mark.slow
def test_the_same_bytes_in_another_process(mistral, tmp_path):
    """Another process, hash seed, working folder and results folder."""
    folder, _, bodies, _ = mistral
    here = Path(__file__).parents[1]
    arguments = [str(here), str(here.parent / "workflow"), str(folder / "checkpoint" / "manifest.json"), str(tmp_path)]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [x for x in done.stderr.splitlines() if x.startswith("[('contract.json'")]
    assert lines == [str(sorted(bodies[module]["files"].items())) for module in ("hf_export", "recompute")]


def test_a_model_without_k_and_v_is_blocked(tmp_path):
    import transformers

    config = transformers.MambaConfig(vocab_size=20, hidden_size=16, state_size=4, num_hidden_layers=1)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    files = {path.name: record.sha256(path) for path in (tmp_path / "checkpoint").iterdir()}
    record.write(tmp_path / "checkpoint" / "manifest.json", {"status": "ok", "files": files})
    run = job(tmp_path / "checkpoint" / "manifest.json", "hf_export", tmp_path / "results")
    with pytest.raises(record.Blocked, match="DynamicCache"):
        exporter.run(run)
    assert not (run.folder / ".exporter").exists()
