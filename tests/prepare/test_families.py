"""Every decoder family: the exported graph is the model, in both forms, and compiles as measured before."""

import tempfile
from pathlib import Path

import families
import graphs
import pytest
from graphs import Model, worst
from kvgate.jobs import record
from kvgate.observe import observe

CAPACITY = 8
TOLERANCE = 1e-4

# Most rows of the compiler's table a layer, at 4 against 2 layers: the figures of recipe A on rk3576, fp16.
# bloom adds a distance bias to each head's scores and has no figure of before: that is what it takes.
ROWS = {
    "llama": 19,
    "llama_g1": 19,
    "llama_g8": 18,
    "mistral": 19,
    "qwen2": 19,
    "qwen3": 21,
    "smollm3": 18,
    "gpt2": 17,
    "opt": 16,
    "phi": 19,
    "phi3": 19,
    "gemma2": 30,
    "gemma3_text": 25,
    "granite": 19,
    "olmo2": 26,
    "cohere": 18,
    "gpt_neox": 19,
    "falcon": 19,
    "starcoder2": 19,
    "glm4": 23,
    "exaone4": 22.5,
    "bloom": 25,
    "mpt": 17,
    "falcon_alibi": 20,
    "xglm": 17,
    "gpt_neo": 17,
    "ctrl": 16,
    "apertus": 37,
    "hunyuan_v1_dense": 21,
}
# What the NPU has no operator for: xIELU's exponential, and a position that is taken from a row of slots.
ON_CPU = {"apertus": {"Exp": 4, "Min": 4}, "falcon_alibi": {"Sub": 1}}
SLIDING = {"mistral": (5,), "phi3": (5,), "starcoder2": (5,)}
SLIDING |= dict.fromkeys(("gemma2", "gemma3_text", "exaone4", "gpt_neo"), (None, 5))
PARALLEL = {"gpt_neox", "falcon", "phi", "cohere"}
ALIBI = {"bloom", "mpt", "falcon_alibi"}
NO_ROTARY = {"gpt2", "opt", "xglm", "gpt_neo", "ctrl", *ALIBI}


@pytest.mark.parametrize("form", ["recipe", "plain"])
@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_the_graph_is_the_model(tmp_path, family, form):
    """Tokens of the whole capacity against whole-prefix recomputation; each family's own masks and rotations."""
    model = Model.of(tmp_path, family)
    trace = model.text(CAPACITY + 1)
    graph = model.export("cpu_managed", form, CAPACITY)
    assert (graph.contract.form, graph.record["form"]) == (form, form)
    assert bool(graph.contract.reason) == (form == "plain")
    found = observe(graph.engine, graph.host(), trace, ["isolated", "forced"])
    assert len(found["forced/positions"]) == CAPACITY
    assert max(worst(found, trace, "isolated") + worst(found, trace, "forced")) < TOLERANCE
    assert graph.contract.windows == SLIDING.get(family, (None,))
    rotations = {x.rotation for x in graph.contract.layers}
    if family in NO_ROTARY:
        assert rotations == {None} and ("position" in graph.tables) == (family not in ALIBI)
    elif form == "recipe" and family in ("smollm3", "exaone4"):
        assert None in rotations and 0 in rotations  # found by itself: every second layer has no rotary embedding
    else:
        assert 0 in rotations


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_a_compensated_stream_is_the_same_function(tmp_path, family):
    """Every family has two sums a layer in its stream, and with what they lose kept beside it it is still the model."""
    model = Model.of(tmp_path, family)
    trace = model.text(CAPACITY + 1)
    graph = model.export("cpu_managed", capacity=CAPACITY, steps=["compensate"])
    assert graph.record["sums"] == 4
    found = observe(graph.engine, graph.host(), trace, ["forced"])
    assert max(worst(found, trace, "forced")) < TOLERANCE
    plain = model.export("cpu_managed", capacity=CAPACITY)
    # Nobody reads the stream between the sums of a parallel block.
    assert plain.record["sums"] == 0
    assert graph.record["nodes"] - plain.record["nodes"] == (10 if family in PARALLEL else 12)


@pytest.mark.parametrize("family", sorted(SLIDING))
def test_a_window_that_is_ignored_is_seen(tmp_path, family):
    """The same run with full masks: the window of these models matters at this length."""

    class Full:
        def _feed(self, t, token):
            return super()._feed(t, token) if t.role != "mask" else self._full(t)

        def _full(self, t):
            from kvgate.strategies.host import additive_mask

            return additive_mask(self.positions(), self.columns(), None, self.mask_value).reshape(t.shape)

    model = Model.of(tmp_path, family)
    trace = model.text(CAPACITY + 1)
    graph = model.export("cpu_managed", capacity=CAPACITY)
    assert max(worst(observe(graph.engine, graph.host(Full), trace, ["isolated"]), trace, "isolated")) > 1e-2


def test_a_soft_cap_that_is_ignored_would_be_seen(tmp_path):
    """The random gemma2's scores are large enough for its cap to matter."""
    model = Model.of(tmp_path, "gemma2")
    capped = model.text(CAPACITY)
    config = record.read(model.checkpoint / "config.json")
    record.write(model.checkpoint / "config.json", config | {"attn_logit_softcapping": None})
    assert graphs.relative(model.text(CAPACITY).logits, capped.logits) > 1e-2


def test_a_window_beyond_the_capacity_is_no_window(tmp_path):
    model = Model.of(tmp_path, "gemma2")
    assert model.export("cpu_managed", capacity=5).contract.windows == (None,)
    assert model.export("cpu_managed", capacity=6).contract.windows == (None, 5)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2", "falcon", "gpt2", "bloom"])
@pytest.mark.parametrize("module", graphs.STRATEGIES)
def test_other_strategies_take_odd_families(tmp_path, family, module):
    """Two masks and rotations; a norm over all heads; repeated KV heads; learned positions; a bias."""
    model = Model.of(tmp_path, family)
    trace = model.text(CAPACITY + 1)
    graph = model.export(module, capacity=CAPACITY, packing="model", rank=3)
    found = observe(graph.engine, graph.host(), trace, ["forced"])
    assert max(worst(found, trace, "forced")) < TOLERANCE and not found["forced/disturbed"].any()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_it_compiles_as_measured(family):
    """rk3576, fp16: every declared input and output is there, in order (a gate of the build), the simulator agrees
    with ONNX Runtime, nothing runs on the CPU, attention is fused, and a layer takes no more rows than before."""
    with tempfile.TemporaryDirectory() as folder:
        rows = {}
        for layers in (2, 4):
            model = Model.of(Path(folder) / str(layers), family, families.TOOLKIT, layers)
            trace = model.text(65)
            graph = model.export("cpu_managed", capacity=64)
            assert graph.contract.form == "recipe"
            built = model.build(graph, trace if layers == 4 else None)
            rows[layers] = built["rows"]
        assert [x["name"] for x in built["boundary"]["inputs"]] == [t.name for t in graph.contract.inputs]
        assert [x["name"] for x in built["boundary"]["outputs"]] == [t.name for t in graph.contract.outputs]
        assert built["cpu_operators"] == ON_CPU.get(family, {})
        assert built["operators"].get("exSDPAttention@NPU", 0) == (0 if family == "gemma2" else 4)  # gemma2: soft cap
        assert (rows[4] - rows[2]) / 2 <= ROWS[family]
        wanted, got = observe(graph.engine, graph.host(), trace, ["isolated"], isolated=4), built["observed"]
        for name in wanted:
            if name.startswith(("isolated/logits", "isolated/key", "isolated/value")):
                for step, (a, b) in enumerate(zip(got[name], wanted[name], strict=True)):
                    assert graphs.relative(a, b) <= 0.003, (name, step)
