import subprocess
import sys

import families
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgate import observe
from kvgate.checkpoint import reference, refusals
from tiny import LLAMA, fetched
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fetched(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def model(folder):
    return reference.load(folder)


PROMPT = [5, 200, 17, 17, 90]


def made(**config):
    torch.manual_seed(0)
    small = {k: LLAMA[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**small | config), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def test_equals_transformers_own_generation_with_its_cache(model):
    found = reference.trace(model, PROMPT, new=20)
    wanted = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert found.tokens.tolist() == wanted[0].tolist()
    assert (found.prompt, found.ended) == (5, False)


def test_keys_values_and_logits_equal_those_of_single_steps(model):
    """Token by token with transformers' cache: another order of work, the same numbers."""
    from transformers import DynamicCache

    found = reference.trace(model, PROMPT, new=6)
    cache, logits = DynamicCache(), []
    for token in found.tokens.tolist():
        with torch.inference_mode():
            logits.append(model(torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, -1].numpy())
    assert found.logits.shape == (11, 300)
    np.testing.assert_allclose(found.logits, np.stack(logits), atol=2e-6)
    for i, layer in enumerate(cache.layers):
        assert found.states[f"layers.{i}.key"].shape == (11, 2, 8)
        np.testing.assert_allclose(found.states[f"layers.{i}.key"], layer.keys[0].transpose(0, 1).numpy(), atol=2e-6)
        np.testing.assert_allclose(
            found.states[f"layers.{i}.value"], layer.values[0].transpose(0, 1).numpy(), atol=2e-6
        )
    shifted = np.roll(found.states["layers.0.key"], 1, axis=0)
    assert np.abs(shifted - found.states["layers.0.key"]).max() > 0.1  # a slot off by one would be seen


def test_greedy_token_is_the_logits_own(model):
    found = reference.trace(model, PROMPT, new=6)
    assert found.logits[found.prompt - 1 : -1].argmax(axis=1).tolist() == found.tokens[found.prompt :].tolist()


def test_an_end_token_is_kept_and_ends_it(model):
    free = reference.trace(model, PROMPT, new=8)
    end = int(free.tokens[7])
    first = free.tokens[5:].tolist().index(end)
    found = reference.trace(model, PROMPT, new=8, ends=[end])
    assert found.ended and found.tokens.tolist() == free.tokens[: 5 + first + 1].tolist()
    assert found.end_ids == (end,)


def test_without_logits(model):
    found = reference.trace(model, PROMPT, logits=False)
    assert found.logits is None
    np.testing.assert_allclose(
        found.states["layers.1.key"], reference.trace(model, PROMPT).states["layers.1.key"], atol=1e-6
    )


def test_a_sliding_layer_is_not_cut_to_its_window_and_the_window_acts():
    sizes = {"num_key_value_heads": 2, "intermediate_size": 48}
    narrow = made(model_type="mistral", sliding_window=4, **sizes)
    wide = made(model_type="mistral", sliding_window=None, **sizes)
    found = reference.trace(narrow, list(range(12)))
    assert found.states["layers.1.key"].shape == (12, 2, 8)
    with torch.inference_mode():
        plain = narrow(torch.tensor([list(range(12))]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(found.logits, plain, atol=1e-6)
    assert np.abs(found.logits - reference.trace(wide, list(range(12))).logits)[-1].max() > 1e-4


def test_repeated_heads_of_falcon_are_taken_once():
    falcon = made(model_type="falcon", new_decoder_architecture=True, num_kv_heads=2, alibi=False)
    found = reference.trace(falcon, PROMPT)
    assert found.states["layers.0.key"].shape == (5, 2, 8)  # 4 heads are cached, 2 differ


def test_heads_that_only_look_repeated_are_kept(model):
    heads = torch.arange(8.0).reshape(1, 4, 1, 2)
    assert torch.equal(reference.distinct_heads(heads, model.config), heads)
    twice = heads[:, :2].repeat_interleave(2, dim=1)
    assert torch.equal(reference.distinct_heads(twice, model.config), heads[:, :2])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mamba"}, "mamba: layer 0: got 'linear_attention'"),
        ({"model_type": "rwkv", "num_attention_heads": 0}, "rwkv: got no attention heads"),
        ({"model_type": "qwen3_next", "num_key_value_heads": 2}, "qwen3_next: layer 0: got 'linear_attention'"),
    ],
)
def test_a_model_without_keys_and_values_is_refused(config, says):
    with pytest.raises(ValueError, match=says):
        reference.refuse_other_caches(AutoConfig.for_model(**LLAMA | config))


def test_context_limit():
    assert reference.context_limit(AutoConfig.for_model("llama", max_position_embeddings=64)) == 64
    assert reference.context_limit(AutoConfig.for_model("gpt2", n_positions=32)) == 32
    assert reference.context_limit(AutoConfig.for_model("bloom")) is None
    rope = {"rope_type": "longrope", "long_factor": [4.0] * 48, "short_factor": [1.0] * 48, "rope_theta": 1e4}
    longrope = {"max_position_embeddings": 64, "original_max_position_embeddings": 32, "rope_parameters": rope}
    assert reference.context_limit(AutoConfig.for_model("phi3", **longrope)) == 32
    dynamic = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}
    assert reference.context_limit(AutoConfig.for_model("llama", **dynamic)) == 64


def test_end_ids_of_the_generation_config_and_the_tokenizer(folder, model):
    tokenizer = reference.load_tokenizer(folder)
    assert reference.end_ids(model, tokenizer) == (257,)
    other = reference.load(folder)
    other.generation_config.eos_token_id = [7, 9]
    assert reference.end_ids(other, tokenizer) == (7, 9, 257)
    other.generation_config.eos_token_id = None
    assert reference.end_ids(other, tokenizer) == (257,)


def test_perplexity_equals_torch_s_cross_entropy(model):
    found = reference.trace(model, list(range(30)))
    loss = torch.nn.functional.cross_entropy(torch.tensor(found.logits[:-1]), torch.tensor(found.tokens[1:]))
    assert reference.perplexity(found.tokens, found.logits) == pytest.approx(float(loss.exp()), rel=1e-5)
    assert reference.perplexity(found.tokens, np.roll(found.logits, 1, axis=0)) != pytest.approx(
        float(loss.exp()), rel=1e-3
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 500), st.floats(-1e4, 1e4))
def test_perplexity_of_equal_logits_is_the_vocabulary(size, level):
    logits = np.full((4, size), level, np.float32)
    assert reference.perplexity(np.array([0, 1, 0, 1]), logits) == pytest.approx(size, rel=1e-6)


def test_the_same_bytes_again(model, tmp_path):
    for name in ("a.npz", "b.npz"):
        reference.trace(model, PROMPT, new=4).save(str(tmp_path / name))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    again = observe.Trace.load(str(tmp_path / "a.npz"))
    assert again.prompt == 5 and again.states["layers.1.key"].shape == (9, 2, 8)


ENDS = (7, 211)
DRAW = """
import sys, torch
from pathlib import Path
from kvgate.checkpoint import reference
torch.manual_seed(int(sys.argv[2]))
torch.set_num_threads(1)
print(*reference.draw(reference.load(Path(sys.argv[1])), [5, 200, 17, 17, 90], 40, (7, 211)))
"""


def test_the_same_ids_are_drawn_in_every_process(folder):
    """Whatever was drawn there before."""

    def there(seed):
        done = subprocess.run([sys.executable, "-c", DRAW, str(folder), seed], capture_output=True, text=True)
        return [int(x) for x in done.stdout.split()]

    one = there("1")
    assert len(one) == 40 and one == there("2")


def test_drawn_ids_follow_from_the_prompt_and_leave_no_trace(model):
    state = torch.random.get_rng_state()
    config = model.generation_config
    first = reference.draw(model, PROMPT, 40, ENDS)
    assert first == reference.draw(model, PROMPT, 40, ENDS) != reference.draw(model, [*PROMPT, 3], 40, ENDS)
    assert first[:10] == reference.draw(model, PROMPT, 10, ENDS)
    assert torch.equal(state, torch.random.get_rng_state()) and model.generation_config is config
    assert first != reference.trace(model, PROMPT, new=40).tokens[5:].tolist()  # drawn, not greedy


def test_an_end_is_never_drawn_and_the_checkpoint_s_own_settings_do_not_count(model):
    found = reference.draw(model, PROMPT, 50)
    ends = sorted(set(found))[:3]  # drawn as long as they may be
    other = reference.draw(model, PROMPT, 50, ends)
    assert len(other) == 50 and not set(other) & set(ends)
    model.generation_config.update(eos_token_id=found[3], repetition_penalty=50.0, top_p=0.01, do_sample=False)
    try:
        assert reference.draw(model, PROMPT, 50) == found
    finally:
        model.generation_config = type(model.generation_config)()


def test_only_the_fifty_likeliest_are_drawn(model):
    found = reference.draw(model, PROMPT, 30)
    scores = reference.trace(model, [*PROMPT, *found]).logits
    ranks = [int((scores[4 + n] > scores[4 + n][token]).sum()) for n, token in enumerate(found)]
    assert 10 < max(ranks) < reference.TOP_K


def test_a_model_of_nan_draws_nothing():
    broken = made(model_type="llama", num_key_value_heads=2, intermediate_size=48)
    broken.lm_head.weight.data[:] = float("nan")
    with pytest.raises(FloatingPointError, match="got NaN or infinite logits"):
        reference.draw(broken, PROMPT, 5)


class Rounds(TorchDispatchMode):
    """Operations that give less than float64."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor) and each.is_floating_point() and each.dtype != torch.float64:
                self.found.add(str(function))
        return out


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_s_reference_is_float64_throughout(tmp_path, family):
    """Norms, softmax and angles too. It is the model: transformers' own float32 gives the same up to its rounding."""
    families.checkpoint(tmp_path, family)
    tokens = families.random_tokens(20).tolist()
    exact = reference.load(tmp_path)
    with Rounds() as rounds:
        inner = exact(torch.tensor([tokens]), use_cache=False).logits
    assert inner.dtype == torch.float64
    if family != "falcon_alibi":  # its bias is bfloat16 whatever the model's type, and the same on every PC
        assert not rounds.found
    attention = refusals.attention(exact.config.to_dict())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=attention).eval()
    found = reference.trace(exact, tokens, new=8)
    scores, states = reference.whole(plain, found.tokens.tolist())
    pairs = [(found.logits, scores), *((x, states[name]) for name, x in found.states.items())]
    for got, wanted in pairs:
        assert got.dtype == np.float32 and np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted)
    assert found.tokens.tolist() == reference.trace(plain, tokens, new=8).tokens.tolist()


def test_doubled_weights_alone_are_not_float64_throughout(tmp_path):
    families.checkpoint(tmp_path, "llama")
    doubled = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    with Rounds() as rounds, torch.no_grad():
        doubled(torch.tensor([[5, 6, 7]]), use_cache=False)
    assert rounds.found


def test_frequencies_are_worked_out_in_float64_and_rounded_once(model):
    exact = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    assert model.model.rotary_emb.inv_freq.tolist() == exact.astype(np.float32).tolist()


def test_the_default_type_is_left_alone(model):
    reference.trace(model, PROMPT)
    assert torch.get_default_dtype() == torch.float32 and torch.zeros(1).float().dtype == torch.float32
