"""Distance biases: each model's own slopes and rounding, and what the graph makes of them at any position."""

import families
import numpy as np
import pytest
import torch
import transformers
from kvgate.checkpoint import load, reference
from kvgate.prepare import alibi, survey
from kvgate.prepare.spec import Layer
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_bias
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_bias
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_bias

CAPACITY = 700  # past 256, from where bfloat16 has no room for all integers


def layer(family: str) -> Layer:
    found = survey.survey(load.attach(families.model(family))).sites[0]
    options = {"slopes": tuple(found.options["slopes"].tolist()), "bfloat16": found.options.get("bfloat16", 0.0)}
    return Layer("m", 0, found.heads, found.kv_heads, found.key_size, found.value_size, 2, **options)


def theirs(family: str, heads: int, size: int) -> np.ndarray:
    """[heads, positions]: what transformers adds to the scaled scores of a key."""
    ones = torch.ones(1, CAPACITY, dtype=torch.long)
    bias = {
        "bloom": lambda: bloom_bias(ones, heads, torch.float32),
        "falcon_alibi": lambda: falcon_bias(ones, heads, torch.float32) * size**-0.5,
        "mpt": lambda: mpt_bias(heads, CAPACITY),
    }[family]()
    return bias.reshape(heads, CAPACITY).numpy()


@pytest.mark.parametrize("form", ["recipe", "plain"])
@pytest.mark.parametrize("family", ["bloom", "falcon_alibi", "mpt"])
def test_it_is_the_models_own_up_to_what_softmax_ignores(family, form):
    """A token that stands after the slots (capacity + 1 columns), and one that is written into them."""
    made = layer(family)
    wanted = theirs(family, made.heads, made.key_size)
    for position in (0, 1, 255, 257, 513, CAPACITY - 1):
        after, inside = (
            alibi.bias(made, columns, CAPACITY, torch.tensor([[float(position)]]), form).numpy()
            for columns in (CAPACITY + 1, CAPACITY)
        )
        assert after.shape[:3] == ((made.heads, 1, 1) if form == "recipe" else (1, made.heads, 1))
        after, inside = after.reshape(made.heads, -1), inside.reshape(made.heads, -1)
        relative = wanted - wanted[:, [position]]
        np.testing.assert_allclose(inside[:, : position + 1], relative[:, : position + 1], rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(after[:, :position], inside[:, :position])
        assert not after[:, CAPACITY].any()  # the token itself


def test_falcon_s_rounding_matters():
    """Without it the bias of a far key is off by more than float32 explains."""
    made = layer("falcon_alibi")
    exact = np.outer(made.slopes, np.arange(CAPACITY, dtype=np.float32))
    assert np.abs(alibi.rounded(made.slopes, CAPACITY) - exact).max() > 0.4
    raw = falcon_bias(torch.ones(1, CAPACITY, dtype=torch.long), made.heads, torch.float32)
    np.testing.assert_array_equal(alibi.rounded(made.slopes, CAPACITY), raw.reshape(made.heads, -1).numpy())


def test_the_reference_of_falcon_adds_it_once(tmp_path):
    """transformers' eager attention adds Falcon's bias twice, its default once: the reference is not eager here."""
    families.checkpoint(tmp_path, "falcon_alibi")
    tokens = torch.from_numpy(families.random_tokens(12))[None]
    known = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    eager = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        right, twice = (model(tokens, use_cache=False).logits for model in (known, eager))
        ours = [model(tokens, use_cache=False).logits for model in (reference.load(tmp_path), load.model(tmp_path))]
    assert (twice - right).norm() > 1e-2 * right.norm()
    assert all((x - right).norm() < 1e-5 * right.norm() for x in ours)
