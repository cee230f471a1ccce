"""What a loader may do with a file's tensors, and what is refused, on a model of four matrices a layer."""

import families
import pytest
import torch
from kvgate.checkpoint import held, reference, stored
from kvgate.jobs import record
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.norm = (nn.Linear(4, 4, bias=False) for _ in range(4))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.rotary = nn.Module()
        self.rotary.register_buffer("inv_freq", 10.0 ** -torch.arange(3.0), persistent=False)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def file(model):
    """The tensors of a file that holds the model."""
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def hold(file, model):
    return held.hold({name: stored.of_tensor(x) for name, x in file.items()}, model)


def refused(file, model):
    with pytest.raises(record.Blocked) as caught:
        hold(file, model)
    assert "\n" not in caught.value.reason
    return caught.value.reason


def test_the_model_itself_leaves_nothing_out(file, model):
    assert hold(file, model) == {}
    assert hold(file | {"head.weight": file["embed.weight"]}, model) == {}  # a tied tensor twice


def test_other_names_are_found_by_content(file, model):
    assert hold({f"transformer.{name}": x for name, x in file.items()}, model) == {}


def test_a_reordered_tensor_is_found_by_its_sums(file, model):
    """Under another name, as GGUF has rotary channels; not under its own."""
    moved = file.pop("layers.0.q.weight").flip(0)
    assert hold(file | {"blk.0.q": moved}, model) == {}
    assert "layers.0.q.weight: loaded other values" in refused(file | {"layers.0.q.weight": moved}, model)


def test_a_layer_s_fused_tensor_is_found_by_its_parts(file, model):
    fused = torch.cat([file.pop(f"layers.1.{x}.weight") for x in "qkv"])
    assert hold(file | {"layers.1.qkv.weight": fused}, model) == {}
    fused[0, 0] += 0.01
    assert "layers.1.qkv.weight [12, 4]" in refused(file | {"layers.1.qkv.weight": fused}, model)


def test_a_tensor_of_another_layer_is_not_its_equal(file, model):
    file["layers.0.x.weight"], file["layers.1.x.weight"] = file.pop("layers.1.q.weight"), file.pop("layers.0.q.weight")
    assert "layers.0.x.weight" in refused(file, model)


@pytest.mark.parametrize("fault", ["swapped", "rounded", "random", "stale"])
def test_other_values_under_the_same_name(file, model, fault):
    name = "layers.0.k.weight"
    with torch.no_grad():
        loaded = model.layers[0].k.weight
        file[name] = {
            "swapped": file["layers.0.v.weight"],
            "rounded": file[name].clone(),
            "random": torch.randn(4, 4),
            "stale": file[name] * 1.001,
        }[fault]
        if fault == "rounded":
            loaded.copy_(loaded.bfloat16())
    assert f"weight {name}: loaded other values than the file's: the sum is " in refused(file, model)


def test_what_has_no_place_is_named(file, model):
    assert "1 tensors that the model has no place for, the first is layers.0.q.bias [4]" in refused(
        file | {"layers.0.q.bias": torch.ones(4)}, model
    )
    assert "layers.0.q.weight_scale" in refused(file | {"layers.0.q.weight_scale": torch.ones(())}, model)


def test_what_no_file_has_is_named(file, model):
    del file["layers.1.norm.weight"]
    assert "1 missing keys, the first is layers.1.norm.weight" in refused(file, model)


def test_another_shape_is_said_with_both(file, model):
    file["embed.weight"] = torch.ones(7, 4)
    assert refused(file, model) == "weight embed.weight: got [7, 4] in the file, allowed: [6, 4] by config.json"


def test_a_tied_tensor_with_two_contents(file, model):
    assert "head.weight" in refused(file | {"head.weight": file["embed.weight"] + 1}, model)


def test_what_is_meaningless_says_so_by_name_and_by_value(file, model):
    frequencies = "layers.0.rotary.inv_freq"
    rounded = model.rotary.inv_freq.bfloat16()
    known = {
        frequencies: rounded,
        "layers.0.attn.bias": torch.ones(5, 5, dtype=torch.bool).tril()[None, None],
        "layers.0.attn.masked_bias": torch.tensor(-1e4),
        "position_ids": torch.arange(9)[None],
        "mtp.layers.0.q.weight": torch.ones(2, 2),
    }
    assert hold(file | known, model).keys() == known.keys()
    assert "rotary frequencies" in refused(file | {frequencies: 2 * rounded}, model)
    assert "layers.0.attn.bias" in refused(file | {"layers.0.attn.bias": torch.ones(5, 5)}, model)
    assert "position_ids" in refused(file | {"position_ids": torch.arange(1, 10)}, model)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_comes_back_as_its_files(family, tmp_path):
    """What transformers renames on the way out and in is found again."""
    families.checkpoint(tmp_path, family)
    weights = stored.read(tmp_path)
    loaded = reference.load(tmp_path)
    assert held.hold(weights.contents, loaded) == {}
    with torch.no_grad():
        next(x for x in loaded.parameters() if x.ndim == 2)[0, 0] += 1e-3
    with pytest.raises(record.Blocked, match="weight"):
        held.hold(weights.contents, loaded)


def test_an_old_checkpoint_of_the_model_without_its_head(tmp_path):
    """GPT-2's own: names without the prefix, masks beside the weights, the tied head left out."""
    loaded = families.model("gpt2").eval()
    bare = dict(loaded.transformer.state_dict())
    masks = {"h.0.attn.bias": torch.ones(8, 8).tril()[None, None], "h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert hold(bare | masks, loaded).keys() == masks.keys()
