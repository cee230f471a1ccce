"""The ctypes engine over the double of the C runtime: layouts, types, codes, swapped caches. No NPU, no vendor code."""

import importlib
import re
import shutil
from pathlib import Path

import graphs
import numpy as np
import pytest
import standin
from kvgate import contract as c
from kvgate.board import capi, native
from kvgate.board.engine import EngineError
from kvgate.board.resident import Side
from kvgate.observe import observe
from kvgate.strategies import host as shared
from system import double
from system.double import Stored

CUSTOM = '{"kvgate":"0123"}'
OURS = ("dynamic_concat", "cpu_managed", "fixed_max_scatter", "fixed_max_blend")
HALF = Stored()
CACHE = c.Cache(8, "channels", 3)  # rank 3: no layout of its own at the boundary


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return double.build(tmp_path_factory.mktemp("double") / "librknnrt.so")


@pytest.fixture
def library(built: Path, tmp_path: Path) -> double.Library:
    """A copy: with its own counts, script and callback."""
    return double.Library(Path(shutil.copy(built, tmp_path / "librknnrt.so")))


def job(**fields: object) -> dict:
    return {"platform": "rk3576", "core_mask": 0, "custom_string": CUSTOM, **fields}


def opened(
    library: double.Library, contract: c.Contract, *lines: str, stored: Stored = HALF, special=None, **fields
) -> native.Engine:
    """An engine on an artifact of the double with the contract's boundary."""
    folder = library.path.parent
    text = double.artifact(contract, *lines, stored=stored, special=special, custom=CUSTOM)
    (folder / native.ARTIFACT).write_text(text)
    engine = native.Engine(job(**fields), folder, contract, str(library.path))
    engine.open(lambda phase: None)
    return engine


def refused(library: double.Library, *lines: str, contract: c.Contract | None = None, **fields) -> EngineError:
    with pytest.raises(EngineError) as error:
        opened(library, contract or standin.contract("cpu_managed", CACHE), *lines, **fields)
    assert "\n" not in error.value.text
    return error.value


def half(strategy: str) -> type[shared.Host]:
    kind: type[shared.Host] = importlib.import_module(f"kvgate.strategies.{strategy}.host").Host
    return kind


def feeds(contract: c.Contract) -> dict[str, np.ndarray]:
    """Values without symmetry, exact in float16: a wrong order or layout changes the outputs."""
    rng = np.random.default_rng(5)
    return {t.name: (rng.integers(-64, 64, t.shape) / 64).astype(t.dtype) for t in contract.inputs}


def plain(*shapes: tuple[int, ...], outputs: tuple[tuple[int, ...], ...] = ((1, 7),)) -> c.Contract:
    """A contract of bare tensors."""
    ins = tuple(c.Tensor(f"in{i}", "x", shape) for i, shape in enumerate(shapes))
    outs = tuple(c.Tensor(f"out{i}", "y", shape) for i, shape in enumerate(outputs))
    return c.Contract("", "decode", "plain", "", 4, 4, c.Cache(4), (), (), (), ins, outs, "")


# A decoder through the boundary


def trace(contract: c.Contract) -> standin.Trace:
    return standin.Model(standin.layers_of(contract)).generate([3, 1, 4], 4, standin.tables(64), contract.windows)


def seen(engine: object, host: shared.Host, contract: c.Contract) -> dict[str, np.ndarray]:
    return observe(engine, host, trace(contract), ["isolated", "forced", "free"], 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", c.RANKS)
@pytest.mark.parametrize("layout", c.LAYOUTS)
@pytest.mark.parametrize("strategy", OURS)
def test_a_decoder_gives_what_it_gives_without_a_runtime(library, strategy, layout, rank):
    """Through float32 memory of every layout, with the usual host half and with the one over the runtime's memory."""
    contract = standin.contract(strategy, c.Cache(8, layout, rank, "layer"))
    tables = standin.tables(8)
    wanted = seen(standin.Engine(contract), half(strategy)(contract, tables, -1e4), contract)
    engine = opened(library, contract, stored=Stored("float32"))
    library.compute(contract, standin.Engine(contract).step)
    for host in (half(strategy)(contract, tables, -1e4), engine.host(half(strategy), tables, -1e4)):
        found = seen(engine, host, contract)
        assert library.problems == []
        assert sorted(found) == sorted(wanted)
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    engine.close()
    assert library.live == 0


@pytest.mark.parametrize("strategy", OURS)
def test_half_precision_caches_in_place_are_the_copied_ones(library, strategy):
    """The resident host half's numbers are those of the plain one; only `disturbed` no longer sees fill's rounding."""
    contract = standin.contract(strategy, CACHE)
    engine = opened(library, contract)
    library.compute(contract, standin.Engine(contract).step)
    copied = seen(engine, half(strategy)(contract, standin.tables(8), -1e4), contract)
    host = engine.host(half(strategy), standin.tables(8), -1e4)
    found = seen(engine, host, contract)
    for name in copied:
        if not name.endswith("disturbed"):
            np.testing.assert_array_equal(found[name], copied[name], err_msg=name)
    own = strategy == "dynamic_concat"  # comes back in other strides: no memory of the runtime's
    assert all(buffer.dtype == (np.float32 if own else np.float16) for buffer in host.buffers.values())
    assert own or found["isolated/disturbed"].max() == 0  # what went in came back
    assert max(np.abs(found["forced/logits"][-1] - copied["isolated/logits"][-1])) < 0.5


SWAPS = {"cpu_managed": False, "fixed_max_scatter": True, "fixed_max_blend": True}


@pytest.mark.parametrize("strategy", SWAPS)
def test_where_memories_change_places_no_slot_is_copied(library, strategy):
    contract = standin.contract(strategy, CACHE)
    engine = opened(library, contract)
    library.compute(contract, standin.Engine(contract).step)
    host = engine.host(half(strategy), standin.tables(8), -1e4)
    host.reset()
    caches = [t.name for t in contract.cache_inputs()]
    before = {name: engine.views[name].ctypes.data for name in engine.views}
    bound = library.calls("set_io_mem")
    outputs = engine.step(host.feeds([3]))
    host.take(outputs)
    assert bool(engine.swaps) == SWAPS[strategy]
    for name in caches:
        moved = before[name + ".out"] if SWAPS[strategy] else before[name]
        assert engine.views[name].ctypes.data == host.buffers[name].ctypes.data == moved
    assert library.calls("set_io_mem") - bound == (2 * len(caches) if SWAPS[strategy] else 0)
    host.take(engine.step(host.feeds([4])))
    back = {name: engine.views[name].ctypes.data for name in caches}
    assert back == {name: host.buffers[name].ctypes.data for name in caches} == {name: before[name] for name in caches}
    other = [t.name for t in contract.inputs if t.name not in caches]
    assert [engine.views[name].ctypes.data for name in other] == [before[name] for name in other]


def test_a_growing_cache_is_swapped_where_its_slots_lie_outside(library):
    """One KV head, slots before channels: the history is the first part of what comes back."""
    layers = (standin.Layer(1, 4, 4, mask=0), standin.Layer(1, 4, 4, mask=1))
    contract = standin.contract("dynamic_concat", c.Cache(8, "rows", 3), layers)
    engine = opened(library, contract)
    library.compute(contract, standin.Engine(contract).step)
    copied = seen(engine, half("dynamic_concat")(contract, standin.tables(8), -1e4), contract)
    host = engine.host(half("dynamic_concat"), standin.tables(8), -1e4)
    assert len(engine.swaps) == 4
    found = seen(engine, host, contract)
    assert library.problems == []
    for name in copied:
        if not name.endswith("disturbed"):
            np.testing.assert_array_equal(found[name], copied[name], err_msg=name)
    assert found["forced/disturbed"].max() == 0


def test_a_disturbed_slot_is_seen_in_a_swapped_cache(library):
    contract = standin.contract("fixed_max_blend", CACHE)
    engine = opened(library, contract)
    library.compute(contract, standin.Engine(contract, "disturb").step)
    host = engine.host(half("fixed_max_blend"), standin.tables(8), -1e4)
    # The first step itself writes the slot that is disturbed.
    assert seen(engine, host, contract)["isolated/disturbed"][1:].min() > 0.01
    host.observes = False  # type: ignore[attr-defined]
    host.reset()
    assert host.take(engine.step(host.feeds([1]))).disturbed == 0


# A prompt in chunks, by a part with an artifact and a memory of its own


TOKENS = 3
ONE_HEAD = (standin.Layer(1, 4, 4, mask=0), standin.Layer(1, 4, 4, mask=1))


class Row:
    """Both parts of a row, on a double of the runtime each."""

    def __init__(self, built: Path, folder: Path, contract: c.Contract, stored: Stored) -> None:
        """stored: how the prefill part's artifact holds its tensors."""
        self.contract, self.chunk = contract, standin.prefill(contract, TOKENS)
        parts = (("decode", contract, HALF, standin.Engine), ("prefill", self.chunk, stored, standin.Chunks))
        self.libraries, self.engines = [], []
        for name, of, held, engine in parts:
            (folder / name).mkdir()
            library = double.Library(Path(shutil.copy(built, folder / name / "librknnrt.so")))
            self.engines.append(opened(library, of, stored=held))
            library.compute(of, engine(of).step)
            self.libraries.append(library)
        self.decode, self.prefill = self.engines

    def halves(self, resident: bool) -> tuple[shared.Host, shared.Host]:
        kind, tables = half(self.contract.strategy), standin.tables(8)
        if resident:
            host = self.decode.host(kind, tables, -1e4)
            return host, self.prefill.beside(host)
        plain = kind(self.contract, tables, -1e4)
        return plain, plain.chunked(self.chunk)

    def logits(self, host: shared.Host, chunks: shared.Host, *counts: int) -> list[np.ndarray]:
        """Tokens in steps of so many each, 1: by decode; the logits of those."""
        host.reset()
        found, tokens = [], iter((3, 1, 4, 1, 5, 9, 2, 6))
        for count in counts:
            fed = [next(tokens) for _ in range(count)]
            engine, of = (self.decode, host) if count == 1 else (self.prefill, chunks)
            step = of.take(engine.step(of.feeds(fed)), count)
            found += [] if step.logits is None else [step.logits]
        assert [x for library in self.libraries for x in library.problems] == []
        return found


CHUNKED = [
    *((strategy, CACHE, None) for strategy in OURS),
    ("cpu_managed", c.Cache(8, "rows", 4, "layer"), None),
    ("dynamic_concat", c.Cache(8, "rows", 3), ONE_HEAD),  # there a growing cache is swapped
]


@pytest.fixture(params=CHUNKED, ids=lambda x: f"{x[0]}-{x[1].layout}{x[1].rank}")
def contract(request) -> c.Contract:
    strategy, cache, layers = request.param
    return standin.contract(strategy, cache, *([layers] if layers else []))


@pytest.mark.parametrize("stored", [HALF, Stored("float32"), Stored(fmt=double.NCHW)], ids=lambda x: f"{x.type}{x.fmt}")
def test_a_prompt_in_chunks_is_what_it_is_without_the_runtime_s_memory(built, tmp_path, contract, stored):
    """Whatever the layouts and types of the two artifacts are, and however the steps follow each other."""
    if stored.fmt == double.NCHW and contract.cache.rank == 3:
        stored = Stored("float16", double.UNDEFINED, double.NONE)
    row = Row(built, tmp_path, contract, stored)
    plain, resident = row.halves(False), row.halves(True)
    # What a float32 part made is rounded once more where it goes through decode's float16 memory and back.
    tolerance = 0.02 if stored.type == "float32" else 0
    for counts in ((3, 3, 1, 1), (1, 3, 2, 1), (2, 1, 3, 1), (1, 1, 1, 1), (3, 2, 1)):
        wanted, found = row.logits(*plain, *counts), row.logits(*resident, *counts)
        np.testing.assert_allclose(found, wanted, 0, tolerance, err_msg=str(counts))
        assert resident[0].length == resident[1].length == plain[0].length == sum(counts)
        for name, x in plain[0].views.items():
            mine = resident[0].views[name].astype(np.float16)
            np.testing.assert_allclose(mine, x.astype(np.float16), 0, tolerance, err_msg=name)
    # As the reference has it, to half precision.
    of = standin.Model(standin.layers_of(contract)).trace(
        np.array([3, 1, 4, 1, 5, 9, 2, 6]), 8, standin.tables(8), contract.windows
    )
    assert graphs.relative(row.logits(*resident, 3, 3, 1, 1)[-1], of.logits[7]) < 0.02


def test_the_other_part_is_observed_in_its_own_memory(built, tmp_path, contract):
    row = Row(built, tmp_path, contract, HALF)
    found = []
    for resident in (False, True):
        _, chunks = row.halves(resident)
        found.append(observe(row.prefill, chunks, trace(contract), ["isolated", "forced"], 3))
    assert sorted(found[0]) == sorted(found[1]) and "forced/layers.1.value" in found[0]
    for name in found[0]:
        if not name.endswith("disturbed"):
            np.testing.assert_array_equal(found[1][name], found[0][name], err_msg=name)


@pytest.mark.parametrize("strategy", ["cpu_managed", "fixed_max_blend"])
def test_the_cache_is_copied_at_the_switch_alone(built, tmp_path, strategy, monkeypatch):
    row = Row(built, tmp_path, standin.contract(strategy, CACHE), HALF)
    host, chunks = row.halves(True)
    row.logits(host, chunks, 3, 3)
    memory = [host.kept.views["layers.0.key"], chunks.kept.views["layers.0.key"]]
    assert [bool(x.any()) for x in memory] == [False, True]  # nothing was written to decode's memory yet
    assert host.length == 6 and host.views["layers.0.key"][:6].all()
    np.testing.assert_array_equal(*memory)
    wanted = row.logits(host, chunks, 3, 3, 1)
    monkeypatch.setattr(Side, "_newest", lambda self: self.kept)  # no copy at all: it would be seen
    assert np.abs(row.logits(host, chunks, 3, 3, 1)[0] - wanted[0]).max() > 0.01


def test_a_decoder_in_pieces_has_no_memory_to_share(library):
    """Its host half's arrays are the cache: the part is fed from them."""
    contract = standin.contract("cpu_managed", CACHE)
    engine = opened(library, standin.prefill(contract, TOKENS))
    host = half("cpu_managed")(contract, standin.tables(8), -1e4)
    chunks = engine.beside(host)
    assert chunks.kept is host.kept and chunks.contract.part == "prefill"


def test_parts_of_other_buffers_are_refused(library):
    engine = opened(library, standin.prefill(standin.contract("cpu_managed", c.Cache(8, "channels", 3)), TOKENS))
    host = half("cpu_managed")(standin.contract("cpu_managed", c.Cache(9, "channels", 3)), standin.tables(9), -1e4)
    with pytest.raises(ValueError, match=r"prefill: input 'key.0': got shape \(2, 4, 8\), allowed: \(2, 4, 9\)"):
        engine.beside(host)


def test_a_state_of_another_size_is_named(library):
    contract = standin.contract("cpu_managed", CACHE)
    text = re.sub(r"(input key\.0 .*) \S+", r"\1 2,4,9", double.artifact(contract, custom=CUSTOM))
    (library.path.parent / native.ARTIFACT).write_text(text)
    engine = native.Engine(job(), library.path.parent, contract, str(library.path))
    with pytest.raises(
        EngineError, match=r"tensor 'key.0' \(state layers.0.key\): got 72 elements, .*allowed: \[2, 4, 8"
    ):
        engine.open(lambda phase: None)


# Layouts and types


@pytest.mark.parametrize(
    ("fmt", "strides"),
    [(double.NHWC, (0, 0)), (double.NHWC, (8, 0)), (double.NHWC, (6, 4)), (double.NCHW, (0, 0)), (double.NCHW, (7, 5)),
     (double.UNDEFINED, (0, 0))],
)  # fmt: skip
@pytest.mark.parametrize("type_", ["float16", "float32"])
def test_rank_4_lies_as_the_attribute_says(library, type_, fmt, strides):
    contract = plain((2, 4, 3, 5), (3, 2), outputs=((2, 4, 3, 5), (1, 7)))
    special = {name: Stored(type_, fmt, strides=strides) for name in ("in0", "out0")}
    engine = opened(library, contract, special=special)
    fed = feeds(contract)
    found, wanted = engine.step(fed), double.expected(contract, fed)
    for name in wanted:
        assert found[name].dtype == np.float32 and found[name].flags.c_contiguous
        np.testing.assert_allclose(found[name], wanted[name], atol=2e-3, err_msg=name)
    assert np.abs(double.expected(contract, {**fed, "in0": fed["in0"][:, ::-1]})["out1"] - wanted["out1"]).max() > 0.01


def test_a_cube_is_not_transposed(library):
    """Where all extents are equal no shape check can see a wrong order."""
    contract = plain((1, 3, 3, 3), outputs=((1, 3, 3, 3),))
    engine = opened(library, contract)
    fed = feeds(contract)
    np.testing.assert_allclose(engine.step(fed)["out0"], double.expected(contract, fed)["out0"], atol=2e-3)


@pytest.mark.parametrize(
    "stored",
    [Stored("int8", scale=0.01, zp=-20), Stored("int8", scale=0.01, zp=-20, fmt=double.NHWC),
     Stored("int16", scale=1e-4), Stored("int8", qnt=double.DFP, fl=6, scale=0),
     Stored("int16", qnt=double.DFP, fl=12, zp=9, scale=3.0)],
    ids=str,
)  # fmt: skip
def test_quantized_tensors_go_in_and_out_by_their_scale(library, stored):
    contract = plain((1, 2, 3, 4), outputs=((1, 2, 3, 4),))
    engine = opened(library, contract, special={"in0": stored, "out0": stored})
    step = stored.scale if stored.qnt == double.AFFINE else 2.0**-stored.fl
    fed = {"in0": (np.arange(24).reshape(1, 2, 3, 4) / 24 - 0.5).astype(np.float32)}
    library.compute(contract, lambda x: {"out0": x["in0"] * 1.5})
    found = engine.step(fed)["out0"]
    assert np.abs(found - fed["in0"] * 1.5).max() <= 1.25 * step + 1e-6  # half a step in, times 1.5, and half out
    assert np.abs(found / step - np.rint(found / step)).max() < 1e-2
    # Beyond the range it saturates, as a quantizer does.
    limit = (127 if stored.type == "int8" else 32767) - (stored.zp if stored.qnt == double.AFFINE else 0)
    library.compute(contract, lambda x: {"out0": x["in0"]})
    top = engine.step({"in0": np.full((1, 2, 3, 4), 1e6, np.float32)})["out0"]
    np.testing.assert_allclose(top, limit * step, rtol=1e-5)


def test_a_wrong_scale_would_be_seen(library):
    contract = plain((2, 3), outputs=((2, 3),))
    engine = opened(library, contract, special={"in0": Stored("int8", scale=0.01, zp=3)})
    library.compute(contract, lambda x: {"out0": x["in0"]})
    boundary = engine.boundaries["in0"]
    engine.boundaries["in0"] = type(boundary)(**{**vars(boundary), "scale": 0.02})
    fed = np.full((2, 3), 0.5, np.float32)
    assert np.abs(engine.step({"in0": fed})["out0"] - fed).max() > 0.2


def test_ids_masks_and_flags_keep_their_type(library):
    contract = standin.contract("fixed_max_scatter", CACHE)
    engine = opened(library, contract)
    took = {}
    library.compute(contract, lambda x: took.update(x) or standin.Engine(contract).step(x))
    host = half("fixed_max_scatter")(contract, standin.tables(8), -1e4)
    host.take(engine.step(host.feeds([1])))
    engine.step(host.feeds([2]))
    assert engine.views["slot"].dtype == np.int64 and took["slot"].tolist() == [1]
    assert took["mask.0"].tolist() == [[0, 0] + [-10000] * 6]  # float16 holds -1e4
    blend = standin.contract("fixed_max_blend", CACHE)
    engine = opened(library, blend)
    library.compute(blend, lambda x: took.update(x) or standin.Engine(blend).step(x))
    engine.step(half("fixed_max_blend")(blend, standin.tables(8), -1e4).feeds([1]))
    assert engine.views["write"].dtype == bool and took["write"].tolist() == [[True] + [False] * 7]


def test_ids_that_the_type_does_not_hold_are_refused(library):
    contract = plain((1, 1))
    contract = type(contract)(**{**vars(contract), "inputs": (c.Tensor("ids", c.IDS, (1, 1), "int64"),)})
    engine = opened(library, contract, special={"ids": Stored("int8")})
    engine.step({"ids": np.array([[127]])})
    with pytest.raises(EngineError, match="'ids': got 128 to 128, allowed: whole numbers of int8"):
        engine.step({"ids": np.array([[128]])})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("input in0 1 1 0 0 0 0 0 0 2,4,3,5", r"dims \[2, 4, 3, 5\] as NHWC.*allowed: \[2, 3, 5, 4\]"),
        ("input in0 1 1 0 0 0 0 3 0 2,3,5,4", r"strides 3 and 0.*no stride below"),
        ("input in0 1 0 0 0 0 0 0 0 2,4,5,3", r"dims \[2, 4, 5, 3\] as NCHW"),
        ("input in0 1 3 0 0 0 0 0 0 2,4,3,1", r"got 24 elements"),
        ("input in0 1 3 0 0 0 0 0 0 2,3,4,5", r"dims \[2, 3, 4, 5\] with format 3"),
        ("input in0 1 2 0 0 0 0 0 0 2,4,3,5", r"format 2"),
        ("input in0 1 3 0 0 0 0 8 0 120", r"dims \[120\]"),
        ("input in0 2 1 2 0 0 0 0 0 2,3,5,4", r"quantization 2, scale 0.0, allowed: a scale above 0"),
        ("input in9 1 1 0 0 0 0 0 0 2,3,5,4", r"inputs: got \['in9'\], allowed: \['in0'\]"),
    ],
)
def test_a_boundary_that_is_not_the_contracts_is_refused(library, line, says):
    contract = plain((2, 4, 3, 5))
    text = double.artifact(contract, custom=CUSTOM).split("\n")
    text[1] = line
    (library.path.parent / native.ARTIFACT).write_text("\n".join(text))
    engine = native.Engine(job(), library.path.parent, contract, str(library.path))
    with pytest.raises(EngineError, match=says) as error:
        engine.open(lambda phase: None)
    assert error.value.kind == "contract"
    assert library.live == 0


def test_names_decide_and_not_the_order(library):
    contract = plain((2, 3), (2, 3))
    swapped = type(contract)(**{**vars(contract), "inputs": contract.inputs[::-1]})
    (library.path.parent / native.ARTIFACT).write_text(double.artifact(swapped, custom=CUSTOM))
    engine = native.Engine(job(), library.path.parent, contract, str(library.path))
    engine.open(lambda phase: None)
    fed = feeds(contract)
    np.testing.assert_allclose(engine.step(fed)["out0"], double.expected(swapped, fed)["out0"], atol=2e-3)


def test_feeds_are_held_to_the_contract(library):
    engine = opened(library, plain((2, 3)))
    good = np.zeros((2, 3), np.float32)
    for bad in ({}, {"in0": good.T}, {"in0": good.astype(np.float64)}, {"in0": good, "in1": good}, {"in1": good}):
        with pytest.raises(EngineError, match="allowed"):
            engine.step(bad)
    assert library.calls("run") == 0
    engine.step({"in0": good})


# Codes, versions, memory, masks, layer tables


@pytest.mark.parametrize(
    ("lines", "kind", "text"),
    [
        (["code init 0 -6"], "error_line", "rknn_init: got -6 (RKNN_ERR_MODEL_INVALID), allowed: 0"),
        (["code init 0 -13"], "platform", "rknn_init: got -13 (RKNN_ERR_TARGET_PLATFORM_UNMATCH), allowed: 0"),
        (["code init 0 -12"], "version_mismatch", "OPTIMIZATION_LEVEL_VERSION"),
        (["code init 0 -4"], "memory", "rknn_init: got -4 (RKNN_ERR_MALLOC_FAIL)"),
        (["code init 0 -99"], "error_line", "rknn_init: got -99 (RKNN_unknown code)"),
        (["code create_mem 3 1"], "memory", "rknn_create_mem: got nothing, allowed: "),
        (["code set_io_mem 2 -5"], "error_line", "rknn_set_io_mem: got -5 (RKNN_ERR_PARAM_INVALID)"),
        (["memory 4000000000 4000000000"], "memory", "memory: needs 7629 MiB, "),
    ],
)
def test_codes_of_opening_have_names(library, monkeypatch, lines, kind, text):
    monkeypatch.setattr(native.environment, "available", lambda: 2**30)
    error = refused(library, *lines)
    assert error.kind == kind and text in error.text
    assert library.live == 0


def test_what_it_needs_is_known_before_it_is_taken(library, monkeypatch):
    monkeypatch.setattr(native.environment, "available", lambda: 100 * 2**20)
    refused(library, f"memory {80 * 2**20} {21 * 2**20}")
    assert library.calls("info") == 1 and library.calls("init") == 0
    folder, contract = library.path.parent, standin.contract("cpu_managed", CACHE)
    (folder / native.ARTIFACT).write_text(double.artifact(contract, "memory 80 20", custom=CUSTOM))
    phases: list[str] = []
    found = native.Engine(job(core_mask=3), folder, contract, str(library.path)).open(phases.append)
    assert phases == ["load", "init"]
    assert found == {
        "versions": {"runtime": "2.5.0", "driver": "0.9.8"},
        "core_mask": 3,
        "findings": [],
        "memory": {"weights": 80, "internal": 20},
    }


def test_a_runtime_that_cannot_say_what_it_needs_still_runs(library):
    contract = plain((2, 3))
    engine = opened(library, contract, "code info 0 -5")
    fed = feeds(contract)
    np.testing.assert_allclose(engine.step(fed)["out0"], double.expected(contract, fed)["out0"], atol=2e-3)


@pytest.mark.parametrize("code", [-1, -2])
def test_a_run_error_is_no_result(library, code):
    """The lite package ignores it."""
    engine = opened(library, plain((2, 3)), f"code run 2 {code}")
    fed = {"in0": np.ones((2, 3), np.float32)}
    engine.step(fed)
    assert engine.last_us() == {"run_us": 1000.0}
    with pytest.raises(EngineError, match=rf"rknn_run: got {code} \(RKNN_ERR_(FAIL|TIMEOUT)\)"):
        engine.step(fed)
    assert engine.last_us() == {"run_us": None}
    engine.step(fed)
    assert engine.last_us() == {"run_us": 1000.0}


def test_another_artifact_is_refused(library):
    error = refused(library, custom_string="other")
    assert (error.kind, error.text) == ("contract", f"artifact's custom string: got {CUSTOM!r}, allowed: 'other'")
    assert library.live == 0


@pytest.mark.parametrize(
    ("platform", "mask", "good"),
    [("rk3576", 3, True), ("rk3576", 0xFFFF, True), ("rk3576", 4, False), ("rk3576", 7, False), ("rk3588", 7, True),
     ("rk3588", 5, False), ("rk3566", 0, True), ("rk3566", 1, False)],
)  # fmt: skip
def test_core_masks(library, platform, mask, good):
    contract = plain((2, 3))
    if good:
        engine = opened(library, contract, platform=platform, core_mask=mask)
        assert library.library.double_mask(engine.context) == mask
        assert library.calls("set_core_mask") == (mask != 0)
    else:
        error = refused(library, contract=contract, platform=platform, core_mask=mask)
        assert error.kind == "core_mask" and f"got {mask}, allowed on {platform}: [0" in error.text
        assert library.calls("init") == 0


def test_a_refused_core_mask_is_final(library):
    error = refused(library, "code set_core_mask 0 -5", core_mask=1)
    assert (error.kind, error.text) == ("core_mask", "rknn_set_core_mask: got -5 (RKNN_ERR_PARAM_INVALID), allowed: 0")
    assert library.live == 0


def test_no_runtime_and_a_file_that_is_none(library, tmp_path):
    for path in (tmp_path / "missing.so", library.path.parent / "model.rknn"):
        (library.path.parent / "model.rknn").write_text("garbage")
        with pytest.raises(EngineError) as error:
            native.Engine(job(), tmp_path, plain((1,)), str(path)).open(lambda phase: None)
        assert error.value.kind == "engine_missing"


def test_an_artifact_that_is_none(library):
    (library.path.parent / native.ARTIFACT).write_text("garbage")
    with pytest.raises(EngineError, match="MODEL_INVALID"):
        native.Engine(job(), library.path.parent, plain((1,)), str(library.path)).open(lambda phase: None)


TABLE = """\
detail ID   OpType           DataType Target InputShape        OutputShape  Cycles(DDR/NPU/Total)    Time(us)     MacUsage(%)          WorkLoad(0/1)        RW(KB)       FullName
detail 1    InputOperator    FLOAT16  CPU    \\                 (1,64)       0/0/0                    4            \\                    0.0%/0.0%            0            InputOperator:in0
detail 2    exNorm           FLOAT16  NPU    (1,64),(64)       (1,64)       12/34/34                 120          0.00/0.00            100.0%/0.0%          4            Norm:/norm
detail 3    Gather           FLOAT16  CPU    (1,64)            (1,64)       0/0/0                    30           \\                    0.0%/0.0%            4            Gather:/g
detail Total Operator Elapsed Per Frame Time(us): 154
"""  # noqa: E501


def test_layer_times_come_from_a_context_of_their_own(library):
    contract = plain((2, 3))
    engine = opened(library, contract, *TABLE.splitlines())
    fed = feeds(contract)
    engine.step(fed)
    took: list[np.ndarray] = []
    library.compute(contract, lambda x: took.append(x["in0"]) or {"out0": np.zeros((1, 7))})
    found = engine.layers()
    assert (found["npu_us"], found["cpu_us"], found["boundary_us"]) == (120, 30, 4)
    assert found["source"] == "RKNN_QUERY_PERF_DETAIL" and found["why"] is None
    assert len(took) == 3 and all(np.array_equal(x, fed["in0"]) for x in took)  # of the last inputs
    assert (library.path.parent / "layers.txt").read_text().count("\n") == 5
    assert library.live == 0
    with pytest.raises(EngineError, match="after open and before close or layers"):
        engine.step(fed)


def test_without_the_collect_flag_there_is_no_table(library):
    engine = opened(library, plain((2, 3)), *TABLE.splitlines())
    with pytest.raises(EngineError, match="rknn_query: got -1"):
        engine.runtime.query(engine.context, capi.Query.PERF_DETAIL, capi.PerfDetail)


# Two contexts, one set of weights


def test_contexts_share_weights(library):
    contract = plain((2, 3))
    engine = opened(library, contract)
    users = library.library.double_weight_users
    assert users(engine.context) == 1
    copy = engine.runtime.duplicate(engine.context)
    path = str(library.path.parent / native.ARTIFACT)
    other = engine.runtime.init(path, capi.Flag.SHARE_WEIGHT_MEM, share=engine.context)
    assert copy != engine.context != other
    assert users(copy) == users(other) == users(engine.context) == 3
    engine.close()
    assert users(copy) == 2
    assert engine.runtime.query(copy, capi.Query.IN_OUT_NUM, capi.InOutNum).inputs == 1
    for context in (copy, other):
        engine.runtime.call("destroy", context)
    assert library.live == 0
    with pytest.raises(EngineError, match="rknn_init: got -5"):
        engine.runtime.init(path, capi.Flag.SHARE_WEIGHT_MEM)


def test_a_step_asks_nothing_but_its_time(library):
    contract = standin.contract("cpu_managed", CACHE)
    engine = opened(library, contract)
    host = engine.host(half("cpu_managed"), standin.tables(8), -1e4)
    library.forget()
    for _ in range(5):
        host.take(engine.step(host.feeds([1])))
    assert library.calls("run") == library.calls("query") == 5
    assert library.calls("set_io_mem") == library.calls("create_mem") == 0


def test_memory_stays_flat(library):
    """Contexts opened and closed leave nothing, nor do steps with swapped caches."""
    contract = standin.contract("fixed_max_blend", CACHE)
    for _ in range(3):
        engine = opened(library, contract)
        host = engine.host(half("fixed_max_blend"), standin.tables(8), -1e4)
        alive = library.live
        for _ in range(8):
            host.take(engine.step(host.feeds([1])))
        assert library.live == alive
        engine.close()
        engine.close()
        assert library.live == 0
