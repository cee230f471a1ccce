import json

import pytest
import torch
from kvgate.checkpoint import reference
from kvgate.jobs import record
from kvgate.stages import fetch
from safetensors.torch import load_file, save_file
from tiny import fetch_job, fetched, random_source


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fetched(tmp_path_factory.mktemp("results"))


@pytest.fixture
def copied(checkpoint, tmp_path):
    """A copy that a test may damage, as a local folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "manifest.json").unlink()
    return folder


def blocked(results, source):
    """The reason and kind; nothing may be left behind."""
    job = fetch_job(results, source)
    with pytest.raises(record.Blocked) as caught:
        fetch.run(job)
    assert "\n" not in caught.value.reason
    assert not job.folder.exists() and not list(results.glob("models/tiny/.*"))
    return caught.value.reason, caught.value.findings[0]["kind"]


def test_the_manifest_says_what_the_checkpoint_is(checkpoint):
    body = record.read(checkpoint / "manifest.json")
    assert body["architecture"] == "LlamaForCausalLM" and body["model_type"] == "llama"
    assert (body["vocabulary"], body["hidden"], body["positions"]) == (300, 32, 64)
    assert body["states"] == {f"layers.{i}.{kind}": [2, 8] for i in range(2) for kind in ("key", "value")}
    assert body["tokenizer"] == {"tokens": 259, "chat": True}
    assert body["licence"] == "unknown" and body["source"]["kind"] == "random"
    on_disk = {path.name: record.sha256(path) for path in checkpoint.iterdir() if path.name != "manifest.json"}
    assert body["files"] == on_disk and "model.safetensors" in on_disk


def test_equal_work_is_equal(checkpoint, tmp_path):
    again = fetched(tmp_path)
    assert (again / "manifest.json").read_bytes() == (checkpoint / "manifest.json").read_bytes()


def test_a_folder_is_taken_relative_to_the_repository(copied, tmp_path):
    job = fetch_job(tmp_path / "results", {"kind": "folder", "path": "mine", "licence": "mit"}, base=tmp_path)
    body = fetch.run(job)
    assert body["licence"] == "mit" and body["source"]["path"] == "mine"
    assert str(tmp_path) not in json.dumps(body)


def test_what_a_killed_job_left_is_replaced(tmp_path):
    job = fetch_job(tmp_path, random_source())
    for folder in (job.folder, job.folder.with_name(".checkpoint.part")):
        folder.mkdir(parents=True)
        (folder / "rest").write_text("x")
    body = fetch.run(job)
    assert "rest" not in body["files"] and not (job.folder / "rest").exists()
    assert not list(job.folder.parent.glob(".*"))


def test_pickled_weights_become_safetensors(copied, tmp_path):
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    wanted = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    (copied / "config.json").write_text((copied / "config.json").read_text().replace("{", "{ ", 1))  # by hand
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    job = fetch_job(tmp_path / "results", {"kind": "folder", "path": str(copied)})
    body = fetch.run(job)
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before  # the user's own, linked
    assert "model.safetensors" in body["files"] and "pytorch_model.bin" not in body["files"]
    assert not any(path.is_dir() for path in job.folder.iterdir())
    got = load_file(job.folder / "model.safetensors")
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_pickled_weights_are_read_as_stored(copied, tmp_path, stored):
    """Whatever dtype config.json says: its rounding would be the reference's."""
    wanted = {name: x.to(stored) for name, x in load_file(copied / "model.safetensors").items()}
    torch.save(wanted, copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    config = record.read(copied / "config.json") | {"dtype": "bfloat16"}
    (copied / "config.json").write_text(json.dumps(config))
    job = fetch_job(tmp_path / "results", {"kind": "folder", "path": str(copied)})
    fetch.run(job)
    got = load_file(job.folder / "model.safetensors")
    assert all(got[name].dtype == stored and torch.equal(got[name], x) for name, x in wanted.items())
    loaded = reference.load(job.folder).state_dict()
    assert all(torch.equal(loaded[name], x.float()) for name, x in wanted.items())


def with_tensors(folder, **more):
    tensors = load_file(folder / "model.safetensors") | more
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return {"kind": "folder", "path": str(folder)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.up_proj.bias", (48,)),  # mlp_bias true in the file, false in config.json
        ("model.layers.0.mlp.up_proj.weight_scale", ()),  # quantized weights without a quantization_config
        ("model.layers.2.input_layernorm.weight", (32,)),  # more layers than the config
    ],
)
def test_a_tensor_that_the_model_has_no_place_for(copied, tmp_path, name, shape):
    reason, kind = blocked(tmp_path / "results", with_tensors(copied, **{name: torch.ones(shape)}))
    assert kind == "weights" and f"the first is {name} {list(shape)}" in reason


def test_integers_are_no_weights(copied, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    whole = torch.randint(-128, 127, (48, 32), dtype=torch.int8)
    reason, _ = blocked(tmp_path / "results", with_tensors(copied, **{name: whole}))
    assert reason == f"weight {name}: got integers, allowed: floats (dequantize the checkpoint first)"


def test_what_means_nothing_is_in_the_manifest(copied, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = with_tensors(copied, **{name: 10000.0 ** -(torch.arange(0, 8, 2) / 8)})
    (copied / "consolidated.safetensors").write_bytes(b"")
    body = fetch.run(fetch_job(tmp_path / "results", source))
    assert body["left_out"] == {
        name: "rotary frequencies, equal to those of config.json",
        "consolidated.safetensors": "the weights are those of model.safetensors",
    }


def test_a_loader_that_says_nothing_is_not_believed(copied, tmp_path, monkeypatch):
    """The file is read a second time: a model with other values is refused whatever transformers reports."""
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained

    def faulty(*given, **named):
        model, report = load(*given, **named)
        with torch.no_grad():
            weight = model.model.layers[1].mlp.down_proj.weight
            weight.copy_(weight.bfloat16())
        return model, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", faulty)
    reason, _ = blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})
    assert "weight model.layers.1.mlp.down_proj.weight: loaded other values than the file's" in reason


WHY = {
    "a field's type": ({"num_hidden_layers": "2"}, "Field 'num_hidden_layers' expected int, got str (value: '2')"),
    "sizes that do not fit": ({"num_attention_heads": 5}, "The hidden size (32) is not a multiple of the number of"),
    "a rope type": ({"rope_scaling": {"rope_type": "foo"}}, "config.json: rope_scaling.rope_type: got 'foo', allowed"),
    "an activation": ({"hidden_act": "nosuch"}, "config.json: hidden_act: got 'nosuch', allowed: "),
    "a vocabulary": ({"vocab_size": 310}, "got [300, 32] in the file, allowed: [310, 32] by config.json"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: got 'fp8', allowed: none"),
}


@pytest.mark.parametrize("name", WHY)
def test_the_reason_says_why(copied, tmp_path, name):
    change, says = WHY[name]
    (copied / "config.json").write_text(json.dumps(record.read(copied / "config.json") | change))
    reason, _ = blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})
    assert says in reason


@pytest.mark.parametrize(("text", "says"), [("[]", "config.json: got list"), ("{", "config.json: is no JSON: ")])
def test_a_config_that_is_none(copied, tmp_path, text, says):
    (copied / "config.json").write_text(text)
    assert blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})[0].startswith(says)


def test_unknown_source_lists_the_known(tmp_path):
    reason, _ = blocked(tmp_path, {"kind": "ftp"})
    assert reason == "source kind: got 'ftp', known: folder, gguf, hub, package, random"


@pytest.mark.parametrize("left", [0.5, 0.999])
def test_a_truncated_weight_file(copied, tmp_path, left):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * left)])
    assert blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})[1] == "weights"


def test_a_missing_weight_is_not_filled_in(copied, tmp_path):
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    reason, kind = blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})
    assert kind == "weights" and "model.layers.1.mlp.up_proj.weight" in reason


def test_a_weight_of_another_shape(copied, tmp_path):
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})[1] == "weights"


def test_a_weight_that_is_not_a_number(copied, tmp_path):
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    reason, _ = blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})
    assert reason == "weight model.norm.weight: got NaN or inf, allowed: finite values"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"model_type": "no_such_family"}, "architecture"),
        ({"model_type": "vit"}, "architecture"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "architecture"),
    ],
)
def test_an_architecture_that_is_no_decoder(copied, tmp_path, change, kind):
    config = record.read(copied / "config.json") | change
    (copied / "config.json").write_text(json.dumps(config))
    assert blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})[1] == kind


def test_a_decoder_without_a_kv_cache(tmp_path):
    mamba = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 300}
    reason, kind = blocked(tmp_path, {"kind": "random", "config": mamba})
    assert kind == "architecture" and "mamba" in reason


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_damaged_text_file(copied, tmp_path, name):
    (copied / name).write_text("{ no json")
    assert blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})[1] in ("tokenizer", "architecture")


def test_a_missing_tokenizer(copied, tmp_path):
    for path in copied.glob("tokenizer*"):
        path.unlink()
    reason, kind = blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})
    assert kind == "tokenizer" and reason.startswith("tokenizer: got no file of one, allowed: tokenizer.json or ")


@pytest.mark.parametrize("source", [{"kind": "folder", "path": "nowhere"}, {"kind": "gguf", "path": "nowhere.gguf"}])
def test_a_missing_file(tmp_path, source):
    assert blocked(tmp_path, source)[1] == "missing"
