"""Layers that keep replaced states (lfm2's short convolutions, qwen3_5_text's delta rules) from trace to artifact."""

import dataclasses
import json

import families
import graphs
import numpy as np
import pytest
import torch
from graphs import STRATEGIES, Graph, Model, worst
from kvgate import contract as c
from kvgate.checkpoint import reference, refusals
from kvgate.jobs.record import Blocked
from kvgate.judging import compare
from kvgate.observe import Trace, observe
from kvgate.prepare import mixers, surgery

CAPACITY, PROMPT, LAYERS = 8, [5, 60, 23], 3
TOLERANCE = 1e-4
FAMILIES = sorted(families.REPLACED)
KINDS = {"lfm2": ("convolution",), "qwen3_5_text": ("convolution", "recurrent")}
HISTORIES = ["isolated", "forced", "free"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> Model:
    return Model.of(tmp_path_factory.mktemp(request.param), request.param, layers=LAYERS)


@pytest.fixture(scope="module")
def trace(model) -> Trace:
    """A generation whose tokens fill the cache: positions 0..7 are fed."""
    return families.generation(model.checkpoint, PROMPT, CAPACITY - len(PROMPT) + 1)


@pytest.fixture(scope="module", params=STRATEGIES)
def graph(request, model) -> Graph:
    return model.export(request.param, capacity=CAPACITY)


def kinds(model: Model) -> tuple[str, ...]:
    return KINDS[model.name]


def findings(graph: Graph, host, trace: Trace) -> list[dict]:
    """What the check finds, the first place first."""
    return compare.differences(graph.contract, trace, observe(graph.engine, host, trace, HISTORIES), TOLERANCE)[1]


# The reference


def test_the_reference_s_states_are_those_of_the_library_s_own_decoding(model, trace):
    """Whole prefixes against the library token by token with its own cache, after every token."""
    from transformers import DynamicCache

    loaded = reference.load(model.checkpoint)
    cache = DynamicCache(config=loaded.config)
    assert trace.at.tolist() == list(range(len(trace.tokens)))
    assert set(trace.replaced) == {f"layers.{i}.{kind}" for i in range(LAYERS - 1) for kind in kinds(model)}
    assert set(trace.states) == {f"layers.{LAYERS - 1}.key", f"layers.{LAYERS - 1}.value"}
    for position, token in enumerate(trace.tokens):
        with torch.inference_mode():
            loaded(torch.tensor([[token]]), cache=cache, use_cache=True)
        for name, rows in trace.replaced.items():
            _, layer, kind = name.split(".")
            own = cache.layers[int(layer)]
            found = own.conv_states[0][..., 1:] if kind == c.CONVOLUTION else own.recurrent_states[0]
            wanted = found.numpy()
            assert rows[position].shape == wanted.shape
            assert np.linalg.norm(rows[position] - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_a_long_text_s_states_are_known_at_positions_spread_over_it():
    assert reference.kept_positions(64) == list(range(64))
    at = reference.kept_positions(1000)
    assert at[:3] == [0, 66, 67] and at[-2:] == [998, 999] and len(at) == 31
    texts = Trace(np.zeros(1000, np.int64), 1000, False, (), {}, None, {"x": np.zeros((31, 1))}, np.array(at))
    assert len(texts.steps(1000)) == 16 and texts.steps(1000)[0] == 0 and texts.steps(1000)[-1] == 999


def test_a_calibration_text_has_no_replaced_states(model):
    found = reference.trace(reference.load(model.checkpoint), PROMPT, logits=False)
    assert not found.replaced and found.states


def test_a_trace_is_saved_whole(trace, tmp_path):
    trace.save(str(tmp_path / "trace.npz"))
    again = Trace.load(str(tmp_path / "trace.npz"))
    assert again.at.tolist() == trace.at.tolist() and set(again.replaced) == set(trace.replaced)


# The graph


def test_it_generates_as_the_reference(model, graph, trace):
    """First token to last slot in each history, every state at every position, the whole generation."""
    boundary = graph.contract
    assert [x.mask for x in boundary.layers] == [None] * (LAYERS - 1) + [0]
    assert {x.name for x in boundary.states} == set(trace.states) | set(trace.replaced)
    found = observe(graph.engine, graph.host(), trace, HISTORIES)
    for history in ("isolated", "forced"):
        assert found[f"{history}/positions"].tolist() == list(range(CAPACITY))
        assert max(worst(found, trace, history)) < TOLERANCE
        assert not found[f"{history}/disturbed"].any()
        for name, rows in trace.replaced.items():
            assert len(found[f"{history}/{name}"]) == CAPACITY
            for got, want in zip(found[f"{history}/{name}"], rows, strict=False):
                assert graphs.relative(got, want) < TOLERANCE
    assert found["free/diverged"] == -1 and found["free/tokens"].tolist() == trace.tokens[len(PROMPT) :].tolist()
    facts, said = compare.differences(boundary, trace, found, TOLERANCE)
    assert said == [] and 0 < facts["state_l2"] < TOLERANCE


def test_the_reference_s_tokens_are_transformers_generate_s(model, trace):
    """Another way to the same tokens: the library's own generation over its own cache."""
    loaded = reference.load(model.checkpoint)
    ids = torch.tensor([PROMPT])
    made = loaded.generate(ids, max_new_tokens=len(trace.tokens) - len(PROMPT), do_sample=False, eos_token_id=None)
    assert made[0].tolist() == trace.tokens.tolist()


@pytest.mark.parametrize("packing,layout,rank", [("layer", "rows", 3), ("model", "rows", 4), ("model", "channels", 3)])
def test_k_and_v_may_be_packed_beside_them(model, trace, packing, layout, rank):
    graph = model.export("cpu_managed", "plain", CAPACITY, packing=packing, layout=layout, rank=rank)
    assert graph.contract.form == "plain"
    assert findings(graph, graph.host(), trace) == []


def test_garbage_in_unused_slots_changes_nothing(graph, trace):
    """A state that is replaced has no unused slots: it begins as zeros."""
    host = graph.host()

    def run(garbage: float) -> list[np.ndarray]:
        host.reset(garbage)
        return [host.take(graph.engine.step(host.feeds([int(t)]))).logits for t in trace.tokens[:CAPACITY]]

    for got, clean in zip(run(1e3), run(0.0), strict=True):
        np.testing.assert_array_equal(got, clean)


def test_attention_is_the_recipe_s_its_gate_too(model):
    found = {form: model.prepare(form) for form in ("recipe", "plain")}
    for form, body in found.items():
        assert body["form"] == form and body["error"] < 1e-6
        gates = [x for x in body["tensors"] if x.endswith("self_attn.gate")]
        assert len(gates) == (form == "recipe" and model.name == "qwen3_5_text")


def test_a_gate_that_is_another_is_plain_and_says_so(tmp_path, monkeypatch):
    """With a bias: not a sigmoid of a product."""
    biased = dataclasses.replace(families.REPLACED["qwen3_5_text"], config={"attention_bias": True})
    monkeypatch.setitem(families.REPLACED, "qwen3_5_text", biased)
    model = Model.of(tmp_path, "qwen3_5_text")
    body = model.prepare("recipe")
    assert (body["form"], body["reason"]) == (
        "plain",
        "model.layers.1.self_attn: its output reads the hidden states, and not as a sigmoid of a product",
    )
    graph, trace = model.export("cpu_managed", capacity=CAPACITY), model.text(CAPACITY)
    assert findings(graph, graph.host(), trace) == []


@pytest.mark.parametrize("form", ["recipe", "plain"])
def test_heads_may_have_keys_of_their_own(tmp_path, monkeypatch, form):
    """As in the smallest Qwen3.5: a key head a head."""
    own = dataclasses.replace(families.REPLACED["qwen3_5_text"], config={"linear_num_key_heads": 4})
    monkeypatch.setitem(families.REPLACED, "qwen3_5_text", own)
    model = Model.of(tmp_path, "qwen3_5_text")
    graph, trace = model.export("fixed_max_blend", form, CAPACITY), model.text(CAPACITY)
    assert findings(graph, graph.host(), trace) == []


# The wrong ways


class NotTakenOver:
    """A replaced state stays what it was."""

    def take(self, outputs):
        kept = {x: view.copy() for x, view in self.views.items() if not self.states[x].appended}
        step = super().take(outputs)
        for name, old in kept.items():
            self.views[name][...] = old
        return step


class Swapped:
    """Two layers' states change places after every step."""

    def take(self, outputs):
        step = super().take(outputs)
        for name, view in self.views.items():
            if name.startswith("layers.0."):
                other = self.views[name.replace("layers.0", "layers.1")]
                view[...], other[...] = other.copy(), view.copy()
        return step


class Shifted:
    """A convolution's inputs stand one place further on."""

    def take(self, outputs):
        step = super().take(outputs)
        for name, view in self.views.items():
            if self.states[name].kind == c.CONVOLUTION:
                view[...] = np.roll(view, 1, axis=-1)
        return step


class NotReset:
    """What a prompt leaves is there when the next one begins."""

    def reset(self, garbage=0.0):
        kept = {x: view.copy() for x, view in self.views.items() if not self.states[x].appended}
        super().reset(garbage)
        for name, old in kept.items():
            self.views[name][...] = old


@pytest.mark.parametrize("wrong", [NotTakenOver, Swapped, Shifted])
def test_a_host_that_is_wrong_is_seen_where_it_is_wrong(model, trace, wrong):
    """In the first layer: the isolated steps hold, each is fed the reference's states. With a window of three the first
    layer's own inputs are right whatever the state: what is seen first is what it gives, or its next state."""
    graph = model.export("cpu_managed", capacity=CAPACITY)
    found = findings(graph, graph.host(wrong), trace)
    states = [x for x in found if x.get("gate") == "state_l2"]
    assert states and states[0]["state"] == "layers.0.convolution" and states[0]["history"] == "forced"
    assert f"forced: state_l2 {states[0]['value']} at layer 0 convolution, position" in states[0]["text"]
    assert not any(x.get("history") == "isolated" for x in found)
    assert states[0] == found[0]


def test_only_a_recurrent_state_that_is_not_taken_over_is_named(model, trace):
    if "recurrent" not in kinds(model):
        return

    class Lost(NotTakenOver):
        def take(self, outputs):
            kept = self.views["layers.1.recurrent"].copy()
            step = super(NotTakenOver, self).take(outputs)
            self.views["layers.1.recurrent"][...] = kept
            return step

    graph = model.export("cpu_managed", capacity=CAPACITY)
    first = findings(graph, graph.host(Lost), trace)[0]
    assert (first["state"], first["position"]) == ("layers.1.recurrent", 1)


def test_a_state_that_is_not_reset_is_seen_from_the_second_prompt_on(model, trace):
    graph = model.export("cpu_managed", capacity=CAPACITY)
    host = graph.host(NotReset)
    findings(graph, host, trace)
    first = findings(graph, host, trace)[0]
    assert (first["state"], first["position"]) == ("layers.0.convolution", 0)


def test_a_decay_that_is_applied_twice_is_named_by_the_check_and_by_preparing(tmp_path, monkeypatch):
    """The graph alone is wrong, and the model that the graph is made of."""
    model = Model.of(tmp_path, "qwen3_5_text", layers=LAYERS)
    trace = model.text(CAPACITY)
    model.prepare("recipe")
    right = mixers.made

    def twice(layer, step, tensors):
        made = right(layer, step, tensors)
        forward = made.forward

        def wrong(*args, **kwargs):
            before = made.step.before
            made.step.before = lambda index, kind: before(index, kind) * (0.5 if kind == c.RECURRENT else 1)
            try:
                return forward(*args, **kwargs)
            finally:
                made.step.before = before

        made.forward = wrong
        return made

    monkeypatch.setattr(surgery.mixers, "made", twice)
    graph = model.export("cpu_managed", capacity=CAPACITY)
    first = findings(graph, graph.host(), trace)[0]
    assert (first["state"], first["position"], first["history"]) == ("layers.0.recurrent", 1, "isolated")
    other = Model.of(tmp_path / "other", "qwen3_5_text", layers=LAYERS)
    with pytest.raises(Blocked, match=r"first in the recurrent state of model\.layers\.0\.linear_attn, allowed: 1e-05"):
        other.prepare("recipe")


# Refusals


def test_other_layers_stay_refused_by_name(model):
    config = json.loads((model.checkpoint / "config.json").read_text())
    assert refusals.refusal(config) is None
    other = refusals.refusal(config | {"layer_types": ["mamba2", *config["layer_types"][1:]]})
    assert other == (
        f"model type '{model.name}': layers of type 'mamba2', allowed: "
        + ", ".join((*refusals.ATTENTION, *refusals.REPLACED[model.name]))
    )
    known = refusals.refusal({"model_type": "qwen3_next"})
    assert known is not None and "layers with a recurrent state" in known and "lfm2 and qwen3_5_text" in known
    assert refusals.refusal({"model_type": "llama", "layer_types": ["conv"]}) is not None


def test_a_module_whose_state_nothing_keeps_is_refused_by_name(tmp_path, monkeypatch):
    model = Model.of(tmp_path, "lfm2", layers=LAYERS)
    monkeypatch.delitem(mixers._READ, "Lfm2ShortConv")
    with pytest.raises(Blocked, match=r"model\.layers\.0\.conv: a state kept by Lfm2ShortConv, allowed: Qwen3_5Gated"):
        model.prepare("recipe")


def test_what_cannot_work_on_them_is_refused_in_one_line(model, trace):
    with pytest.raises(Blocked, match=r"preparation vrot: got model\.layers\.0\.\w+, which caches no K and V"):
        model.prepare("recipe", "vrot")
    with pytest.raises(Blocked, match=f"model type '{model.name}': layers with states that are replaced, allowed: att"):
        model.export("hf_export", "exporter", CAPACITY)
    quant = {"calibrate": True, "config": {"quantized_dtype": "w8a8"}}
    with pytest.raises(
        Blocked, match=r"calibration: got the replaced state layers\.0\.convolution, allowed: a quant wi"
    ):
        model.build(model.export("cpu_managed", capacity=CAPACITY), None, quant=quant, calibration=[trace])


# The compiler

# Most rows of the compiler's table a layer with replaced states, at 4 against 3 layers.
ROWS = {"lfm2": 17, "qwen3_5_text": 46}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_built_for_the_npu(tmp_path, family):
    """No operator on the CPU, and the simulator's steps are float16's distance from the reference."""
    rows = {}
    for layers in (3, 4):
        model = Model.of(tmp_path / str(layers), family, families.TOOLKIT, layers=layers)
        trace = model.text(48)
        graph = model.export("cpu_managed", capacity=48)
        body = model.build(graph, trace, isolated=16)
        assert body["cpu_operators"] == {} and not any(x.startswith("F32") for x in body["risks"])
        rows[layers] = body["rows"]
        found, _ = compare.compare(graph.contract, trace, body["observed"])
        figures = found["histories"]["isolated"]
        assert 0 < figures["replaced"]["median"] < 2e-3 and figures["replaced"]["worst"]["value"] < 1e-2
        assert 0 < figures["kv"]["worst"]["value"] < 1e-2 and figures["logits"]["centred"]["worst"]["value"] < 1e-2
    assert rows[4] - rows[3] <= ROWS[family]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [3, 4])
def test_what_the_compiler_loses_is_named(tmp_path, monkeypatch, rank):
    """The outer product as a MatMul over one channel: ONNX Runtime is right, the artifact forgets what was there."""

    def written(state, key, delta):
        if rank == 4:
            return state + key.transpose(2, 3) @ delta
        return (state[0] + key.transpose(2, 3)[0] @ delta[0])[None]

    monkeypatch.setattr(mixers, "_written", written)
    model = Model.of(tmp_path, "qwen3_5_text", layers=LAYERS)
    trace = model.text(24)
    graph = model.export("cpu_managed", capacity=24)
    assert findings(graph, graph.host(), trace) == []
    body = model.build(graph, trace, isolated=8)
    assert any(x.startswith("F32 MatMul") for x in body["risks"])
    first = compare.differences(graph.contract, trace, body["observed"], 0.05)[1][0]
    assert first["state"] == "layers.0.recurrent" and first["position"] > 0 and first["value"] > 0.1
