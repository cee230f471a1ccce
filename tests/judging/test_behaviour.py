"""Behaviour: several texts count as one, and what is not finite does not behave."""

import math

import pytest
from kvgate.judging import behaviour

LIMITS = {"perplexity": 1.05, "top1": 0.95}


def text(value, reference=10.0, tokens=100, equal=100, kl=0.01):
    perplexity = {"value": value, "reference": reference, "tokens": tokens, "kl": kl}
    return {"perplexity": perplexity, "histories": {"forced": {"top1": {"equal": equal, "of": tokens}}}}


CHAT = {"perplexity": None, "histories": {"forced": {"top1": {"equal": 0, "of": 9}}}}


def measure(*texts):
    return behaviour.measure({str(n): x for n, x in enumerate((*texts, CHAT))}, LIMITS)


def test_texts_count_by_their_tokens():
    found = measure(text(20.0, tokens=300, equal=300), text(5.0, tokens=100, equal=80))
    assert found["perplexity"] == pytest.approx(math.exp(0.75 * math.log(20) + 0.25 * math.log(5)), rel=1e-5)
    assert (found["tokens"], found["reference"], found["top1"]) == (400, 10.0, 0.95)


@pytest.mark.parametrize(
    ("one", "behaves"),
    [
        (text(10.5), True),
        (text(10.51), False),
        (text(10.0, equal=95), True),
        (text(10.0, equal=94), False),
        (text(9.0), True),
        (text(None), False),
    ],
)
def test_the_limits(one, behaves):
    assert measure(one)["behaves"] is behaves


def test_no_text_no_behaviour():
    assert measure() is None


def verdict(word="fail", behaves=True, **gates):
    """A verdict with these gates beside a K/V gate that broke."""
    found = [{"name": name, "verdict": how} for name, how in {"kv_l2": "fail", **gates}.items()]
    return {"verdict": word, "gates": found, "figures": {"behaviour": {"behaves": behaves}}}


@pytest.mark.parametrize(
    ("row", "ships"),
    [
        (verdict("pass"), "pass"),
        (verdict("warn"), "warn"),
        (verdict(tokens="pass"), "behaves"),
        (verdict(tokens="warn"), "behaves"),  # left at a near tie
        (verdict(), "behaves"),  # no free run: the texts alone
        (verdict(tokens="pass", logits_l2="fail", top1="fail", disturbed="fail"), "behaves"),
        (verdict(tokens="fail"), ""),
        (verdict(nan="fail"), ""),
        (verdict(permuted="fail"), ""),
        (verdict(selftest="fail"), ""),
        (verdict(run="fail"), ""),
        (verdict(behaves=False, tokens="pass"), ""),
        (verdict("fail") | {"figures": {"behaviour": None}}, ""),
        ({"verdict": "blocked", "gates": [], "figures": {}}, ""),
    ],
)
def test_as_what_a_row_ships(row, ships):
    assert behaviour.ships(row) == ships
