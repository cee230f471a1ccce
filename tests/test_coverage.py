"""Coverage: values of the cache beyond a calibrated range are counted, by tensor."""

import pytest
import synthetic
from kvgate import causes, coverage
from kvgate.strategies.cpu_managed.host import Host

OF = synthetic.trace()


def measured(ranges):
    host = Host(synthetic.contract(), {}, -1.0)
    return coverage.measure(host, [OF], {"inputs": [{"name": n, "low": a, "high": b} for n, (a, b) in ranges.items()]})


def test_everything_inside_and_everything_outside():
    low, high = float(OF.keys[0].min()), float(OF.keys[0].max())
    assert measured({"key.0": (low, high)}) == {"key.0": 0.0}
    assert measured({"key.0": (1e6, 2e6)})["key.0"] >= 1.0  # empty slots too: zero does not lie in this one


def test_the_share_is_of_the_filled_slots():
    expected = float((OF.values[1] > 1).mean())
    assert measured({"value.1": (-1e9, 1.0)})["value.1"] == pytest.approx(expected, rel=1e-3)


def test_tensors_without_a_range_are_left_out():
    host = Host(synthetic.contract(), {}, -1.0)
    assert coverage.measure(host, [OF], {"inputs": [{"name": "key.0", "low": None}]}) == {}
    assert coverage.measure(host, [OF], {}) == {}


def test_it_is_a_cause_where_it_is_large():
    assert causes.not_covered(causes.Evidence({}, outside=("key.3", 0.02))) == (
        "2 % of key.3 lie outside the calibrated range"
    )
    assert causes.not_covered(causes.Evidence({}, outside=("key.3", 0.009))) == ""
