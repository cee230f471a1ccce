import gguf as format_package
import numpy as np
import pytest
import tiny_gguf
from kvgate import record, reference
from kvgate.sources import gguf
from tiny import fetched, random_source


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return reference.load(
        fetched(tmp_path_factory.mktemp("results"), random_source(hidden_size=64, intermediate_size=64))
    )


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.write(path, model)
    return path


def test_weights_tokenizer_and_licence_come_through(model, file, tmp_path):
    facts = gguf.fetch({"path": str(file)}, tmp_path)
    assert facts == {"revision": record.sha256(file), "licence": "mit", "left_out": {}}
    got = reference.load(tmp_path).state_dict()
    for name, wanted in model.state_dict().items():
        wanted = wanted.numpy()
        if ".mlp." in name:  # the nearest point of the file's grid, exactly
            kind = format_package.GGMLQuantizationType.Q8_0
            wanted = format_package.quants.dequantize(format_package.quants.quantize(wanted, kind), kind)
            assert not np.array_equal(wanted, model.state_dict()[name].numpy())
        assert np.array_equal(got[name].numpy(), wanted), name
    tokenizer = reference.load_tokenizer(tmp_path)
    assert tokenizer.chat_template == tiny_gguf.TEMPLATE
    assert tokenizer.eos_token_id == 257


def test_the_rotary_order_matters(model, file, tmp_path):
    """The comparison above sees an order that is left as it is in the file."""
    weight = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    assert not np.array_equal(tiny_gguf.interleaved(weight, 4), weight)


def test_the_checkpoint_no_longer_says_that_it_is_quantized(file, tmp_path):
    gguf.fetch({"path": str(file)}, tmp_path)
    assert "quantization_config" not in record.read(tmp_path / "config.json")


def test_the_same_bytes_again(file, tmp_path):
    for name in "ab":
        gguf.fetch({"path": str(file)}, tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def blocked(source, into):
    with pytest.raises(record.Blocked) as caught:
        gguf.fetch(source, into)
    assert "\n" not in caught.value.reason
    return caught.value.reason, caught.value.findings[0]["kind"]


def test_missing(tmp_path):
    assert blocked({"path": str(tmp_path / "no.gguf")}, tmp_path)[1] == "missing"


@pytest.mark.parametrize("damage", ["magic", "half", "tail", "header", "empty"])
def test_a_corrupt_file(file, tmp_path, damage):
    data = file.read_bytes()
    wrong = {
        "magic": b"ABCD" + data[4:],
        "half": data[: len(data) // 2],
        "tail": data[:-100],
        "header": data[:8] + b"\xff" * 16 + data[24:],  # the counts of tensors and keys
        "empty": b"",
    }[damage]
    (tmp_path / "bad.gguf").write_bytes(wrong)
    assert blocked({"path": str(tmp_path / "bad.gguf")}, tmp_path / "into")[1] == "corrupt"


def test_a_changed_byte_where_the_sha256_is_pinned(file, tmp_path):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    (tmp_path / "bad.gguf").write_bytes(data)
    source = {"path": str(tmp_path / "bad.gguf")}
    gguf.fetch(source, tmp_path / "unpinned")  # a weight with another value: nobody else can see it
    reason, kind = blocked(source | {"sha256": record.sha256(file)}, tmp_path / "pinned")
    assert kind == "corrupt" and "sha256" in reason


def test_an_architecture_that_the_loader_does_not_know(model, tmp_path):
    tiny_gguf.write(tmp_path / "odd.gguf", model, architecture="nosuchnet")
    reason, kind = blocked({"path": str(tmp_path / "odd.gguf")}, tmp_path / "into")
    assert kind == "architecture" and "nosuchnet" in reason
