"""The prefill part beside the decode part of one row: any prompt in chunks of T, then on token by token."""

import itertools

import graphs
import numpy as np
import onnx
import pytest
import torch
from graphs import STRATEGIES, Graph, Model
from kvgate import contract as c
from kvgate.export import decoder
from kvgate.observe import Trace, observe, planned
from kvgate.prepare.spec import Spec
from kvgate.strategies.host import Host

CAPACITY, T = 10, 4  # lengths up to 10: padding, exact multiples and several chunks
TOLERANCE = 1e-4  # the check's own gate; what is measured is about 2e-6
BOUNDARIES = list(itertools.product(c.LAYOUTS, c.RANKS, c.PACKINGS))
SOME = [("channels", 4, "apart"), ("rows", 4, "model"), ("rows", 3, "apart"), ("channels", 3, "layer")]
FORMS = [*(("recipe", *x) for x in BOUNDARIES), *(("plain", *x) for x in SOME)]
# Norms of heads and of all of them, learned positions, partial rotary, soft cap, windows (5), one KV head, alibi.
FAMILIES = (
    *("llama", "llama_g8", "qwen3", "olmo2", "gpt2", "phi", "gemma2", "gemma3_text", "smollm3"),
    *("mistral", "bloom", "falcon_alibi", "opt", "glm4"),
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Model.of(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def trace(llama) -> Trace:
    return llama.text(CAPACITY)


class Row:
    """The two graphs of a row and a host half for each, on one cache."""

    def __init__(self, model: Model, module: str, form: str = "recipe", mixin: type | None = None, **more) -> None:
        """mixin: a wrong way for the prefill part."""
        self.graph = model.export(module, form, CAPACITY, **more)
        self.prefill = model.prefill(module, form, CAPACITY, T, **more)
        self.host = self.graph.host()
        self.chunks: Host = self.host.chunked(self.prefill.contract)
        if mixin:
            self.chunks = self.prefill.host(mixin)
            self.chunks.kept = self.host.kept

    def fill(self, tokens: np.ndarray, garbage: float = 0.0) -> None:
        """Start over with these tokens in the cache, by chunks."""
        self.host.reset(garbage)
        for chunk in np.split(tokens, range(T, len(tokens), T)) if len(tokens) else []:
            fed = self.chunks.feeds(chunk.tolist())
            assert self.chunks.take(self.prefill.engine.step(fed), len(chunk)).logits is None

    def logits(self, tokens: np.ndarray) -> list[np.ndarray]:
        """One token a step from here on."""
        return [self.host.take(self.graph.engine.step(self.host.feeds([int(t)]))).logits for t in tokens]

    def error(self, trace: Trace, split: int, garbage: float = 0.0) -> float:
        """The worst L2 of any cached entry and logits, `split` tokens being prefilled and the others decoded."""
        self.fill(trace.tokens[:split], garbage)
        assert self.host.length == split
        errors = [graphs.relative(x, trace.logits[split + n]) for n, x in enumerate(self.logits(trace.tokens[split:]))]
        for name, rows in trace.states.items():
            cached = self.host._changed("inverse", name, self.host.views[name])
            errors += [graphs.relative(x, rows[n]) for n, x in enumerate(cached)]
        return max(errors)


@pytest.mark.parametrize("boundary", FORMS, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("module", STRATEGIES)
def test_every_boundary_at_every_split(llama, trace, module, boundary):
    """From the first token to the last slot, with garbage in unused slots; whole-prefix recomputation has it so too."""
    form, layout, rank, packing = boundary
    row = Row(llama, module, form, layout=layout, rank=rank, packing=packing)
    assert (row.prefill.contract.form, row.prefill.contract.part, row.prefill.contract.tokens) == (form, "prefill", T)
    for split in range(CAPACITY + 1):
        assert row.error(trace, split, garbage=1e3) < TOLERANCE
    with pytest.raises(ValueError, match="cache full: got position 10, allowed: 0 to 9"):
        row.chunks.feeds([1])


@pytest.mark.parametrize("form", ["recipe", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_every_split(tmp_path, family, form):
    """Three layers, as the last one's attention is not in the graph."""
    model = Model.of(tmp_path, family, layers=3)
    text = model.text(CAPACITY)
    row = Row(model, "cpu_managed", form)
    assert row.prefill.contract.form == form
    for split in range(CAPACITY + 1):
        assert row.error(text, split, garbage=1e3) < TOLERANCE


@pytest.mark.parametrize("module", ["cpu_managed", "fixed_max_blend"])
@pytest.mark.parametrize("family", ["gemma2", "bloom", "falcon_alibi"])
def test_several_masks_and_distances_in_a_fixed_buffer_too(tmp_path, family, module):
    model = Model.of(tmp_path, family, layers=3)
    text = model.text(CAPACITY)
    row = Row(model, module)
    assert max(row.error(text, split) for split in (3, 8, 9)) < TOLERANCE


@pytest.mark.parametrize("steps", [("krot",), ("compensate",), ("krot", "vrot")])
def test_prepared_weights(llama, trace, steps):
    row = Row(llama, "cpu_managed", steps=steps)
    assert max(row.error(trace, split) for split in (3, 8, 9)) < TOLERANCE
    if "krot" in steps:
        assert not np.allclose(row.prefill.tables["turned.0"], np.eye(16), atol=0.1)


# The cache


@pytest.mark.parametrize("module", STRATEGIES)
def test_garbage_in_unused_slots_changes_no_bit(llama, trace, module):
    row = Row(llama, module)
    for split in (1, 6, 9):
        found = []
        for garbage in (0.0, 1e3):
            row.fill(trace.tokens[:split], garbage)
            found.append({name: x[:split].copy() for name, x in row.host.views.items()})
            assert all((x[split:] == garbage).all() for x in row.host.views.values())
        for name, x in found[0].items():
            np.testing.assert_array_equal(found[1][name], x)


def test_garbage_would_be_seen(llama, trace):
    row = Row(llama, "cpu_managed")
    row.chunks.mask_value = -1.0
    assert row.error(trace, 3, garbage=1e3) > 0.1


def test_integers_through_the_cache(llama):
    """Every slot but those that are written comes back bit for bit, and a token's entry is the same by every way."""
    for boundary in BOUNDARIES:
        entries = []
        for module in STRATEGIES:
            row = Row(llama, module, **dict(zip(("layout", "rank", "packing"), boundary, strict=True)))
            row.host.reset()
            for length, count in ((0, T), (3, 2), (CAPACITY - T, T), (CAPACITY - 1, 1)):
                for i, x in enumerate(row.host.views.values()):
                    s, h, d = np.ogrid[: x.shape[0], : x.shape[1], : x.shape[2]]
                    x[...] = s + 10 * h + 100 * d + 2000 * i
                row.host.length = length
                kept = {name: slots.copy() for name, slots in row.host.views.items()}
                step = row.chunks.take(row.prefill.engine.step(row.chunks.feeds([7, 8, 9, 5][:count])), count)
                assert step.disturbed == 0 and row.host.length == length + count
                for name, own in step.states.items():
                    assert len(own) == count
                    kept[name][length : length + count] = own
                    np.testing.assert_array_equal(row.host.views[name], kept[name])
                entries.append((length, step.states["layers.0.key"], step.states["layers.0.value"]))
        for length, *own in entries:
            first = next(rest for at, *rest in entries if at == length)
            for mine, theirs in zip(own, first, strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_the_decode_part_goes_on_in_the_same_cache(llama, trace):
    """Chunks and single tokens in any order; a restored state is both parts' state."""
    row = Row(llama, "fixed_max_blend")
    row.fill(trace.tokens[:3])
    row.logits(trace.tokens[3:5])
    state = row.chunks.snapshot()
    again = []
    for _ in range(2):
        row.host.restore(state)
        assert row.chunks.length == 5
        row.chunks.take(row.prefill.engine.step(row.chunks.feeds(trace.tokens[5:8].tolist())), 3)
        again.append(row.logits(trace.tokens[8:]))
        assert graphs.relative(again[-1][-1], trace.logits[-1]) < TOLERANCE
    np.testing.assert_array_equal(*again)


# What is observed


@pytest.mark.parametrize("module", STRATEGIES)
def test_observations_have_a_row_a_token(llama, trace, module):
    prefill = llama.prefill(module, "recipe", CAPACITY, T)
    found = observe(prefill.engine, prefill.host(), trace, ["isolated", "forced", "free"], isolated=3)
    begins = [0, 3, 6]
    assert found["isolated/positions"].tolist() == [p for b in begins for p in range(b, b + T)]
    assert found["forced/positions"].tolist() == list(range(CAPACITY))
    for history, positions in planned(trace, CAPACITY, ["isolated", "forced"], 3, T).items():
        assert found[f"{history}/positions"].tolist() == positions
        np.testing.assert_array_equal(found[f"{history}/tokens"], trace.tokens[positions])
        assert found[f"{history}/disturbed"].tolist() == [0] * len(positions)
        for name, rows in trace.states.items():
            got = found[f"{history}/{name}"]
            assert max(graphs.relative(x, rows[p]) for x, p in zip(got, positions, strict=True)) < TOLERANCE
    assert {name.partition("/")[2] for name in found} == {"positions", "tokens", "disturbed", *trace.states}


def test_a_text_shorter_than_a_chunk_is_one_padded_chunk(llama):
    text = llama.text(3)
    prefill = llama.prefill("cpu_managed", "recipe", CAPACITY, T)
    found = observe(prefill.engine, prefill.host(), text, ["isolated", "forced"])
    assert found["isolated/positions"].tolist() == found["forced/positions"].tolist() == [0, 1, 2]


# The wrong ways


class SeesPadding:
    """Padded columns are not hidden: the last token counts more than once."""

    def columns(self):
        seen = super().columns()
        seen[CAPACITY + self.count :] = self.length + self.count - 1
        return seen


class TakesPadding:
    """The padded tail gets into the cache."""

    def take(self, outputs, valid=1):
        room = CAPACITY - self.length
        return super().take(outputs, min(T, room))


class SecondChunkLate:
    """From the second chunk on, every position is one too many."""

    def positions(self):
        return np.minimum(super().positions() + (self.length > 0), CAPACITY - 1)


class NotCausal:
    """A token sees those after it in its chunk."""

    def _feed(self, t, tokens):
        mask = super()._feed(t, tokens)
        return mask[[-1] * T] if t.role == c.MASK else mask


class PaddingIsPlaced:
    """The last token is placed as often as padding repeats it."""

    def extra(self, tensor):
        if tensor.role != c.PLACE:
            return super().extra(tensor)
        return (self.positions()[:, None] == np.arange(CAPACITY)).astype(np.float32)


class AnglesOfTheFirst:
    """One rotation for all tokens of a chunk."""

    def _feed(self, t, tokens):
        fed = super()._feed(t, tokens)
        return fed[:, [0] * T] if t.role in (c.COSINE, c.SINE) else fed


WRONG = {
    SeesPadding: ("cpu_managed", "dynamic_concat"),
    TakesPadding: STRATEGIES,
    SecondChunkLate: STRATEGIES,
    NotCausal: STRATEGIES,
    PaddingIsPlaced: ("fixed_max_blend",),
    AnglesOfTheFirst: STRATEGIES,
}


@pytest.mark.parametrize(
    ("wrong", "module"), [(w, m) for w, of in WRONG.items() for m in of], ids=lambda x: getattr(x, "__name__", x)
)
def test_the_wrong_ways_are_seen(llama, trace, wrong, module):
    row = Row(llama, module, mixin=wrong)
    errors = []
    for split in (4, 6, 7):
        row.fill(trace.tokens[:split])
        got = row.logits(trace.tokens[split : split + 1])
        cached = [graphs.relative(x[:split], trace.states[name][:split]) for name, x in row.host.views.items()]
        errors.append(max(graphs.relative(got[0], trace.logits[split]), *cached))
    assert max(errors) > 100 * TOLERANCE
    if wrong in (SeesPadding, PaddingIsPlaced):
        assert errors[0] < TOLERANCE  # nothing is padded


# What the graph is


@pytest.mark.parametrize("packing", c.PACKINGS)
@pytest.mark.parametrize("module", STRATEGIES)
def test_the_graph_has_what_the_states_need(llama, module, packing):
    """The contract's tensors, all of them used; no head, and nothing of the last layer behind its K and V."""
    prefill = llama.prefill(module, "recipe", CAPACITY, T, packing=packing)
    model = onnx.load(prefill.folder / "model.onnx", load_external_data=False)
    assert [t.name for t in prefill.contract.inputs] == [x.name for x in model.graph.input]
    assert [t.name for t in prefill.contract.outputs] == [x.name for x in model.graph.output]
    assert [t.role for t in prefill.contract.outputs] == [c.STATE] * len(prefill.contract.outputs)
    used = {name for node in model.graph.node for name in node.input}
    assert {t.name for t in prefill.contract.inputs} <= used
    weights = {x.name for x in model.graph.initializer if x.external_data}
    assert "model.model.layers.1.self_attn.qkv" in weights and weights <= used
    for dead in ("lm_head.weight", "layers.1.self_attn.out", "layers.1.mlp.up_proj.weight", "model.norm.weight"):
        assert not any(name.endswith(dead) for name in weights)
    decode = {t.name: t.shape for t in llama.export(module, capacity=CAPACITY, packing=packing).contract.cache_inputs()}
    assert {t.name: t.shape for t in prefill.contract.cache_inputs()}.items() <= decode.items()
    assert c.Contract.from_json(prefill.contract.to_json()) == prefill.contract


@pytest.mark.parametrize("form", ["recipe", "plain"])
def test_both_parts_read_one_weights_file(tmp_path, form):
    """Each matrix at the same place in it; of qwen3, whose norm weights a fold would take out of the file."""
    model = Model.of(tmp_path, "qwen3")
    places = []
    for graph in (model.export("cpu_managed", form), model.prefill("cpu_managed", form)):
        made = onnx.load(graph.folder / "model.onnx", load_external_data=False)
        external = [x for x in made.graph.initializer if x.external_data]
        places.append({x.name: {e.key: e.value for e in x.external_data} for x in external})
        inline = [x for x in made.graph.initializer if not x.external_data]
        assert max((int(np.prod(x.dims)) for x in inline), default=0) <= 16 * 16
    assert places[1].items() < places[0].items()


# Refusals


@pytest.mark.parametrize("tokens", [0, 1, CAPACITY + 1])
def test_a_chunk_must_fit_the_capacity(llama, tokens):
    spec = Spec.from_dict(llama.prepare("recipe")["spec"])
    with pytest.raises(ValueError, match=rf"^prefill tokens: got {tokens}, allowed: 2 to the capacity of 10$"):
        decoder.contract(spec, "cpu_managed", c.Cache(CAPACITY), part="prefill", tokens=tokens)


def test_refusals_are_one_line(llama, trace):
    row = Row(llama, "cpu_managed")
    for tokens in ([], [1] * (T + 1)):
        with pytest.raises(ValueError, match=rf"^tokens of a step: got {len(tokens)}, allowed: 1 to 4$"):
            row.chunks.feeds(tokens)
    with pytest.raises(ValueError, match=r"^token id: got 97, allowed: 0 to 96$"):
        row.chunks.feeds([1, 97])
    outputs = row.prefill.engine.step(row.chunks.feeds([1, 2]))
    for valid in (0, T + 1):
        with pytest.raises(ValueError, match=rf"^valid tokens: got {valid}, allowed: 1 to 4$"):
            row.chunks.take(outputs, valid)
    row.fill(trace.tokens[:8])
    with pytest.raises(ValueError, match=r"^cache full: got position 10, allowed: 0 to 9$"):
        row.chunks.feeds([1, 2, 3])
    assert row.host.length == 8
    other: Graph = llama.prefill("cpu_managed", "recipe", CAPACITY + 2, T)
    with pytest.raises(
        ValueError, match=r"^prefill: input 'key.0': got shape \(2, 16, 1, 12\), allowed: \(2, 16, 1, 10\)$"
    ):
        row.host.chunked(other.contract)


def test_the_rotation_of_a_chunk_is_that_of_each_token(llama):
    """cos, sin and the constant in the graph against the matrix that the decode part is fed, partial and turned."""
    from kvgate.prepare.recipe import Angles

    row = Row(llama, "cpu_managed", steps=("krot",))
    row.chunks.length, row.chunks.count = 3, T
    tables = {name: torch.from_numpy(x) for name, x in row.prefill.tables.items()}
    cosine, sine = (tables[f"{n}.0"][3 : 3 + T].t()[None, :, None] for n in ("cosine", "sine"))
    angles = Angles(cosine, sine, tables["turn.0"], tables["turned.0"].t())
    x = torch.randn(2, 16, 1, 3 * T)
    got = angles.apply(x, 3).reshape(2, 16, 3, T)
    for n in range(T):
        row.host.length = 3 + n
        matrix = torch.from_numpy(row.host.feeds([1])["rotation.0"].reshape(16, 16))  # [in, out]
        torch.testing.assert_close(got[..., n], torch.einsum("hdn,de->hen", x.reshape(2, 16, 3, T)[..., n], matrix))
