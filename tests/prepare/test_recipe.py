"""The probe finds what a module computes; the recipe equals it, and a step left out is seen."""

import dataclasses
import re
import types

import families
import pytest
import torch
from kvgate.checkpoint import load
from kvgate.checkpoint.seams import Step
from kvgate.jobs.record import Blocked
from kvgate.prepare import choose_form, equality, measure_attention, norms, surgery, survey


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def operated(family: str):
    """The recipe of a random model: its spec, tensors, the untouched model and its reference."""
    model = families.model(family)
    known = equality.reference(model, survey.survey(load.attach(families.model(family))).position_table)
    load.attach(model)
    spec, tensors = choose_form._recipe(model, survey.survey(model))
    return spec, tensors, model, known


def error(spec, tensors, model, known) -> float:
    changed, step = choose_form._copy(model), Step()
    surgery.operate(changed, spec, step, tensors)
    return equality.error(changed, spec, step, known)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_recipe_is_the_model(family):
    prepared = choose_form.prepare(families.model(family), "recipe")
    assert (prepared.spec.form, prepared.spec.reason) == ("recipe", "")
    assert prepared.error < 5e-6


WITHOUT = {
    "rotation": ("llama", lambda s: layers(s, rotation=None)),
    "the window": ("mistral", lambda s: dataclasses.replace(s, windows=(None,))),
    "the second mask": ("gemma2", lambda s: layers(s, mask=0)),
    "a token of the window": ("mistral", lambda s: dataclasses.replace(s, windows=(4,))),
    "the soft cap": ("gemma2", lambda s: layers(s, softcap=None)),
    "the distance bias": ("bloom", lambda s: layers(s, slopes=())),
    "a head's distance bias": ("bloom", lambda s: layers(s, slopes=s.layers[0].slopes[::-1])),
    "the learned positions": ("gpt2", lambda s: s),
    "the scale of a rounded bias": ("falcon_alibi", lambda s: layers(s, bfloat16=1.0)),
    "the window that a module cuts itself": ("gpt_neo", lambda s: layers(s, mask=0)),
    "the norm after the rotation": ("hunyuan_v1_dense", lambda s: layers(s, late=False)),
    "the norm's epsilon": ("qwen3", lambda s: layers(s, epsilon=(1e-2, 1e-2))),
}


def layers(spec, **changes):
    return dataclasses.replace(spec, layers=tuple(dataclasses.replace(x, **changes) for x in spec.layers))


@pytest.mark.parametrize("step", WITHOUT)
def test_a_step_left_out_is_seen(step):
    """The comparison that accepts a recipe refuses it without one of its steps."""
    family, without = WITHOUT[step]
    spec, tensors, model, known = operated(family)
    assert error(spec, tensors, model, known) < equality.TOLERANCE
    if step == "the learned positions":
        known = dataclasses.replace(known, positions=None)
    assert error(without(spec), tensors, model, known) > 1e-3


@pytest.mark.parametrize("name", ["qkv", "bias", "norm", "out"])
def test_a_wrong_tensor_is_seen(name):
    spec, tensors, model, known = operated("qwen3" if name == "norm" else "qwen2")
    key = next(k for k in tensors if k.endswith(f".{name}"))
    tensors[key] = tensors[key].roll(1, -1 if name != "norm" else 1)
    assert error(spec, tensors, model, known) > 1e-3


def rotation(family: str):
    return operated(family)[0].rotations


def test_rotations_are_found_by_their_effect():
    half = 8
    (llama,) = rotation("llama")
    assert llama.turn == (*range(half, 16), *range(half)) and llama.sign == (-1,) * half + (1,) * half
    (cohere,) = rotation("cohere")  # interleaved
    assert cohere.turn == tuple(i ^ 1 for i in range(16)) and cohere.sign == (-1, 1) * half
    (phi,) = rotation("phi")  # half of the channels pass
    assert phi.cosine[half:] == (-1,) * half and phi.turn[half:] == tuple(range(half, 16)) and max(phi.cosine) < half
    assert len(rotation("gemma3_text")) == 2  # local and global angles
    assert rotation("gpt2") == ()
    assert {x.rotation for x in operated("smollm3")[0].layers} == {0, None}


def test_norms_are_told_by_what_they_compute():
    kinds = {f: {x.norm for x in operated(f)[0].layers} for f in ("llama", "qwen3", "gemma3_text", "olmo2")}
    assert kinds == {"llama": {""}, "qwen3": {"head"}, "gemma3_text": {"head"}, "olmo2": {"all"}}
    late = {f: {x.late for x in operated(f)[0].layers} for f in ("qwen3", "hunyuan_v1_dense")}
    assert late == {"qwen3": {False}, "hunyuan_v1_dense": {True}}  # before and after the rotation
    assert {n.kind for n in norms.measure(families.model("cohere"))[0]} == {"layer"}
    gemma = families.model("gemma2")
    found, weights = norms.measure(gemma)
    name = found[0].module
    assert torch.equal(weights[f"{name}.weight"], 1 + gemma.get_submodule(name).weight)  # not the stored weight


@pytest.mark.parametrize("option", ["qk_layernorm", "use_qk_norm"])
def test_layer_norms_of_q_and_k(option):
    """phi and cohere: a LayerNorm over the head, weights per head, a bias in phi."""
    family = {"qk_layernorm": "phi", "use_qk_norm": "cohere"}[option]
    config = families.config(family)
    setattr(config, option, True)
    torch.manual_seed(0)
    model = families.transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if re.search(r"[qk]_(layer)?norm", name):
            parameter.add_(0.3 * torch.randn(parameter.shape))
    prepared = choose_form.prepare(model, "recipe")
    assert prepared.spec.form == "recipe" and prepared.spec.layers[0].norm == "head"


def test_a_large_bias_does_not_round_the_weights_away():
    """qwen2's biases can be thousands of times its weights; the probe's long unit vectors keep the weights whole."""
    model = families.model("qwen2")
    exact = model.model.layers[0].self_attn.k_proj
    exact.bias.add_(1000.0)
    load.attach(model)
    site = survey.survey(model).sites[0]
    bare = measure_attention._Bare(model.get_submodule(site.module), site)
    (_, key, _), (_, bias, _) = measure_attention._affine(bare, site)
    assert torch.equal(bias.flatten(), exact.bias)
    want = exact.weight.t().reshape(key.shape)
    assert (key - want).norm() / want.norm() < 1e-6
    short = bare.seen(torch.eye(bare.width)[None])[1] - bias  # what unit vectors of length 1 would give
    assert (short - want).norm() / want.norm() > 1e-5


class Curved(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        return out + 0.1 * torch.tanh(out)


def curved(family: str, seam: str):
    """A model whose attention is not affine at one seam."""
    model = families.model(family)
    attention = model.model.layers[1].self_attn
    setattr(attention, seam, Curved(getattr(attention, seam)))
    return model


@pytest.mark.parametrize("seam, reason", [("v_proj", "affine in the hidden states"), ("o_proj", "affine in what")])
def test_falls_back_to_plain_and_says_why(seam, reason):
    prepared = choose_form.prepare(curved("llama", seam), "recipe")
    assert prepared.spec.form == "plain" and reason in prepared.spec.reason
    assert prepared.spec.reason.startswith("model.layers.1.self_attn")
    assert prepared.error < equality.TOLERANCE  # the plain form is still the model


def test_plain_can_be_asked_for():
    prepared = choose_form.prepare(families.model("llama"), "plain")
    assert (prepared.spec.form, prepared.spec.reason) == ("plain", "plain was asked for")


def test_a_model_past_the_seams_is_blocked():
    """No attention function is called: nothing of ours would act."""
    model = families.model("llama")
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(Blocked, match="no attention module called the attention function"):
        choose_form.prepare(model, "recipe")


def plain_scores(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
    """As XGLM's and Falcon's own: the cache is called, the attention function is not."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    key, value = (x(hidden_states).view(shape).transpose(1, 2) for x in (self.k_proj, self.v_proj))
    cache.update(key, value, self.layer_idx)
    return hidden_states, None


def broken(self, *args, **kwargs):
    raise KeyError("alibi")


@pytest.mark.parametrize(
    ("forward", "cause"),
    [
        (plain_scores, "caches K and V of layer 1 and does not call the attention function"),
        (broken, ": 'alibi'"),
    ],
)
def test_what_does_not_fit_names_the_module(forward, cause):
    model = families.model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(forward, attention)
    with pytest.raises(Blocked, match=rf"model\.layers\.1\.self_attn \(LlamaAttention\):? ?{cause}"):
        choose_form.prepare(model, "recipe")


def causal(b, h, q, k):
    return k <= q


@pytest.mark.parametrize("window", [1, 5, 4096, 20_000, survey.REACH - 100])
def test_windows_are_read_off_the_predicate(window):
    assert survey.window(causal) is None
    assert survey.window(lambda b, h, q, k: (k <= q) & (k > q - window)) == window


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k // 64 == q // 64,
        lambda b, h, q, k: (k <= q) & (k % 2 == 0),
        lambda b, h, q, k: (k <= q) & (k > q - 20_000 - q % 2),
        lambda b, h, q, k: (k <= q) & (k > q // 4),
    ],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(survey.Unsupported, match="neither causal nor a sliding window"):
        survey.window(mask)
