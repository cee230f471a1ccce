import pytest
import torch
from kvgate.checkpoint import reference
from kvgate.jobs import record
from kvgate.sources import random
from tiny import LLAMA, random_source


def test_same_seed_same_bytes_other_seed_other_weights(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        random.fetch(random_source() | {"seed": seed}, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "model.safetensors" in files and "tokenizer.json" in files
    digests = {name: [record.sha256(tmp_path / name / file) for file in files] for name in "abc"}
    assert digests["a"] == digests["b"]
    assert record.sha256(tmp_path / "a/model.safetensors") != record.sha256(tmp_path / "c/model.safetensors")


def test_gains_are_not_one(tmp_path):
    random.fetch(random_source(), tmp_path)
    gain = reference.load(tmp_path).model.norm.weight
    assert (gain - 1).abs().max() > 0.05


def test_the_caller_s_random_numbers_are_left_alone(tmp_path):
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    random.fetch(random_source(), tmp_path)
    assert torch.equal(torch.rand(3), wanted)


def test_bytes_survive_the_tokenizer(tmp_path):
    random.fetch(random_source(), tmp_path)
    tokenizer = reference.load_tokenizer(tmp_path)
    text = "Grüße, 世界!\n\ttab"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id} == {256, 257, 258}


def test_a_given_tokenizer_is_used(tmp_path):
    random.fetch(random_source(), tmp_path / "first")
    random.fetch(random_source() | {"tokenizer": str(tmp_path / "first")}, tmp_path / "second")
    assert len(reference.load_tokenizer(tmp_path / "second")) == 259


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "no_such_family"}, "no_such_family"),
        ({"model_type": "vit"}, "config"),
        ({"vocab_size": 100}, "got vocab_size 100, allowed: at least the tokenizer's 259"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_line(tmp_path, config, says):
    with pytest.raises(record.Blocked, match=says) as caught:
        random.fetch({"config": LLAMA | config}, tmp_path)
    assert "\n" not in caught.value.reason
