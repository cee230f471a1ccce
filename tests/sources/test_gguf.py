import gguf as format_package
import numpy as np
import pytest
import tiny_gguf
import torch
from kvgate.checkpoint import mapped, precise, reference
from kvgate.jobs import record
from kvgate.sources import gguf, random
from tiny import LLAMA, fetched, random_source


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
        wanted = mapped.held(wanted).numpy()
        if ".mlp." in name:  # the nearest point of the file's grid, exactly
            kind = format_package.GGMLQuantizationType.Q8_0
            wanted = format_package.quants.dequantize(format_package.quants.quantize(wanted, kind), kind)
            assert not np.array_equal(wanted, mapped.held(model.state_dict()[name]).numpy())
        assert np.array_equal(mapped.held(got[name]).numpy(), wanted), name
    tokenizer = reference.load_tokenizer(tmp_path)
    assert tokenizer.chat_template == tiny_gguf.TEMPLATE
    assert tokenizer.eos_token_id == 257


def test_the_rotary_order_matters(model, file, tmp_path):
    """The comparison above sees an order that is left as it is in the file."""
    weight = mapped.held(model.model.layers[0].self_attn.q_proj.weight).numpy()
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


def test_the_second_part_of_a_split_file_and_both_together(model, tmp_path):
    parts = []
    for n in range(2):
        parts.append(tmp_path / f"part{n}.gguf")

        def split(writer, n=n):
            writer.add_uint16("split.no", n)
            writer.add_uint16("split.count", 2)

        tiny_gguf.write(parts[n], model, edit=split, without=f"blk.{1 - n}.")
        reason, kind = blocked({"path": str(parts[n])}, tmp_path / "into")
        assert kind == "weights" and f"split GGUF, part {n + 1} of 2, allowed: one file" in reason
    tiny_gguf.write(tmp_path / "first.gguf", model, without="blk.1.")  # its keys say nothing of parts
    both = tmp_path / "both.gguf"
    both.write_bytes((tmp_path / "first.gguf").read_bytes() + parts[1].read_bytes())
    reason, kind = blocked({"path": str(both)}, tmp_path / "into")
    assert kind == "corrupt" and f"got {parts[1].stat().st_size} bytes after the last tensor" in reason


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("blk.1.", "got no tensor of blk.1, allowed: 2 blocks, as block_count says"),
        ("llama.block_count", "lacks the key llama.block_count"),  # a default model would have 32
        ("llama.embedding_length", "lacks the key llama.embedding_length"),
        ("blk.0.ffn_up", "weights: 1 missing keys, the first is model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_what_the_file_lacks_is_named(model, tmp_path, without, says):
    tiny_gguf.write(tmp_path / "cut.gguf", model, without=without)
    assert says in blocked({"path": str(tmp_path / "cut.gguf")}, tmp_path / "into")[0]


def test_a_block_that_the_file_does_not_count(model, tmp_path):
    def one(writer):
        writer.kv_data[0]["llama.block_count"].value = 1

    tiny_gguf.write(tmp_path / "more.gguf", model, edit=one)
    assert "got tensors of blk.1, allowed: 1 blocks" in blocked({"path": str(tmp_path / "more.gguf")}, tmp_path)[0]


def made(**config):
    """Weights large enough that attention looks at places."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "initializer_range": 0.3}
    return random._model(LLAMA | sizes | config, 3)


def logits(model):
    with torch.inference_mode(), precise.float64():
        return model.double()(torch.arange(48)[None]).logits.numpy()


def through(model, folder, edit=id):
    """The logits of a model that went through a file, and those that it would have without what `edit` adds."""
    tiny_gguf.write(folder / "tiny.gguf", model, edit=edit)
    gguf.fetch({"path": str(folder / "tiny.gguf")}, folder / "into")
    return logits(reference.load(folder / "into"))


def without_quantized(model):
    """Q8_0 rounds the FFN: zero there, so that the rest is compared exactly."""
    with torch.no_grad():
        for layer in model.model.layers:
            for matrix in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                matrix.weight.zero_()
    return model


def linear(writer):
    writer.add_rope_scaling_type(format_package.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def older_linear(writer):
    writer.add_float32("llama.rope.scale_linear", 4.0)


def yarn(writer):
    writer.add_rope_scaling_type(format_package.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
ROTARY = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, linear),
    "an older linear": ({"rope_type": "linear", "factor": 4.0}, older_linear),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, yarn),
    "llama3": ({"rope_type": "llama3"} | LLAMA3, None),
}


def divisors(model):
    """What llama.cpp's converter writes: by how much every frequency is divided. [D / 2]"""
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    return (plain / model.model.rotary_emb.inv_freq).numpy()


@pytest.mark.parametrize("name", ROTARY)
def test_scaled_rotary_positions_are_honoured(tmp_path, name):
    parameters, edit = ROTARY[name]
    model = without_quantized(made(rope_parameters=parameters | {"rope_theta": 10000.0}))
    edit = edit or (lambda writer: writer.add_tensor("rope_freqs.weight", divisors(model)))
    assert np.allclose(through(model, tmp_path, edit), logits(model), atol=1e-5)
    (tmp_path / "dropped").mkdir()
    assert not np.allclose(through(model, tmp_path / "dropped"), logits(model), atol=1e-3)  # what a loader drops


def test_frequencies_of_no_known_rule_are_refused(model, tmp_path):
    odd = np.array([1, 1, 2, 2, 3, 3, 4, 4], np.float32)
    tiny_gguf.write(tmp_path / "odd.gguf", model, edit=lambda writer: writer.add_tensor("rope_freqs.weight", odd))
    reason, _ = blocked({"path": str(tmp_path / "odd.gguf")}, tmp_path / "into")
    assert "tensor rope_freqs.weight: got divisors up to 4, allowed: those of Llama 3's rule" in reason


def test_biases_are_honoured_or_named(tmp_path):
    model = without_quantized(made(attention_bias=True, mlp_bias=True))
    assert np.allclose(through(model, tmp_path), logits(model), atol=1e-5)
    tiny_gguf.write(tmp_path / "some.gguf", model, without="attn_output.bias")  # a llama has four or none
    reason, kind = blocked({"path": str(tmp_path / "some.gguf")}, tmp_path / "into")
    assert kind == "weights" and "the first is blk.0.attn_q.bias" in reason


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention.scale", 0.5), ("expert_count", 8), ("attention.sliding_window", 8), ("rope.dimension_count", 8)],
)
def test_a_key_that_has_no_place_is_refused(model, tmp_path, key, value):
    def add(writer):
        writer.kv_data[0].pop(f"llama.{key}", None)
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"llama.{key}", value)

    tiny_gguf.write(tmp_path / "keys.gguf", model, edit=add)
    assert f"key llama.{key}: got {value}" in blocked({"path": str(tmp_path / "keys.gguf")}, tmp_path / "into")[0]


def test_an_unknown_scaling_is_refused(model, tmp_path):
    def longrope(writer):
        writer.add_rope_scaling_type(format_package.RopeScalingType.LONGROPE)

    tiny_gguf.write(tmp_path / "long.gguf", model, edit=longrope)
    reason, _ = blocked({"path": str(tmp_path / "long.gguf")}, tmp_path / "into")
    assert "key llama.rope.scaling.type: got 'longrope', allowed: none, linear, yarn" in reason


def test_gemma_s_norms_windows_and_bases_come_through(tmp_path):
    """Its norms are stored as weight + 1; its window, head size and rotary base are keys that have to be honoured."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    rotary = {"full_attention": {"rope_type": "default", "rope_theta": 50000.0}}
    config = {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 8, "vocab_size": 300} | sizes
    more = {"num_hidden_layers": 6, "rope_parameters": rotary, "initializer_range": 0.3}
    model = random._model(config | more, 3)
    tiny_gguf.write(tmp_path / "tiny.gguf", without_quantized(model), "gemma3")
    gguf.fetch({"path": str(tmp_path / "tiny.gguf")}, tmp_path / "into")
    assert np.allclose(logits(reference.load(tmp_path / "into")), logits(model), atol=1e-3)


def test_an_adapter_is_no_model(model, tmp_path):
    tiny_gguf.write(tmp_path / "lora.gguf", model, edit=lambda writer: writer.add_type("adapter"))
    reason, kind = blocked({"path": str(tmp_path / "lora.gguf")}, tmp_path / "into")
    assert kind == "adapter" and reason.endswith("an adapter: merge it first")


def test_every_end_of_a_turn_ends_a_text(model, tmp_path):
    def ends(writer):
        writer.add_eot_token_id(258)
        writer.add_string("vendor.note", "x")
        writer.add_tokenizer_pre("smollm")
        writer.add_bool("llama.rope.scaling.finetuned", True)

    tiny_gguf.write(tmp_path / "ends.gguf", model, edit=ends)
    facts = gguf.fetch({"path": str(tmp_path / "ends.gguf")}, tmp_path / "into")
    assert reference.end_ids(reference.load(tmp_path / "into"), reference.load_tokenizer(tmp_path / "into")) == (
        257,
        258,
    )
    assert facts["left_out"] == {
        "vendor.note": "no key of the model",
        "tokenizer.ggml.pre": "the loader's tokenizers do not read it",
    }
