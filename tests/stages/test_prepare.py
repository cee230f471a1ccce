"""weights.bin and what is said of it; preparations by name; a model that cannot work is refused with its reason."""

import sys
import types

import families
import numpy as np
import pytest
import torch
from graphs import Model
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kvgate.checkpoint import mapped, refusals
from kvgate.export import blob
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.jobs.record import Blocked
from kvgate.prepare.spec import Spec
from kvgate.stages import prepare
from tiny import edit


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Model:
    return Model.of(tmp_path_factory.mktemp("prepared"), "llama")


def folder(model: Model, form: str = "recipe"):
    return model.results / "models" / model.name / "weights" / "plain" / form


def test_the_same_bytes_each_time(llama, tmp_path):
    llama.prepare("recipe")
    other = Model(tmp_path, "llama")
    other.checkpoint.parent.mkdir(parents=True)
    other.checkpoint.symlink_to(llama.checkpoint)
    other.prepare("recipe")
    for name in ("weights.json", "weights.bin", "tables.npz"):
        assert (folder(llama) / name).read_bytes() == (folder(other) / name).read_bytes(), name


def test_matrices_are_as_the_graph_uses_them(llama):
    body = llama.prepare("recipe")
    tensors = blob.read(folder(llama) / "weights.bin", body["tensors"])
    model = families.reference.load(llama.checkpoint)
    down = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(tensors[down], mapped.held(model.get_parameter(down)).numpy().T)
    np.testing.assert_array_equal(
        tensors["lm_head.weight"], mapped.held(model.get_output_embeddings().weight).numpy().T
    )
    assert not any("q_proj" in name or "embed" in name for name in tensors)  # joint now; the host looks rows up
    assert body["files"]["weights.bin"] == record.sha256(folder(llama) / "weights.bin")


def test_spec_survives_json(llama):
    raw = llama.prepare("recipe")["spec"]
    spec = Spec.from_dict(raw)
    assert spec.to_dict() == Spec.from_dict(spec.to_dict()).to_dict()
    assert spec.layers[1].module == "model.layers.1.self_attn" and spec.rotations[0].width == 16
    assert spec == Spec.from_dict(record.read(folder(llama) / "weights.json")["spec"])


def test_embedding_rows_are_as_the_model_embeds(tmp_path):
    """gemma scales them in its embedding module."""
    gemma = Model.of(tmp_path, "gemma3_text")
    gemma.prepare("recipe")
    table = gemma_model = families.reference.load(gemma.checkpoint)
    embed = table.get_input_embeddings()
    with torch.no_grad(), np.load(folder(gemma) / "tables.npz") as tables:
        rows = embed(torch.arange(embed.num_embeddings)).numpy()
        np.testing.assert_array_equal(tables["embedding"], rows.astype(np.float32))
        stored = mapped.held(gemma_model.get_parameter("model.embed_tokens.weight")).numpy()
        assert np.abs(tables["embedding"] - stored).max() > 1  # the rows as stored would be wrong


def test_what_is_measured_is_what_the_checkpoint_holds(tmp_path):
    """To the last bit: in float32 a weight found by running the norm would be the PC's."""
    qwen = Model.of(tmp_path, "qwen3")
    tensors = blob.read(folder(qwen) / "weights.bin", qwen.prepare("recipe")["tensors"])
    attention = families.reference.load(qwen.checkpoint).model.layers[1].self_attn
    norm = tensors["model.layers.1.self_attn.norm"][0, :, 0]
    np.testing.assert_array_equal(norm[:, 0], attention.q_norm.weight.detach().numpy() / 4)  # the scale of 16 channels
    np.testing.assert_array_equal(norm[:, -1], attention.k_norm.weight.detach().numpy())


def test_the_host_s_angles_are_rounded_once(llama):
    tables = llama.export("cpu_managed", capacity=32).tables
    rotary = families.reference.load(llama.checkpoint).model.rotary_emb
    angles = np.arange(32)[:, None] * np.tile(rotary.inv_freq.numpy(), 2)
    for name, function in (("cosine.0", np.cos), ("sine.0", np.sin)):
        np.testing.assert_array_equal(tables[name], function(angles).astype(np.float32))


@settings(deadline=None, max_examples=30)
@given(st.lists(hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=5), elements=st.floats(-1, 1, width=32))))
def test_blob_gives_back_what_was_written(arrays):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "weights.bin"
        index, digest = blob.write(path, [(f"t{i}", a) for i, a in enumerate(arrays)])
        assert digest == record.sha256(path)
        assert all(x["offset"] % blob.ALIGNMENT == 0 for x in index.values())
        if arrays:
            got = blob.read(path, index)
            for i, a in enumerate(arrays):
                np.testing.assert_array_equal(got[f"t{i}"], a)


def test_a_truncated_file_is_refused(tmp_path):
    index, _ = blob.write(tmp_path / "weights.bin", [("a", np.ones((4, 4), np.float32))])
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.truncate(60)
    with pytest.raises(ValueError, match=r"weights\.bin: got 60 bytes, allowed: at least 64"):
        blob.read(tmp_path / "weights.bin", index)


def test_an_unknown_preparation_lists_the_known():
    with pytest.raises(ValueError, match=r"weight preparation: got 'smoth', known: .*plain"):
        prepare.preparation("smoth")


def test_both_hooks_of_a_preparation_are_called(llama, tmp_path, monkeypatch):
    """`checkpoint` before the model is measured, `linear` on the matrices that the graph finally has."""
    seen = []
    step = types.SimpleNamespace(
        checkpoint=lambda model: model.lm_head.weight.mul_(2),
        linear=lambda name, weight, gram: seen.append((name, weight.shape)) or (weight,),
    )
    monkeypatch.setattr(prepare, "preparation", lambda name: step)
    wildcards = {"model": "llama", "weights": "doubled", "form": "recipe"}
    fetch = {"fetch": llama.checkpoint / "manifest.json"}
    job = Job("prepare", wildcards, {"weights": {"steps": [{"name": "doubled", "options": {}}]}}, fetch, tmp_path)
    job.folder.mkdir(parents=True)
    body = prepare.run(job)
    doubled = blob.read(job.folder / "weights.bin", body["tensors"])["lm_head.weight"]
    plain = blob.read(folder(llama) / "weights.bin", llama.prepare("recipe")["tensors"])["lm_head.weight"]
    np.testing.assert_array_equal(doubled, 2 * plain)
    assert ("model.layers.0.self_attn.qkv", (96, 160)) in seen and ("lm_head.weight", (96, 97)) in seen


REFUSED = {
    "an encoder-decoder": {"model_type": "t5", "is_encoder_decoder": True},
    "layers with a recurrent state": {"model_type": "mamba2"},
    "a recurrent state": {"model_type": "lfm2_moe", "conv_L_cache": 3},
    "several kinds of input": {"model_type": "gemma3", "vision_config": {}},
    "latent attention": {"model_type": "deepseek_v3", "kv_lora_rank": 512},
    "mixture of experts": {"model_type": "mixtral", "num_local_experts": 8},
    "projected inside": {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512},
    "share K and V": {"model_type": "gemma3n_text", "num_kv_shared_layers": 10},
    "no model_type": {},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_work_is_refused_by_its_config(why):
    reason = refusals.refusal(REFUSED[why])
    assert reason is not None and why in reason and "\n" not in reason


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_works_is_not_refused(family):
    assert refusals.refusal(families.config(family).to_dict()) is None


ALL_ATTENTION = {"layer_types": ["attention"] * 2, "mamba_d_state": 256, "num_local_experts": 0}


def test_a_hybrid_family_without_such_layers_is_not_refused():
    kind = {"model_type": "granitemoehybrid"}
    assert refusals.refusal(kind | ALL_ATTENTION) is None
    for layers in (None, ["attention", "mamba"]):
        assert "a recurrent state" in str(refusals.refusal(kind | ALL_ATTENTION | {"layer_types": layers}))
    assert "mixture of experts" in str(refusals.refusal(kind | ALL_ATTENTION | {"num_local_experts": 8}))


@pytest.mark.filterwarnings("ignore")
def test_what_the_reference_refuses_is_refused_by_the_config_alone():
    """Every decoder that transformers knows, with its own defaults: no user waits for a checkpoint to be told."""
    from kvgate.checkpoint import reference
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    refused, late = 0, []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # no defaults that hold
            continue
        try:
            reference.refuse_other_caches(config)
        except Exception:
            refused += 1
            late += [kind] if refusals.refusal(config.to_dict()) is None else []
    assert refused > 20 and late == []


def test_planning_needs_no_torch():
    """`refusal` is called while the workflow is parsed."""
    import subprocess

    code = "import sys; import kvgate.checkpoint.refusals; print('torch' in sys.modules, 'numpy' in sys.modules)"
    path = str(families.Path(prepare.__file__).parents[2])
    out = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert out.stdout.split() == ["False", "False"], out.stderr


def test_a_refused_model_is_blocked(llama, tmp_path):
    """Also where nobody looked at its config before."""
    import shutil

    other = Model(tmp_path, "llama")
    shutil.copytree(llama.checkpoint, other.checkpoint)
    edit(other.checkpoint / "config.json", num_local_experts=8)
    with pytest.raises(Blocked, match="mixture of experts, allowed: dense decoders"):
        other.prepare("recipe")
