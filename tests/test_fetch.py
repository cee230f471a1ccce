import json

import pytest
import torch
from kvgate import record
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
    assert body["layers"] == [{"kv_heads": 2, "key_size": 8, "value_size": 8}] * 2
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
    assert blocked(tmp_path / "results", {"kind": "folder", "path": str(copied)})[1] == "tokenizer"


@pytest.mark.parametrize("source", [{"kind": "folder", "path": "nowhere"}, {"kind": "gguf", "path": "nowhere.gguf"}])
def test_a_missing_file(tmp_path, source):
    assert blocked(tmp_path, source)[1] == "missing"
