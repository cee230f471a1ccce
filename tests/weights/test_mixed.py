"""mixed: the choice by made-up losses, and by a real search whose written choice makes the same again."""

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kvgate.jobs import record
from kvgate.prepare.widened import Widened
from kvgate.weights import mixed
from test_function import Prepared

GENERATOR = np.random.default_rng(0)
WEIGHTS = {"cheap": (96, 40), "dear": (96, 20), "unseen": (96, 40)}
WEIGHTS = {name: GENERATOR.standard_normal(shape).astype(np.float32) for name, shape in WEIGHTS.items()}
INT4 = {"cheap": 0.3, "dear": 0.2, "unseen": 0.0}  # the dear one costs more a byte
SIZE = 96 * 40 / 2e6  # MB of a large one in int4


def forms(**options):
    """Of each matrix: `int4`, `sum` or `float16`."""
    calls = []

    def loss(changes):
        assert changes.keys() == WEIGHTS.keys()
        calls.append(sum(float(np.abs(change).sum()) for change in changes.values()))
        return INT4 if len(calls) == 1 else {name: lost / 200 for name, lost in INT4.items()}

    made = mixed.matrices(WEIGHTS, {}, loss, dict.fromkeys(WEIGHTS, 1), group=32, **options)
    assert calls[1] < 0.2 * calls[0]  # a sum's own error, for the second measurement
    for name, terms in made.items():
        assert isinstance(terms, tuple)  # without `signs` nothing is widened
        error = np.abs(sum(terms) - WEIGHTS[name]).max()
        assert error < 1e-6 or len(terms) == 1
    return {
        name: "float16" if terms[0] is WEIGHTS[name] else ("int4", "sum")[len(terms) - 1]
        for name, terms in made.items()
    }


def test_a_budget_is_spent_where_int4_costs_most():
    assert forms(megabytes=2.501 * SIZE) == dict.fromkeys(WEIGHTS, "int4")
    assert forms(megabytes=3.001 * SIZE) == {"cheap": "int4", "dear": "sum", "unseen": "int4"}
    assert forms(megabytes=5.6 * SIZE) == {"cheap": "sum", "dear": "float16", "unseen": "int4"}
    assert forms(megabytes=99) == {"cheap": "float16", "dear": "float16", "unseen": "int4"}  # it gains nothing


def test_a_budget_of_cycles_knows_that_float16_has_no_groups():
    one = 96 * 40 / 1e6
    least = 2.5 * one * 0.0316
    assert forms(megacycles=least + 0.016 * one) == {"cheap": "int4", "dear": "sum", "unseen": "int4"}
    # In bytes float16 is twice a sum, here it is more than four times.
    assert forms(megacycles=least + 1.51 * one * 0.0316) == {"cheap": "sum", "dear": "sum", "unseen": "int4"}
    assert forms(megacycles=least + 2.0 * one * 0.27)["dear"] == "float16"


def test_a_share_is_of_float16s_bytes():
    assert forms(share=0.25 * 3.001 / 2.5) == {"cheap": "int4", "dear": "sum", "unseen": "int4"}
    assert forms(share=1) == {"cheap": "float16", "dear": "float16", "unseen": "int4"}


def test_a_widened_form_is_chosen_where_it_gains_most_for_its_rows():
    """Three rows a group for one sign: 3 / 32 of int4's bytes. Of a convolution there is no such form."""
    calls = []

    def loss(changes):
        calls.append(changes)
        form = len(calls) - 1
        return {name: lost * (1, 0.2 if name == "dear" else 1, 0.1)[form] for name, lost in INT4.items()}

    def made(megabytes):
        calls.clear()
        kernels = {"cheap": 3, "dear": 1, "unseen": 1}
        found = mixed.matrices(WEIGHTS, {}, loss, kernels, group=32, signs=[1], megabytes=megabytes)
        return {
            name: type(terms).__name__ if isinstance(terms, Widened) else len(terms) for name, terms in found.items()
        }

    more = 0.5 * SIZE * 3 / 32
    assert made(2.5 * SIZE + 0.9 * more) == {"cheap": 1, "dear": 1, "unseen": 1}
    assert made(2.5 * SIZE + 1.1 * more) == {"cheap": 1, "dear": "Widened", "unseen": 1}
    assert np.array_equal(calls[1]["cheap"], calls[0]["cheap"])  # what is left of a convolution is int4's
    assert np.abs(calls[1]["dear"]).sum() < 0.9 * np.abs(calls[0]["dear"]).sum()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "budget: got none, allowed: one of megabytes, megacycles, share"),
        ({"megabytes": 1, "megacycles": 1}, "budget: got megabytes and megacycles, allowed: one of "),
        ({"share": 0.2}, "share: got 0.2, allowed: at least 0.25, all in int4"),
        ({"megabytes": 0.001}, "megabytes: got 0.001, allowed: at least 0.0048, all in int4"),
        ({"megacycles": 0.0001}, "megacycles: got 0.0001, allowed: at least 0.0003034, all in int4"),
    ],
)
def test_a_wrong_budget_is_one_line(options, text):
    with pytest.raises(ValueError, match=text.replace(".", r"\.")) as error:
        forms(**options)
    assert "\n" not in str(error.value)


# Whole numbers, so that sums are exact: 1, 2 and 4 times a size, as bytes are.
PARTS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=7)


def chosen(parts, spare):
    losses = {str(n): (int4, both, 0) for n, (_, int4, both) in enumerate(parts)}
    costs = {str(n): (size, 2 * size, 4 * size) for n, (size, _, _) in enumerate(parts)}
    budget = sum(size for size, _, _ in parts) + spare
    made = mixed.choose(losses, costs, budget)
    assert sum(costs[name][form] for name, form in made.items()) <= budget
    return sum(losses[name][form] for name, form in made.items())


@given(PARTS, st.integers(0, 400), st.integers(0, 400))
def test_never_over_budget_and_more_of_it_loses_no_more(parts, spare, more):
    assert chosen(parts, spare + more) <= chosen(parts, spare)


@given(PARTS)
def test_at_a_uniform_rows_size_it_loses_no_more_than_that_row(parts):
    size = sum(size for size, _, _ in parts)
    assert chosen(parts, 0) <= sum(int4 for _, int4, _ in parts)
    assert chosen(parts, size) <= sum(both for _, _, both in parts)
    assert chosen(parts, 3 * size) == 0


def test_a_poor_step_does_not_hide_a_good_one_behind_it():
    losses, costs = {"a": (1.0, 1.0, 0.0), "b": (0.1, 0.0, 0.0)}, {"a": (1, 2, 4), "b": (1, 2, 4)}
    assert mixed.choose(losses, costs, 5) == {"a": 2, "b": 0}
    assert mixed.choose(losses, costs, 4) == {"a": 0, "b": 1}  # it does not fit


@pytest.mark.parametrize(
    ("megabytes", "signs", "last"),
    [
        (0.12, [], ["split2"]),
        (0.2, [], ["split2", "keep"]),
        (0.085, [], []),
        (0.1, [1, 3], ["widen", "widen"]),
    ],
)
def test_what_was_chosen_makes_the_same_again_without_a_search(tmp_path, megabytes, signs, last):
    options = {"group": 16, "megabytes": megabytes} | ({"signs": signs} if signs else {})
    search = {"name": "mixed", "options": options}
    made = Prepared(tmp_path / "a", "llama", entry={"steps": [{"name": "scale", "options": {}}, search]})
    body = made.body
    text = (made.folder / "choice.yaml").read_text()
    assert f"mixed with {options} chose for the model\n# llama." in text
    (entry,) = yaml.safe_load(text)["weights"].values()
    assert [step["name"] for step in entry["steps"]] == ["scale", "gptq", *last]
    again = Prepared(tmp_path / "b", "llama", entry=entry)
    assert {k: v for k, v in again.body.items() if k != "files"} == {k: v for k, v in body.items() if k != "files"}
    assert again.body["files"].items() == {k: v for k, v in body["files"].items() if k != "choice.yaml"}.items()
    assert not (again.folder / "choice.yaml").exists()
    for name in ("model.onnx", "weights.bin", "contract.json"):
        assert (again.graph.folder / name).read_bytes() == (made.graph.folder / name).read_bytes()
    assert again.graph.record["kept"] == body["kept"]


def test_two_budgets_block_the_row(tmp_path):
    with pytest.raises(record.Blocked, match="preparation mixed: budget: got megabytes and megacycles, allowed: one "):
        Prepared(tmp_path, "llama", "mixed", megabytes=1, megacycles=1)
