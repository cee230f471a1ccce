"""Every strategy, layout, rank and packing as a real graph in ONNX Runtime against the reference; the wrong ways."""

import itertools
import json

import families
import graphs
import numpy as np
import onnx
import pytest
import standin
from graphs import STRATEGIES, Graph, Model, worst
from kvgate import contract as c
from kvgate.jobs import record
from kvgate.observe import Trace, observe

CAPACITY, PROMPT = 8, [5, 60, 23]
TOLERANCE = 1e-4  # the check's own gate; what is measured is about 1e-6
BOUNDARIES = list(itertools.product(c.LAYOUTS, c.RANKS, c.PACKINGS))
# The plain form takes longer to export; each value of each axis once or twice is enough.
SOME = [("channels", 4, "apart"), ("rows", 4, "model"), ("rows", 3, "apart"), ("channels", 3, "layer")]
FORMS = [*(("recipe", *x) for x in BOUNDARIES), *(("plain", *x) for x in SOME)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Model.of(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def trace(llama) -> Trace:
    """A generation whose tokens fill the cache: positions 0..7 are fed."""
    return families.generation(llama.checkpoint, PROMPT, CAPACITY - len(PROMPT) + 1)


@pytest.fixture(scope="module", params=STRATEGIES)
def graph(request, llama) -> Graph:
    return llama.export(request.param, capacity=CAPACITY)


@pytest.mark.parametrize("boundary", FORMS, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("module", STRATEGIES)
def test_every_boundary_generates_as_the_reference(llama, trace, module, boundary):
    """From the empty cache to the last slot in each history; every slot a step should not touch is as fed."""
    form, layout, rank, packing = boundary
    graph = llama.export(module, form, CAPACITY, layout=layout, rank=rank, packing=packing)
    assert graph.contract.form == form
    host = graph.host()
    found = observe(graph.engine, host, trace, ["isolated", "forced", "free"])
    for history in ("isolated", "forced"):
        assert found[f"{history}/positions"].tolist() == list(range(CAPACITY))
        assert max(worst(found, trace, history)) < TOLERANCE
        assert not found[f"{history}/disturbed"].any()
    assert found["free/diverged"] == -1 and found["free/tokens"].tolist() == trace.tokens[len(PROMPT) :].tolist()
    with pytest.raises(ValueError, match="cache full: got position 8, allowed: 0 to 7"):
        host.feeds([1])


def test_garbage_in_unused_slots_changes_nothing(graph, trace):
    host = graph.host()

    def run(garbage: float) -> list[np.ndarray]:
        host.reset(garbage)
        return [host.take(graph.engine.step(host.feeds([int(t)]))).logits for t in trace.tokens[:CAPACITY]]

    for got, clean in zip(run(1e3), run(0.0), strict=True):
        np.testing.assert_array_equal(got, clean)


def test_garbage_would_be_seen(graph, trace):
    """The same with a mask that is too small to hide it."""
    host = graph.host(mask_value=-1.0)
    host.reset(1e3)
    step = host.take(graph.engine.step(host.feeds([int(trace.tokens[0])])))
    assert graphs.relative(step.logits, trace.logits[0]) > 0.1


def test_prompts_do_not_leak(graph, llama, trace):
    """Three prompts in one host, each the bits that it gives in a host of its own."""
    others = [families.random_tokens(CAPACITY, seed=s) for s in (2, 3)]
    host = graph.host()

    def run(host, tokens) -> np.ndarray:
        host.reset()
        return np.stack([host.take(graph.engine.step(host.feeds([int(t)]))).logits for t in tokens])

    for tokens in (trace.tokens[:CAPACITY], *others, trace.tokens[:CAPACITY]):
        np.testing.assert_array_equal(run(host, tokens), run(graph.host(), tokens))
    assert not np.array_equal(run(host, others[0]), run(host, others[1]))


def test_chunks_do_not_matter(graph, trace):
    """A cache filled from the trace, or stepped to the same place, gives the same next steps."""
    for start in (1, 4, 7):
        host = graph.host()
        host.fill(trace.tokens.tolist(), trace.states, start)
        for position in range(start, CAPACITY):
            step = host.take(graph.engine.step(host.feeds([int(trace.tokens[position])])))
            assert graphs.relative(step.logits, trace.logits[position]) < TOLERANCE


def test_integers_through_the_cache(llama):
    """Every slot but the one written comes back bit for bit: slots, heads, channels, layers, K and V told apart."""
    for module, boundary in itertools.product(STRATEGIES, BOUNDARIES):
        graph = llama.export(
            module, "recipe", CAPACITY, **dict(zip(("layout", "rank", "packing"), boundary, strict=True))
        )
        host = graph.host()
        host.reset()
        for length in (0, 3, CAPACITY - 1):
            for i, (key, value) in enumerate(standin.pairs(host.views)):
                s, h, d = np.ogrid[: key.shape[0], : key.shape[1], : key.shape[2]]
                key[...] = s + 10 * h + 100 * d + 4000 * i
                value[...] = key + 0.5
            host.length = length
            kept = {name: slots.copy() for name, slots in host.views.items()}
            step = host.take(graph.engine.step(host.feeds([7])))
            assert step.disturbed == 0
            for name, own in step.states.items():
                kept[name][length] = own
                np.testing.assert_array_equal(host.views[name], kept[name])


# The wrong ways


class OffByOne:
    """The mask hides the newest slot of the history."""

    def columns(self):
        seen = super().columns()
        seen[max(self.length - 1, 0)] = -1
        return seen


class Shuffled:
    """Two slots change places after every step."""

    def take(self, outputs):
        step = super().take(outputs)
        for slots in self.views.values():
            slots[[0, 1]] = slots[[1, 0]]
        return step


class KeysAreValues:
    """The K and the V input of every layer are swapped: equal shapes, so nothing refuses it (F5)."""

    def feeds(self, tokens):
        fed = super().feeds(tokens)
        for i in range(len(self.contract.layers)):
            fed[f"key.{i}"], fed[f"value.{i}"] = fed[f"value.{i}"], fed[f"key.{i}"]
        return fed


class LayersSwapped:
    """k0, v0, k1, v1 against k0, k1, v0, v1 and the like: layer 0's tensors go to layer 1 (F18)."""

    def feeds(self, tokens):
        fed = super().feeds(tokens)
        for role in ("key", "value"):
            fed[f"{role}.0"], fed[f"{role}.1"] = fed[f"{role}.1"], fed[f"{role}.0"]
        return fed


class BakedPosition:
    """The rotation of position 0 whatever the position (F20)."""

    def _rotation(self, index):
        length, self.length = self.length, 0
        matrix = super()._rotation(index)
        self.length = length
        return matrix


class IgnoresThePast:
    """A mask that sees the own token only (F19): right at the first step, wrong from the second on."""

    def columns(self):
        seen = super().columns()
        seen[seen < self.length] = -1
        return seen


WRONG = (OffByOne, Shuffled, KeysAreValues, LayersSwapped, BakedPosition, IgnoresThePast)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda x: x.__name__)
def test_the_wrong_ways_fail(graph, trace, wrong):
    """Each is seen by both histories, and none of them at the first token: one step proves nothing."""
    host = graph.host(wrong)
    for history in ("isolated", "forced"):
        found = observe(graph.engine, host, trace, [history])
        if wrong is Shuffled and history == "isolated":
            continue  # isolated steps are fed the reference's cache: nothing to shuffle
        assert max(worst(found, trace, history)) > 100 * TOLERANCE
        if wrong is not OffByOne:
            assert graphs.relative(found[f"{history}/logits"][0], trace.logits[0]) < TOLERANCE


def test_a_graph_with_a_baked_input_is_seen(llama, trace, tmp_path):
    """A traced graph whose position, mask or slot became a constant runs, and differs (F20)."""
    for module, name in itertools.product(STRATEGIES, ("rotation.0", "mask.0", "slot", "write", "key.0")):
        graph = llama.export(module, capacity=CAPACITY)
        if name not in {t.name for t in graph.contract.inputs}:
            continue
        host = graph.host()
        host.fill(trace.tokens.tolist(), trace.states, 2)
        frozen = host.feeds([int(trace.tokens[2])])[name].copy()

        class Frozen:
            def feeds(self, tokens, name=name, frozen=frozen):
                return super().feeds(tokens) | {name: frozen}

        found = observe(graph.engine, graph.host(Frozen), trace, ["isolated"])
        errors = [graphs.relative(x, trace.logits[p]) for p, x in enumerate(found["isolated/logits"])]
        errors = [max(e, d) for e, d in zip(errors, found["isolated/disturbed"], strict=True)]
        assert errors[2] < TOLERANCE and max(errors) > 100 * TOLERANCE, (module, name, errors)


# What the graph is


def test_every_declared_tensor_is_in_the_graph_and_used(graph):
    """Names, order, shapes, dtypes of the contract are the graph's; an input that nothing uses would vanish (F30)."""
    model = onnx.load(graph.folder / "model.onnx", load_external_data=False)
    dtype = onnx.helper.tensor_dtype_to_np_dtype
    for declared, values in ((graph.contract.inputs, model.graph.input), (graph.contract.outputs, model.graph.output)):
        assert [(t.name, t.shape, t.dtype) for t in declared] == [
            (
                v.name,
                tuple(d.dim_value for d in v.type.tensor_type.shape.dim),
                str(np.dtype(dtype(v.type.tensor_type.elem_type))),
            )
            for v in values
        ]
    used = {name for node in model.graph.node for name in node.input}
    made = {name for node in model.graph.node for name in node.output}
    assert {t.name for t in graph.contract.inputs} <= used
    assert {t.name for t in graph.contract.outputs} <= made
    assert 11 <= model.opset_import[0].version <= 19


def test_operators_are_what_the_strategy_says(llama):
    """No scatter and no concatenation of slots where the strategy denies them; no angles are made in the graph."""
    found = {}
    for module in STRATEGIES:
        model = onnx.load(llama.export(module, capacity=CAPACITY).folder / "model.onnx", load_external_data=False)
        found[module] = {node.op_type for node in model.graph.node}
        assert not found[module] & {"Sin", "Cos", "Range", "NonZero", "Gather", "TopK", "ArgMax"}
    assert "ScatterND" in found["fixed_max_scatter"] and "Where" in found["fixed_max_blend"]
    for module in ("dynamic_concat", "cpu_managed", "fixed_max_blend"):
        assert not found[module] & {"ScatterND", "ScatterElements"}
    assert "Concat" not in found["fixed_max_blend"]


def test_files_are_what_the_record_says(graph):
    for name, digest in graph.record["files"].items():
        assert record.sha256(graph.folder / name) == digest
    assert graph.contract.host_sha256 == graph.record["files"]["host.npz"]
    assert graph.contract.digest == graph.record["contract"]
    assert c.Contract.from_json(graph.contract.to_json()) == graph.contract
    made = onnx.load(str(graph.folder / "model.onnx"), load_external_data=False)
    places = {x.value for t in made.graph.initializer for x in t.external_data if x.key == "location"}
    assert places == {"weights.bin"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["cache"].update(rank=5), r"contract: cache\.rank: got 5, known: 3, 4"),
        (
            lambda raw: raw["cache"].update(layout="columns"),
            "contract: cache.layout: got 'columns', known: rows, channels",
        ),
        (lambda raw: raw["inputs"][-1]["shape"].append(1), r"contract: value\.1: got shape \[.*\], allowed: rank 4"),
        (lambda raw: raw["outputs"][-1]["shape"].pop(), r"contract: value\.1\S*: got shape \[.*\], allowed: rank 4"),
        (lambda raw: raw.update(version=1), r"contract version: got 1, known: 2 \(make .* again .*; kvgate 0\.1 wrote"),
        (lambda raw: raw.update(version=3), r"contract version: got 3, known: 2 \(make .* again with this kvgate\)$"),
        (lambda raw: raw["states"][0].update(kind="latent"), r"layers\.0\.key\.kind: got 'latent', known: key, value,"),
        (lambda raw: raw["states"][0].update(rule="ring"), r"layers\.0\.key\.rule: got 'ring', known: append, replace"),
        (lambda raw: raw["inputs"][-1].update(states=[]), r"contract: value\.1: got no state"),
        (lambda raw: raw["outputs"][-1].update(states=["layers.9.value"]), r"got the unknown state 'layers\.9\.value'"),
        (
            lambda raw: (
                raw["states"][-1].update(rule="replace"),
                raw["inputs"][-1].update(shape=[1, 2, 3, 4]),
            ),
            r"contract: value\.1: got 24 elements, allowed: \d+$",
        ),
    ],
)
def test_a_contract_that_is_none_is_one_line(llama, change, said):
    raw = json.loads(llama.export("cpu_managed", capacity=CAPACITY).contract.to_json())
    change(raw)
    with pytest.raises(ValueError, match=said):
        c.Contract.from_json(json.dumps(raw))


def test_one_weight_file_serves_every_strategy(llama):
    """Hard links of one file a form."""
    inodes = {(llama.export(m, capacity=CAPACITY).folder / "weights.bin").stat().st_ino for m in STRATEGIES}
    assert len(inodes) == 1
    assert (llama.export("cpu_managed", "plain", CAPACITY).folder / "weights.bin").stat().st_ino not in inodes
