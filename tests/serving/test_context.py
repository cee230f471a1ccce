"""One context for several conversations: what is kept, and that nobody can tell from the tokens."""

import dataclasses

import numpy as np
import pytest
import tinyrow
from graphs import Model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvgate.serving.bundled import Bundle
from kvgate.serving.context import Options, Run
from kvgate.serving.kept import MOST, Kept, common
from kvgate.serving.pieces import pieces
from test_generate import STRATEGIES, context_of, generated

SYSTEM = [40, 41, 42, 43, 44, 45]
FEW = Options(max_tokens=4)


@pytest.fixture(scope="module")
def folders(rows):
    return {x: Model(rows.results, "tiny").export(x, capacity=tinyrow.CAPACITY).folder for x in STRATEGIES}


class Turns:
    """A conversation: what a client sends, turn by turn."""

    def __init__(self, context, ids):
        self.context, self.ids, self.runs = context, list(ids), []

    def say(self, more=()):
        self.ids += more
        run = generated(self.context, self.ids, FEW)
        self.runs.append((list(self.ids), run))
        self.ids += run.tokens
        return run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_conversations_in_turns_reuse_all_that_they_had(folders, strategy):
    context = context_of(folders[strategy])
    one, two = Turns(context, [*SYSTEM, 1, 2, 3]), Turns(context, [*SYSTEM, 9, 8])
    assert one.say().reused == 0
    assert two.say().reused == len(SYSTEM)
    for n in range(3):
        for turns in (one, two):
            had = len(turns.ids) - 1  # the last token of an answer was never fed
            assert turns.say([20 + n, 7]).reused == had
    fresh = context_of(folders[strategy], engine=context.engine)
    for ids, run in (*one.runs, *two.runs):
        fresh.fed, fresh.kept = [], Kept(0)
        assert generated(fresh, ids, FEW).tokens == run.tokens


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=5)), max_size=9
    ),
    keep=st.sampled_from([0, 20_000, 1 << 20]),
    strategy=st.sampled_from(STRATEGIES),
)
def test_any_order_of_conversations_gives_a_fresh_context_s_answers(folders, data, keep, strategy):
    context = context_of(folders[strategy])
    context.kept = Kept(keep)
    fresh = context_of(folders[strategy], engine=context.engine)
    talks = {n: [*SYSTEM[: 2 * n + 1]] for n in range(3)}
    for who, again, words in data:
        ids = ([] if again else talks[who]) + words
        ids = ids[: tinyrow.CAPACITY - 4]
        run = generated(context, ids, FEW)
        cache = [x[: context.host.length].copy() for x in context.host.views.values()]
        fresh.fed, fresh.kept = [], Kept(0)
        alone = generated(fresh, ids, FEW)
        assert run.tokens == alone.tokens and alone.reused == 0 and run.reused < len(ids)
        for mine, theirs in zip(cache, fresh.host.views.values(), strict=True):
            assert np.array_equal(mine, theirs[: len(mine)])  # to the bit
        assert context.kept.size <= keep
        talks[who] = ids + run.tokens


def test_what_is_reused_is_not_computed(folders):
    context, steps = context_of(folders["cpu_managed"]), []
    context.heed = lambda: steps.append(1)
    one, two = Turns(context, [*SYSTEM, 1, 2]), Turns(context, [9, 8, 7])
    one.say()
    two.say()
    steps.clear()
    run = one.say([5])
    assert run.reused == len(SYSTEM) + 2 + 3 and len(steps) == 2 + 3  # the answer's last token and 5; three of four


def test_another_answer_to_the_same_prompt_pushes_nothing_out(folders):
    context = context_of(folders["cpu_managed"])
    first = Turns(context, [1, 2, 3])
    first.say()
    for seed in range(5):
        run = generated(context, [*SYSTEM, 9], dataclasses.replace(FEW, temperature=1.5, seed=seed))
        assert run.reused == (len(SYSTEM) if seed else 0)
        assert len(context.kept.conversations) == 1
    assert first.say([4]).reused == 6


def test_the_memory_has_a_limit_and_the_oldest_goes_first():
    views = {f"layers.0.{x}": np.ones((8, 1, 4), np.float32) for x in ("key", "value")}  # 32 bytes a token
    kept = Kept(32 * 7)
    kept.save([1, 2, 3], views)
    kept.save([4, 5, 6], views)
    assert kept.best([1, 2, 9])[1] == 2
    kept.load(kept.best([1, 2, 9])[0], 2, views)  # used last
    kept.save([7, 8], views)
    assert [x.tokens for x in kept.conversations] == [[1, 2, 3], [7, 8]] and kept.size == 32 * 5
    kept.save([1, 2, 3, 4], views)  # goes on from one that is there
    assert [x.tokens for x in kept.conversations] == [[7, 8], [1, 2, 3, 4]]
    kept.save(list(range(8)), views)  # larger than all the memory: the others stay
    assert [x.tokens for x in kept.conversations] == [[7, 8], [1, 2, 3, 4]]
    assert kept.best([5]) == (None, 0)
    views["layers.0.key"][...] = 5
    assert (kept.conversations[0].slots["layers.0.key"] == 1).all()  # copies


def test_their_number_has_a_limit_too():
    views = {f"layers.0.{kind}": np.ones((8, 1, 4), np.float32) for kind in ("key", "value")}
    kept = Kept(1 << 30)
    for n in range(MOST + 3):
        kept.save([n], views)
    assert [x.tokens for x in kept.conversations] == [[n] for n in range(3, MOST + 3)]
    assert kept.best([2]) == (None, 0) and kept.best([3])[1] == 1


def test_one_that_has_to_go_for_the_present_one_is_still_taken_up(folders):
    context = context_of(folders["cpu_managed"])
    one, two = Turns(context, [1, 2, 3, 4]), Turns(context, [9, 8, 7, 6])
    one.say()
    size = sum(x[: len(context.fed)].nbytes for x in context.host.views.values())
    context.kept = Kept(size)  # room for one
    two.say()
    run = one.say([5])
    assert run.reused == 7 and [x.tokens[0] for x in context.kept.conversations] == [9]
    fresh = context_of(folders["cpu_managed"], engine=context.engine)
    assert generated(fresh, one.runs[-1][0], FEW).tokens == run.tokens


def test_common():
    assert [common(*x) for x in (([], [1]), ([1], [1]), ([1, 2], [1, 3]), ([1, 2], [1, 2, 3]))] == [0, 1, 1, 2]


# Options that reach the answer


def test_log_probabilities_come_with_the_tokens(rows, folders):
    context = context_of(folders["cpu_managed"])
    plain = generated(context, rows.prompt, FEW)
    run = generated(context, rows.prompt, dataclasses.replace(FEW, logprobs=2))
    assert run.tokens == plain.tokens == [x.token for x in run.logprobs] and plain.logprobs == []
    for x in run.logprobs:  # greedy: the token is the likeliest one
        assert x.best[0] == (x.token, x.value) and x.best[0][1] > x.best[1][1] and x.value < 0


def test_penalties_and_bias_change_the_answer(rows, folders):
    context = context_of(folders["cpu_managed"])
    plain = generated(context, rows.prompt, FEW).tokens
    run = generated(context, rows.prompt, dataclasses.replace(FEW, bias={plain[0]: -100.0}))
    assert run.tokens[0] != plain[0]
    with pytest.raises(ValueError, match="token id: got 300, allowed: 0 to 299"):
        context.check(rows.prompt, Options(bias={300: 1.0}))


@pytest.mark.parametrize("stops", [[], ["never"], "cut"])
def test_pieces_have_their_tokens_log_probabilities(rows, bundle, folders, stops):
    text, context = Bundle(bundle).text(), context_of(folders["cpu_managed"])
    stops = [rows.trace["text"][4:6]] if stops == "cut" else stops
    run = Run(len(rows.prompt))
    options = Options(max_tokens=12, logprobs=0)
    found = list(pieces(context, text, rows.prompt, options, stops, run))
    said = "".join(x.text for x in found)
    whole = rows.trace["text"]
    end = whole.find(stops[0]) if stops and stops[0] in whole else len(whole)
    assert said == whole[:end] and run.finish == ("stop" if end < len(whole) else "length")
    told = [y.token for x in found for y in x.logprobs]
    assert told == run.tokens[: len(told)]
    if end == len(whole):
        assert told == run.tokens
    else:  # those of the stop string itself are not told
        assert text.decode(told).startswith(said) and len(told) < len(run.tokens)
