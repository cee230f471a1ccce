"""Public faults that concern the cache, its host half and its boundary: each shown once happening, once not.

The numbers are those of the risks (F1 ...). Faults of the compiler and of artifacts are tested in tests/compiler.
"""

import importlib
import itertools

import families
import graphs
import habits
import numpy as np
import onnx
import pytest
import standin
from graphs import STRATEGIES, Model
from kvgate import contract as c
from kvgate.checkpoint import precise
from kvgate.engines.simulator import Engine as Simulator
from kvgate.observe import observe

CAPACITY = 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Model.of(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def trace(llama):
    return families.generation(llama.checkpoint, [5, 60, 23], CAPACITY - 2)


class Forgetful(habits.Toolkit):
    """The same under an engine that does not say how its arrays lie."""

    def inference(self, inputs, data_format=None):
        return super().inference(inputs)


def test_f1_f2_a_cube_goes_in_as_it_is():
    """A cache whose extents are equal is taken transposed without a word; our engine says what it is."""
    cube = np.arange(3 * 512, dtype=np.float32).reshape(3, 8, 8, 8)
    sides = ((c.Tensor("key.0", c.STATE, cube.shape),), (c.Tensor("y", c.STATE, cube.shape),))
    boundary = c.Contract("cpu_managed", "decode", "plain", "", 11, 12, c.Cache(8), (), (), (None,), *sides, "")
    weight = np.random.default_rng(0).normal(size=cube.shape).astype(np.float32)  # where a value lands matters

    def step(feeds):
        return {"y": feeds["key.0"] * weight}

    right = Simulator(habits.Toolkit(step, boundary), boundary).step({"key.0": cube})["y"]
    np.testing.assert_array_equal(right, cube * weight)
    wrong = Simulator(Forgetful(step, boundary), boundary).step({"key.0": cube})["y"]
    assert graphs.relative(wrong, right) > 0.1  # and nothing refused it
    np.testing.assert_array_equal(wrong, cube.transpose(0, 3, 1, 2) * weight)


@pytest.mark.parametrize("rank", c.RANKS)
def test_f2_f5_feeds_go_by_name(llama, trace, rank):
    """In the order of the contract whatever the order of the dict; one array more or less is refused."""
    graph = llama.export("cpu_managed", capacity=CAPACITY, rank=rank)
    toolkit = habits.Toolkit(graph.engine.step, graph.contract)
    engine, host = Simulator(toolkit, graph.contract), graph.host()
    host.fill(trace.tokens.tolist(), trace.states, 4)
    feeds = host.feeds([int(trace.tokens[4])])
    backwards = dict(reversed(feeds.items()))
    wanted = trace.logits[4] - graph.contract.shift
    assert graphs.relative(engine.step(backwards)["logits"].reshape(-1), wanted) < 1e-4
    swapped = [backwards[t.name] for t in graph.contract.inputs]
    at = [t.name for t in graph.contract.inputs].index("key.0")
    swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]  # K and V have one shape: nothing else would notice
    wrong = toolkit.inference(swapped, ["nchw"] * len(swapped))[0]
    assert graphs.relative(wrong.reshape(-1), wanted) > 1e-2
    for broken in ({k: v for k, v in feeds.items() if k != "key.1"}, feeds | {"more": feeds["key.0"]}):
        with pytest.raises(ValueError, match="got"):
            engine.step(broken)


class Misread:
    """A runtime that hands rank-4 states back as NCHW where their inputs expect NHWC (F3)."""

    def __init__(self, graph):
        self.graph = graph

    def step(self, feeds):
        roles = {t.name: t.role for t in self.graph.contract.inputs}
        return self.graph.engine.step({k: self._misread(v) if roles[k] == c.STATE else v for k, v in feeds.items()})

    @staticmethod
    def _misread(x):
        return np.ascontiguousarray(np.moveaxis(x, 1, 3)).reshape(x.shape) if x.ndim == 4 else x


@pytest.mark.parametrize("layout", c.LAYOUTS)
def test_f3_a_zero_cache_hides_a_misread_state(llama, trace, layout):
    """The first token is right, every later one is not; rank 3 cannot be misread."""
    for rank in c.RANKS:
        graph = llama.export("cpu_managed", capacity=CAPACITY, layout=layout, rank=rank)
        found = observe(Misread(graph), graph.host(), trace, ["isolated"])
        errors = [graphs.relative(x, trace.logits[p]) for p, x in enumerate(found["isolated/logits"])]
        assert errors[0] < 1e-4
        assert (min(errors[2:]) > 1e-2) if rank == 4 else (max(errors) < 1e-4)


@pytest.mark.parametrize("module", STRATEGIES)
def test_f11_no_mask_hides_every_column(module):
    """At every length, the empty cache among them, the own token is seen: no softmax over nothing."""
    contract = standin.contract(module, c.Cache(CAPACITY))
    host = importlib.import_module(f"kvgate.strategies.{module}.host").Host(contract, standin.tables(CAPACITY), -1e4)
    for host.length in range(CAPACITY):
        for i in range(2):
            mask = host.feeds([1])[f"mask.{i}"]
            assert np.isfinite(mask).all() and (mask == 0).any() and set(np.unique(mask)) <= {0, np.float32(-1e4)}


class Rounded:
    """A host half whose position passes through float16."""

    @property
    def length(self):
        return self._length

    @length.setter
    def length(self, value):
        self._length = int(np.float16(value))


def misplaced(module, position, *mixin):
    """What a step at `position` is fed that is not that position's, of 4,100 slots."""
    capacity = 4100
    contract = standin.contract(module, c.Cache(capacity), (standin.Layer(1, 4, 4),), (None,))
    right = importlib.import_module(f"kvgate.strategies.{module}.host").Host
    host = type("Host", (*mixin, right), {})(contract, standin.tables(capacity), -1e4)
    host.length = position
    fed, own = host.feeds([1]), module in ("dynamic_concat", "cpu_managed")
    seen = np.flatnonzero(fed["mask.0"] == 0).tolist()
    found = set() if seen == [*range(position), capacity if own else position] else {"mask"}
    if module == "fixed_max_scatter" and (fed["slot"].dtype, fed["slot"].tolist()) != (np.int64, [position]):
        found.add("slot")
    if module == "fixed_max_blend" and np.flatnonzero(fed["write"]).tolist() != [position]:
        found.add("write")
    if abs(fed["rotation.0"][0, 0, 0, 0] - np.cos(float(position))) > 1e-6:
        found.add("rotation")
    return found


@pytest.mark.parametrize("module", STRATEGIES)
def test_f13_positions_beyond_2048_are_exact(module):
    """No position passes through float16: slots, write rows, masks and rotations are those of the position."""
    for position in (2048, 2049, 4097):
        assert misplaced(module, position) == set()
    written = {"fixed_max_scatter": {"slot"}, "fixed_max_blend": {"write"}}.get(module, set())
    assert misplaced(module, 2048, Rounded) == set()
    for position in (2049, 4097):  # the fault: taken for 2048 and 4096
        assert misplaced(module, position, Rounded) == {"mask", "rotation"} | written


def test_f31_angles_come_from_tables(tmp_path):
    """The host's cos and sin are the model's own in float64, rounded once; made in float16 they are far off."""
    import torch
    import transformers

    size = families.Size(head=16, heads=6, kv_heads=2, vocabulary=97, context=4096, window=5)
    model = Model.of(tmp_path, "llama", size)
    graph = model.export("cpu_managed", capacity=4096)
    with precise.float64():
        reference = transformers.AutoModelForCausalLM.from_pretrained(model.checkpoint, dtype=torch.float64)
        precise.settle(reference)  # its frequencies are float32's
        rotary = reference.model.rotary_emb
        angles = rotary(torch.zeros(1, 1, 1), torch.arange(4096)[None])
    cosine, sine = (x[0].numpy().astype(np.float32) for x in angles)
    np.testing.assert_array_equal(graph.tables["cosine.0"], cosine)
    np.testing.assert_array_equal(graph.tables["sine.0"], sine)
    inverse = rotary.inv_freq.numpy().astype(np.float16)
    half = np.cos(np.arange(4096, dtype=np.float16)[:, None] * inverse)
    assert np.abs(half - cosine[:, :8])[3000:].max() > 0.3  # the fault
    for module, form in itertools.product(STRATEGIES, ("recipe", "plain")):
        nodes = onnx.load(
            model.export(module, form, CAPACITY).folder / "model.onnx", load_external_data=False
        ).graph.node
        assert not {n.op_type for n in nodes} & {"Sin", "Cos"}
    own = onnx.load(model.export("hf_export", "exporter", CAPACITY).folder / "model.onnx", load_external_data=False)
    assert {"Sin", "Cos"} <= {n.op_type for n in own.graph.node}  # what a user has today
