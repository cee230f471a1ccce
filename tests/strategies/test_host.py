"""The host halves against plain indexing, brute force, and a decoder in numpy behind every form of the boundary."""

import ast
import importlib
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import standin
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgate import contract as c
from kvgate.observe import observe, spread
from kvgate.strategies import host as shared

PACKAGE = Path(c.__file__).parent
OURS = ("dynamic_concat", "cpu_managed", "fixed_max_scatter", "fixed_max_blend")
FORMS = [c.Cache(8, *x) for x in itertools.product(c.LAYOUTS, c.RANKS, c.PACKINGS)]
BOARD_FILES = [PACKAGE / "contract.py", PACKAGE / "__init__.py", *PACKAGE.glob("strategies/**/host.py")]


def make(strategy: str, cache: c.Cache, mask_value: float = -1e4) -> shared.Host:
    module = importlib.import_module(f"kvgate.strategies.{strategy}.host")
    host: shared.Host = module.Host(standin.contract(strategy, cache), standin.tables(cache.capacity), mask_value)
    return host


def reference(prompt: list[int], count: int, contract: c.Contract) -> standin.Trace:
    return standin.Model(standin.layers_of(contract)).generate(prompt, count, standin.tables(64), contract.windows)


def worst(found: dict[str, np.ndarray], trace: standin.Trace, history: str) -> float:
    """The largest absolute difference of logits, keys and values from the trace."""
    at = found[f"{history}/positions"]
    assert trace.logits is not None and len(at)
    errors = [np.abs(found[f"{history}/logits"] - trace.logits[at]).max()]
    errors += [np.abs(found[f"{history}/{name}"] - x[at]).max() for name, x in trace.states.items()]
    return float(max(errors))


# The boundary's tensors


@given(
    layout=st.sampled_from(c.LAYOUTS),
    rank=st.sampled_from(c.RANKS),
    packing=st.sampled_from(c.PACKINGS),
    heads=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    slots=st.integers(1, 5),
    layers=st.integers(1, 3),
)
def test_slots_are_plain_indexing(layout, rank, packing, heads, sizes, slots, layers):
    """Every element of every view is the one that the contract's definition names, and writing goes through."""
    cache = c.Cache(slots, layout, rank, packing)
    specs = tuple(standin.Layer(heads, *sizes) for _ in range(layers))
    contract = standin.contract("cpu_managed", cache, specs)
    for tensor in contract.cache_inputs():
        array = np.arange(np.prod(tensor.shape), dtype=np.float32).reshape(tensor.shape)
        for state in (x for x in contract.states if x.name in tensor.states):
            layer, role = state.layer, state.kind
            view = shared.view(array, contract, tensor, state)
            assert view.shape == (slots, heads, sizes[role == c.VALUE])
            for s, h, d in np.ndindex(view.shape):
                name, at = standin.index(contract, layer, role, h, d, s)
                assert name == tensor.name and view[s, h, d] == array[at]
            view[-1, -1, -1] = -7
            assert array[standin.index(contract, layer, role, heads - 1, view.shape[2] - 1, slots - 1)[1]] == -7


def test_a_packing_for_all_layers_needs_equal_layers():
    with pytest.raises(ValueError, match="packing"):
        c.cache_tensors(c.Cache(4, packing="model"), (*c.key_value(0, 2, 4, 4, 4), *c.key_value(1, 1, 4, 4, 4)), 4)


@given(
    position=st.integers(0, 12),
    columns=st.lists(st.integers(-1, 12), min_size=1, max_size=14),
    window=st.one_of(st.none(), st.integers(1, 6)),
)
def test_mask_is_the_rule_spelled_out(position, columns, window):
    found = shared.additive_mask(np.array([position]), np.array(columns), window, -1e4)[0]
    for at, value in zip(columns, found, strict=True):
        seen = 0 <= at <= position and (window is None or position - at < window)
        assert value == (0 if seen else -1e4)
    assert found.dtype == np.float32


@pytest.mark.parametrize("value", [-np.inf, np.nan, 0.0, 1e4, np.inf])
def test_a_mask_value_must_be_finite_and_negative(value):
    with pytest.raises(ValueError, match="mask value"):
        make("cpu_managed", FORMS[0], value)


@given(st.integers(0, 7))
def test_rotation_matrix_turns_as_cosine_and_sine_do(position):
    host = make("cpu_managed", FORMS[0])
    host.length = position
    matrix = host.feeds([3])["rotation.0"].reshape(4, 4)  # [in, out]
    tables, x = host.tables, np.arange(1, 5, dtype=np.float32)
    wanted = tables["cosine.0"][position] * x + tables["sine.0"][position] * (tables["turn.0"] @ x)
    np.testing.assert_allclose(x @ matrix, wanted, rtol=1e-6, atol=1e-6)
    if position:
        assert not np.allclose(matrix @ x, wanted)  # in and out are not exchanged


# Whole generations


@pytest.mark.parametrize("cache", FORMS, ids=lambda x: f"{x.layout}-{x.rank}-{x.packing}")
@pytest.mark.parametrize("strategy", OURS)
def test_every_form_decodes_as_the_reference(strategy, cache):
    """First token to last slot, a windowed layer among them, in every history, with garbage where nothing is."""
    host = make(strategy, cache)
    trace = reference([3, 1, 4], 6, host.contract)
    engine = standin.Engine(host.contract)
    found = observe(engine, host, trace, ["isolated", "forced", "free"])
    assert found["isolated/positions"].tolist() == found["forced/positions"].tolist() == list(range(8))
    assert worst(found, trace, "isolated") < 1e-5 and worst(found, trace, "forced") < 1e-5
    assert found["free/diverged"] == -1 and found["free/tokens"].tolist() == trace.tokens[3:].tolist()
    assert not found["forced/disturbed"].any()

    host.reset(garbage=1e3)
    for position in range(8):
        step = host.take(engine.step(host.feeds([int(trace.tokens[position])])))
        np.testing.assert_allclose(step.logits, trace.logits[position], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cache full: got position 8, allowed: 0 to 7"):
        host.feeds([1])


@pytest.mark.parametrize("strategy", OURS)
def test_integers_through_the_cache(strategy):
    """After six steps every slot holds its own position, layer, head and channel, and nothing else was touched."""
    for cache in FORMS:
        host = make(strategy, cache)
        host.tables = standin.tables(8) | {"embedding": np.zeros((11, 12), np.float32)}
        host.tables["position"] = np.arange(8, dtype=np.float32)[:, None].repeat(12, 1)
        engine = standin.Counter(host.contract)
        engine.model.weights = [[w * 0 for w in x] for x in engine.model.weights]
        host.reset(garbage=-5.0)
        for _ in range(6):
            host.take(engine.step(host.feeds([1])))
        for i, (key, value) in enumerate(standin.pairs(host.views)):
            for s, h, d in np.ndindex(key.shape):
                wanted = s + 1000 * i + 100 * h + 10 * d if s < 6 else -5.0
                assert key[s, h, d] == wanted and value[s, h, d] == (wanted + 0.5 if s < 6 else -5.0)


class OffByOne(shared.Host):
    """A wrong way: a step does not see the newest slot of its history."""

    def columns(self):
        seen = super().columns()
        seen[max(self.length - 1, 0)] = -1
        return seen


class Shuffled(shared.Host):
    """A wrong way: the delta is written one slot too late."""

    def take(self, outputs):
        step = super().take(outputs)
        for slots in self.views.values():
            slots[[-1, self.length - 1]] = slots[[self.length - 1, -1]]
        return step


class Baked(shared.Host):
    """A wrong way: a position that was traced into the graph."""

    def _feed(self, t, token):
        if t.role == c.ROTATION:
            return np.eye(4, dtype=np.float32).reshape(t.shape)
        return super()._feed(t, token)


@pytest.mark.parametrize("wrong", [OffByOne, Shuffled, Baked])
@pytest.mark.parametrize("strategy", OURS)
def test_the_wrong_ways_are_seen(strategy, wrong):
    right = type(make(strategy, FORMS[0]))
    broken = type("Broken", (wrong, right), {})(standin.contract(strategy, FORMS[0]), standin.tables(8), -1e4)
    trace = reference([3, 1, 4], 6, broken.contract)
    assert worst(observe(standin.Engine(broken.contract), broken, trace, ["forced"]), trace, "forced") > 1e-2


@pytest.mark.parametrize("strategy", ["dynamic_concat", "fixed_max_scatter", "fixed_max_blend"])
def test_a_disturbed_slot_is_seen(strategy):
    host = make(strategy, FORMS[0])
    trace = reference([3, 1, 4], 6, host.contract)
    found = observe(standin.Engine(host.contract, "disturb"), host, trace, ["isolated"])
    assert (found["isolated/disturbed"] > 1e-2)[1:].all()


# State


@settings(max_examples=25)
@given(
    strategy=st.sampled_from(OURS),
    form=st.sampled_from(FORMS),
    length=st.integers(0, 7),
    token=st.integers(0, 10),
)
def test_fill_gives_the_trace_and_zeros(strategy, form, length, token):
    host = make(strategy, form)
    trace = standin.Model(standin.layers_of(host.contract)).trace(
        np.arange(8) % 11, 8, standin.tables(8), host.contract.windows
    )
    host.reset(garbage=1e3)
    host.fill(trace.tokens.tolist(), trace.states, length)
    fed = host.feeds([token])
    assert list(fed) == [t.name for t in host.contract.inputs]
    for t in host.contract.inputs:
        assert fed[t.name].shape == t.shape and str(fed[t.name].dtype) == t.dtype
    want = host.tables["embedding"][token] + host.tables["position"][length]
    assert np.array_equal(fed["embedding"].reshape(-1), want)
    for i, role in itertools.product(range(2), (c.KEY, c.VALUE)):
        rows = trace.states[f"layers.{i}.{role}"]
        for s, h, d in np.ndindex(rows.shape):
            name, at = standin.index(host.contract, i, role, h, d, s)
            assert fed[name][at] == (rows[s, h, d] if s < length else 0)
    for i, window in enumerate(host.contract.windows):
        own = length if strategy.startswith("fixed_max") else 8
        for column, value in enumerate(fed[f"mask.{i}"].reshape(-1)):
            at = length if column == own else column if column < length else -1
            assert value == (0 if at >= 0 and (window is None or length - at < window) else -1e4)


@settings(max_examples=25)
@given(
    strategy=st.sampled_from(OURS),
    form=st.sampled_from(FORMS),
    before=st.lists(st.integers(0, 10), max_size=3),
    between=st.lists(st.integers(0, 10), min_size=1, max_size=4),
    after=st.lists(st.integers(0, 10), min_size=1, max_size=4),
)
def test_restore_gives_the_same_steps_again(strategy, form, before, between, after):
    host, engine = make(strategy, form), standin.Engine(standin.contract(strategy, form))

    def run(tokens):
        return [host.take(engine.step(host.feeds([t]))).logits for t in tokens]

    run(before)
    state = host.snapshot()
    first = run(after)
    host.restore(state)
    run(between)
    host.restore(state)
    assert host.length == len(before)
    assert np.array_equal(first, run(after))


@pytest.mark.parametrize("strategy", OURS)
def test_prompts_do_not_leak_into_each_other(strategy):
    """A second prompt in the same host gives the bits that it gives in a fresh one."""
    host, engine = make(strategy, FORMS[0]), standin.Engine(standin.contract(strategy, FORMS[0]))
    first, second = ([int(x) for x in np.random.default_rng(s).integers(0, 11, 8)] for s in (1, 2))

    def run(tokens):
        host.reset()
        return [host.take(engine.step(host.feeds([t]))).logits for t in tokens]

    alone = run(second)
    run(first)
    assert np.array_equal(run(second), alone)
    assert not np.array_equal(run(first), alone)


def test_refusals_are_one_line():
    host = make("cpu_managed", FORMS[0])
    for token in (-1, 11):
        with pytest.raises(ValueError, match=f"token id: got {token}, allowed: 0 to 10"):
            host.feeds([token])
    outputs = standin.Engine(host.contract).step(host.feeds([1]))
    outputs["key.1.out"] = outputs["key.1.out"].swapaxes(0, 1)
    with pytest.raises(ValueError, match=r"output 'key.1.out': got shape"):
        host.take(outputs)
    with pytest.raises(ValueError, match="cache full"):
        host.fill([1] * 9, dict.fromkeys(host.states, np.zeros((9, 2, 4))), 9)


def test_the_free_run_goes_on_after_a_divergence():
    """A head that is a little off changes a token: the run goes on from there with its own tokens."""
    host = make("cpu_managed", FORMS[0])
    trace = reference([3, 1, 4], 6, host.contract)
    engine = standin.Engine(host.contract)
    engine.model.head = engine.model.head + 3 * np.random.default_rng(5).normal(size=engine.model.head.shape)
    found = observe(engine, host, trace, ["free"])
    step = int(found["free/diverged"])
    generated = found["free/tokens"].tolist()
    assert 0 <= step < 5 and len(generated) == 6
    assert generated[:step] == trace.tokens[3 : 3 + step].tolist() and generated[step] != trace.tokens[3 + step]
    host.reset()  # by hand: its own tokens, from the start
    fed = trace.tokens[:3].tolist()
    for token in [*fed, *generated[:-1]]:
        last = host.take(engine.step(host.feeds([int(token)]))).logits
    assert int(last.argmax()) == generated[-1]


def test_spread_has_both_ends():
    assert spread(16, 5) == [0, 1, 2, 3, 4] and spread(3, 101) == [0, 50, 100] and spread(1, 9) == [0]


# What runs on a board


@pytest.mark.parametrize("path", BOARD_FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_board_files_are_python_3_9(path):
    assert _newer_than_3_9(path.read_text()) == []


def test_newer_syntax_is_seen():
    assert _newer_than_3_9("def f(x: int | None): ...") == ["line 1: X | Y"]
    assert _newer_than_3_9("zip(a, b, strict=True)") == ["line 1: zip(strict=)"]
    assert _newer_than_3_9("match x:\n case 1: pass") != []


def _newer_than_3_9(text: str) -> list[str]:
    """What Python 3.9 would refuse, at parsing or when it evaluates annotations and calls."""
    try:
        tree = ast.parse(text, feature_version=(3, 9))
    except SyntaxError as error:
        return [str(error)]
    found = []
    for node in ast.walk(tree):
        hints = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for part in (x for hint in hints if hint for x in ast.walk(hint)):
            if isinstance(part, ast.BinOp):
                found.append(f"line {part.lineno}: X | Y")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "zip" and node.keywords:
            found.append(f"line {node.lineno}: zip(strict=)")
    return found


_IMPORTED = """
import importlib, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
tops = {name.split(".")[0] for name in set(sys.modules) - before}
print(" ".join(sorted(t for t in tops if t not in sys.stdlib_module_names)))
"""


def _imported(*names: str) -> set[str]:
    """Top-level packages outside the standard library that an import of `names` brings in."""
    command = [sys.executable, "-c", _IMPORTED, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(PACKAGE.parent)})
    return {name for name in done.stdout.split() if "cython" not in name}  # numpy's own


def test_what_runs_on_a_board_imports_numpy_at_most():
    hosts = [f"kvgate.strategies.{p.parent.name}.host" for p in PACKAGE.glob("strategies/*/host.py")]
    assert len(hosts) >= 6
    assert _imported("kvgate.contract") <= {"kvgate"}
    assert _imported(*hosts, "kvgate.observe", "kvgate.judging.metrics") <= {"kvgate", "numpy"}


def test_a_forbidden_import_is_seen():
    assert "onnx" in _imported("kvgate.contract", "onnx")
