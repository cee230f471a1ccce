"""The choice of tokens, against transformers' own processors where it has them."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from kvgate.serving.sampling import Options, Sampler, _best, logprob, pick

LOGITS = np.log(np.float32([0.1, 0.4, 0.05, 0.25, 0.2]))


def allowed(logits, options):
    """The tokens that can be drawn."""
    return {pick(logits, options, lambda x=x: x) for x in np.linspace(0, 0.9999, 400)}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.49}, {1, 3, 4}),  # 0.196 of 0.4
        ({"min_p": 0.51}, {1, 3}),
        ({"min_p": 0.5, "temperature": 0.5}, {1}),  # after the temperature: 0.25, 0.39 and 1 of the likeliest's weight
        ({"top_k": 2, "top_p": 0.6}, {1}),  # top_p is of what top_k left: 0.4 of 0.65
        ({"top_k": 2, "top_p": 0.63}, {1, 3}),
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.6}, {1, 3}),
    ],
)
def test_what_is_left_to_draw_from(options, wanted):
    assert allowed(LOGITS, Options(**{"temperature": 1.0, **options})) == wanted


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(0.05, 1), st.floats(0, 0.5), st.floats(0.2, 2))
def test_what_is_left_is_what_transformers_leaves(seed, top_k, top_p, min_p, temperature):
    logits = np.random.default_rng(seed).normal(size=12).astype(np.float32) * 3
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    steps = [transformers.TemperatureLogitsWarper(temperature), transformers.TopKLogitsWarper(top_k)]
    steps += [transformers.TopPLogitsWarper(top_p), transformers.MinPLogitsWarper(min_p)]
    for step in steps:
        scores = step(None, scores)
    chances = torch.softmax(scores, -1)[0].numpy()
    drawn = allowed(logits, Options(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert drawn <= set(np.flatnonzero(chances)) and drawn >= set(np.flatnonzero(chances > 0.005))


@given(st.integers(0, 2**32 - 1), st.floats(0.5, 2), st.lists(st.integers(0, 11), min_size=1, max_size=9))
def test_repetition_is_transformers_own(seed, penalty, prompt):
    rng = np.random.default_rng(seed)
    sampler, ids = Sampler(Options(repetition=penalty), prompt), list(prompt)
    for _ in range(4):
        logits = rng.normal(size=12).astype(np.float32)
        kept = logits.copy()
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        wanted = processor(torch.tensor([ids]), torch.tensor(logits)[None]).argmax().item()
        assert sampler.next(logits) == wanted
        assert np.array_equal(logits, kept)
        ids.append(wanted)


def test_presence_and_frequency_count_the_answer_alone():
    logits = np.float32([1.0, 0.9, 0.0])
    assert [Sampler(Options(presence=0.2), [0]).next(logits)] == [0]  # the prompt has it, which does not count
    sampler = Sampler(Options(presence=0.2), [2])
    assert [sampler.next(logits) for _ in range(4)] == [0, 1, 0, 0]  # 0.8 against 0.7 from then on
    sampler = Sampler(Options(frequency=0.2), [2])
    assert [sampler.next(logits) for _ in range(5)] == [0, 1, 0, 1, 0]
    assert [Sampler(Options(frequency=-1), []).next(logits)] == [0]


def test_bias():
    logits = np.float32([1.0, 0.9, 0.0])
    assert Sampler(Options(bias={0: -100.0}), []).next(logits) == 1
    assert Sampler(Options(bias={2: 100.0}), []).next(logits) == 2
    forbidden = Options(temperature=1.0, bias={0: -100.0, 1: -100.0})
    assert {Sampler(Options(**{**vars(forbidden), "seed": s}), []).next(logits) for s in range(50)} == {2}


def test_neutral_greedy_looks_at_the_logits_as_they_are():
    class Logits:
        def argmax(self):
            return np.int64(3)

    assert Sampler(Options(), [1, 2]).next(Logits()) == 3  # nothing else is asked of them


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 33))
def test_the_best_are_the_first_of_a_stable_sort(values, count):
    values = np.array(values, np.float64)
    assert np.array_equal(_best(values, count), np.argsort(-values, kind="stable")[:count])


def test_log_probabilities_are_of_the_model_s_own_logits():
    logits = LOGITS + 7
    found = logprob(logits, 2, 3)
    assert found.token == 2 and found.value == pytest.approx(np.log(0.05), abs=1e-6)
    assert [x for x, _ in found.best] == [1, 3, 4]
    assert [x for _, x in found.best] == pytest.approx(np.log([0.4, 0.25, 0.2]), abs=1e-6)
    assert logprob(logits, 1, 0).best == ()
    assert logprob(np.float32([-3e38, 3e38]), 1, 2).best[0] == (1, 0.0)
