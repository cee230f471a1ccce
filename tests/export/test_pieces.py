"""A decode graph in pieces: together they are the whole, whatever the family and the strategy."""

from dataclasses import replace

import graphs
import numpy as np
import onnx
import pytest
from graphs import Model
from kvgate.board.chain import Chain
from kvgate.contract import HIDDEN, LOGITS
from kvgate.engines.onnxruntime import Engine
from kvgate.export import pieces
from kvgate.jobs import graph_files, record
from kvgate.observe import observe
from kvgate.stages import check

FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "phi", "bloom", "olmo2", "falcon", "mistral")
CAPACITY = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("pieces")


@pytest.fixture(scope="module")
def models(root):
    made = {}

    def get(family: str) -> Model:
        if family not in made:
            made[family] = Model.of(root / family, family)
        return made[family]

    return get


def chain(graph: graphs.Graph) -> Chain:
    """The pieces of an exported graph, opened."""
    parts = record.read(graph.folder / "graph.json")["pieces"]
    found = []
    for part in parts:
        model, told = graph_files.piece_names(part)
        contract = graph.contract.from_json((graph.folder / told).read_text())
        found.append((Engine(graph.folder / model, contract), contract))
    return Chain(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pieces_are_the_whole_to_the_bit(models, family):
    """Over a whole generation: every state and the logits of every step."""
    model = models(family)
    graph = model.export("cpu_managed", capacity=CAPACITY, layers=1)
    whole = model.export("cpu_managed", capacity=CAPACITY)
    assert (graph.folder / "model.onnx").read_bytes() == (whole.folder / "model.onnx").read_bytes()
    trace = model.text(CAPACITY)
    one = observe(graph.engine, graph.host(), trace, ["isolated", "forced"])
    cut = observe(chain(graph), graph.host(), trace, ["isolated", "forced"])
    assert one.keys() == cut.keys() and len(one["forced/positions"]) == CAPACITY
    for name, array in one.items():
        np.testing.assert_array_equal(array, cut[name], err_msg=name)


@pytest.mark.parametrize("module", graphs.STRATEGIES)
def test_in_every_strategy_the_pieces_have_their_own_states(models, module):
    graph = models("llama").export(module, capacity=CAPACITY, layers=1)
    parts = [contract for _, contract in chain(graph).pieces]
    assert [x.part for x in parts] == ["layers.0-0", "layers.1-1", "head"]
    assert [sorted({s.layer for s in x.states}) for x in parts] == [[0], [1], []]
    assert [[t.role for t in x.outputs].count(HIDDEN) for x in parts] == [1, 1, 0]
    assert [any(t.role == LOGITS for t in x.outputs) for x in parts] == [False, False, True]
    trace = models("llama").text(CAPACITY)
    seen = observe(chain(graph), graph.host(), trace, ["isolated", "forced"])
    assert max(graphs.worst(seen, trace, "forced")) < 1e-5


def test_the_stream_of_another_step_is_seen(models):
    """A chain that hands on the stream of the step before."""
    graph = models("llama").export("cpu_managed", capacity=CAPACITY, layers=1)
    right = chain(graph)

    class Late:
        def __init__(self, engine):
            self.engine, self.kept = engine, None

        def step(self, feeds):
            now, self.kept = self.kept, feeds["hidden"]
            return self.engine.step(feeds | ({"hidden": now} if now is not None else {}))

    engine, contract = right.pieces[1]
    wrong = Chain([right.pieces[0], (Late(engine), contract), right.pieces[2]])
    trace = models("llama").text(CAPACITY)
    seen = observe(wrong, graph.host(), trace, ["forced"])
    assert max(graphs.worst(seen, trace, "forced")) > 1e-2
    one, other = (observe(x, graph.host(), trace, ["isolated"], 4) for x in (right, wrong))
    assert check._in_pieces(graph.engine, graph.host(), one, trace, 4) == []
    (found,) = check._in_pieces(graph.engine, graph.host(), other, trace, 4)
    assert found["text"].startswith("in pieces: layers.1.key ")


def test_a_compensated_stream_is_kept_in_each_piece(models):
    """In float32 the function stays; what a piece loses at its end is the rest of its own sums."""
    model = models("llama")
    graph = model.export("cpu_managed", capacity=CAPACITY, steps=("compensate",), layers=1)
    nodes = [onnx.load(str(graph.folder / f"layers.{n}-{n}.onnx"), load_external_data=False) for n in (0, 1)]
    plain = model.export("cpu_managed", capacity=CAPACITY, layers=1)
    bare = onnx.load(str(plain.folder / "layers.0-0.onnx"), load_external_data=False)
    assert len(nodes[0].graph.node) > len(bare.graph.node)
    trace = model.text(CAPACITY)
    assert max(graphs.worst(observe(chain(graph), graph.host(), trace, ["forced"]), trace, "forced")) < 1e-5


@pytest.mark.parametrize("columns", [50, 33])
def test_a_wide_head_comes_in_several(models, root, monkeypatch, columns):
    monkeypatch.setattr(pieces, "COLUMNS", columns)
    family = "gemma2" if columns == 33 else "llama"
    model = Model.of(root / f"{family}_{columns}", family)
    graph = model.export("cpu_managed", capacity=CAPACITY, layers=1)
    parts = [contract for _, contract in chain(graph).pieces if contract.part.startswith("head")]
    widths = [x.outputs[0].shape[-1] for x in parts]
    assert len(parts) > 1 and max(widths) <= columns and sum(widths) == graph.contract.vocabulary
    trace = model.text(CAPACITY)
    one = observe(graph.engine, graph.host(), trace, ["forced"])
    cut = observe(chain(graph), graph.host(), trace, ["forced"])
    np.testing.assert_allclose(one["forced/logits"], cut["forced/logits"], atol=1e-5)


@pytest.mark.parametrize("every", [3, 5, 40])
def test_pieces_that_do_not_divide_are_one_line(every):
    with pytest.raises(
        pieces.Uncut, match=rf"layers: got {every} a piece, allowed: a divisor of the model's 4: 1, 2, 4"
    ):
        pieces.names(4, every)


def test_one_tensor_for_all_layers_cannot_be_cut(models):
    graph = models("llama").export("cpu_managed", capacity=CAPACITY)
    model = onnx.load(str(graph.folder / "model.onnx"), load_external_data=False)
    packed = replace(graph.contract, cache=replace(graph.contract.cache, packing="model"))
    with pytest.raises(pieces.Uncut, match="packing: got 'model' with pieces"):
        pieces.cut(model, packed, 1)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("layers", "weights", "head", "build_mb", "found"),
    [
        (30, GIB // 2, 0, 9500, 0),  # SmolLM2-135M as it is
        (24, 2 * GIB, GIB // 2, 4500, 6),  # 0.5B: 6 layers of 64 MiB
        (24, 2 * GIB, GIB // 2, 20_000, 0),
        (24, 2 * GIB, GIB // 2, 17_000, 24),  # all layers, and the head by itself
        (28, 12 * GIB, GIB, 200_000, 14),  # fits the memory, not the addresses
        (7, 7 * GIB, 0, 10_000, 1),
    ],
)
def test_a_piece_is_as_large_as_fits(layers, weights, head, build_mb, found):
    assert pieces.fitting(layers, weights, head, build_mb) == found


def test_a_layer_that_does_not_fit_is_one_line():
    with pytest.raises(pieces.Uncut, match="layers: auto: a build of one layer takes about 9304 MB, got build_mb 4500"):
        pieces.fitting(2, 2 * GIB, 0, 4500)
