"""Coverage: values of the cache beyond a calibrated range are counted, by tensor."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import synthetic
from kvgate import contract as c
from kvgate.judging import coverage, explanations
from kvgate.strategies.cpu_managed.host import Host

OF = synthetic.trace()


def boundary(inputs: dict[str, tuple[float, float]], outputs: dict[str, tuple[float, float]] | None = None) -> Any:
    def side(ranges):
        return [{"name": n, "dtype": "int8", "low": a, "high": b} for n, (a, b) in ranges.items()]

    return {"inputs": side(inputs), "outputs": side(outputs or {})}


def measured(ranges):
    host = Host(synthetic.contract(), {}, -1.0)
    return coverage.measure(host, [OF], boundary(ranges))


def test_everything_inside_and_everything_outside():
    low, high = float(OF.states["layers.0.key"].min()), float(OF.states["layers.0.key"].max())
    assert measured({"key.0": (low, high)}) == {"key.0": 0.0}
    assert measured({"key.0": (1e6, 2e6)})["key.0"] == 1.0


def test_the_share_is_of_the_filled_slots():
    expected = float((OF.states["layers.1.value"][: synthetic.CAPACITY] > 1).mean())
    assert measured({"value.1": (-1e9, 1.0)})["value.1"] == pytest.approx(expected, rel=1e-3)


def test_tensors_without_a_range_are_left_out():
    host = Host(synthetic.contract(), {}, -1.0)
    assert coverage.measure(host, [OF], {"inputs": [{"name": "key.0", "low": None}]}) == {}
    assert coverage.measure(host, [OF], {}) == {}


def test_it_is_a_cause_where_it_is_large():
    assert explanations.not_covered(explanations.Evidence({}, outside=("key.3", 0.02))) == (
        "2 % of key.3 lie outside the calibrated range"
    )
    assert explanations.not_covered(explanations.Evidence({}, outside=("key.3", 0.009))) == ""


def scaled(factor: float) -> dict[str, np.ndarray]:
    """The keys of the trace, larger."""
    return {name: x * (factor if name.endswith("key") else 1) for name, x in OF.states.items()}


def boxed(packing: str, layout: str, rank: int) -> Host:
    """A host of another boundary around the same layers, twice as long as the trace."""
    made = synthetic.contract()
    cache = c.Cache(2 * synthetic.TOKENS, layout, rank, packing)
    inputs = c.cache_tensors(cache, made.states, cache.capacity)
    outputs = c.cache_tensors(cache, made.states, 1, ".out")
    return Host(replace(made, cache=cache, inputs=tuple(inputs), outputs=tuple(outputs)), {}, -1.0)


@pytest.mark.parametrize("layout", c.LAYOUTS)
@pytest.mark.parametrize("rank", c.RANKS)
def test_in_every_boundary_empty_slots_do_not_count(layout, rank):
    above = (0.5, 1e9)  # no zero in it: an empty slot would be outside
    expected = {
        "value.1": (OF.states["layers.1.value"] < 0.5).mean(),
        "pair.1": (np.stack([OF.states["layers.1.key"], OF.states["layers.1.value"]]) < 0.5).mean(),
        "values": (np.stack([OF.states[f"layers.{i}.value"] for i in range(synthetic.LAYERS)]) < 0.5).mean(),
    }
    for packing, name in zip(c.PACKINGS, expected, strict=True):
        found = coverage.measure(boxed(packing, layout, rank), [OF], boundary({name: above}, {f"{name}.out": above}))
        assert found == dict.fromkeys((name, f"{name}.out"), pytest.approx(expected[name], rel=1e-3))


def test_a_bound_made_by_another_float32_still_holds_its_value():
    high = float(OF.states["layers.0.key"].max())
    assert measured({"key.0": (-1e9, high * (1 - 1e-6))})["key.0"] == 0.0
    assert measured({"key.0": (-1e9, high * (1 - 1e-4))})["key.0"] > 0.0


SAMPLES = [("a", 0), ("b", 5), ("a", 9), ("a", 22), ("b", 6)]


def test_own_samples_are_counted_slot_by_slot():
    """Against the plain way: every sample's filled slots one by one, and what the step returns."""
    other = replace(OF, states=scaled(3))
    traces = {"a": OF, "b": other, "unused": replace(OF, states=scaled(1e6))}
    host = Host(synthetic.contract(), {}, -1.0)
    found = coverage.own(host, SAMPLES, traces, boundary({"key.2": (-1.0, 1.0)}, {"key.2.out": (-1.0, 1.0)}))
    fed = np.concatenate([traces[text].states["layers.2.key"][:position] for text, position in SAMPLES])
    returned = np.stack([traces[text].states["layers.2.key"][position] for text, position in SAMPLES])
    assert found == {
        "key.2": pytest.approx((abs(fed) > 1).mean(), rel=1e-3),
        "key.2.out": pytest.approx((abs(returned) > 1).mean(), rel=1e-3),
    }
    assert 0.3 < found["key.2"] < found["key.2.out"] < 0.9


def test_samples_of_the_first_position_alone_feed_nothing():
    host = Host(synthetic.contract(), {}, -1.0)
    assert coverage.own(host, [("a", 0)], {"a": OF}, boundary({"key.0": (1e6, 2e6)})) == {}
    assert coverage.own(host, SAMPLES, {"a": OF, "b": OF}, {}) == {}


def test_a_saturated_calibration_is_one_line():
    made = boundary({"key.1": (-12.1, 12.0), "key.2": (-1, 1)}, {"key.1.out": (-3, 2.5)})
    (found,) = coverage.saturated({"key.1": 0.023, "key.2": 0.01, "key.1.out": 0.012}, made, "mmse")
    assert found == {
        "kind": "saturated",
        "text": "calibration: key.1 saturates (the worst of 2 tensors): 2.3 % of its own samples' values lie outside "
        "-12.1..12; try quantized_algorithm normal or more samples",
        "tensor": "key.1",
        "share": 0.023,
        "count": 2,
        "advice": "quantized_algorithm normal or more samples",
    }
    (alone,) = coverage.saturated({"key.1.out": 0.012}, made, "normal")
    assert alone["text"].endswith("1.2 % of its own samples' values lie outside -3..2.5; try more samples")
    assert coverage.saturated({"key.1": coverage.CLIPPED, "key.2": 0.0}, made, "normal") == []


def test_a_saturated_calibration_has_another_remedy():
    plain = explanations.Evidence({}, outside=("key.3", 0.02))
    saturated = {"kind": "saturated", "text": "", "tensor": "key.3", "advice": "quantized_algorithm normal"}
    clipped = replace(plain, findings=[saturated])
    assert explanations.explain(clipped).endswith("the calibrated range; the calibration cuts off its own samples too")
    assert (
        "calibration texts" in explanations.remedy(plain).text
        and "quantized_algorithm normal" in explanations.remedy(clipped).text
    )


def test_the_record_and_the_verdict_have_it_by_tensor(tmp_path):
    """From verify to judge: every quantized tensor's share, and one finding where a red row leaves its ranges."""
    ranges = {"key.0": (-9.0, 9.0), "key.1": (-0.1, 0.1), "value.1": (-1.0, 1.0)}
    build = {"boundary": boundary(ranges, {"value.2.out": (-9.0, 9.0)})}

    def off(seen):
        seen["isolated/layers.1.value"][1] *= 3

    red = synthetic.judged(tmp_path / "red", off, build=build)
    assert set(red["coverage"]) == {*ranges, "value.2.out"}
    assert red["coverage"]["key.0"] == 0.0 and red["coverage"]["key.1"] == pytest.approx(0.92, abs=0.02)
    (found,) = [f for f in red["findings"] if f["kind"] == "not_covered"]
    assert (found["tensor"], found["share"], found["count"]) == ("key.1", red["coverage"]["key.1"], 2)
    assert "lie outside the calibrated range; more than 1 % in 2 tensors" in found["text"]
    assert red["cause"].endswith("% of key.1 lie outside the calibrated range")
    green = synthetic.judged(tmp_path / "green", build=build)
    assert green["verdict"] == "pass" and green["coverage"] == red["coverage"]
    assert not [f for f in green["findings"] if f["kind"] == "not_covered"]  # no error, nothing to explain
    wide = synthetic.judged(tmp_path / "wide", off, build={"boundary": boundary({"key.1": (-9.0, 9.0)})})
    assert not [f for f in wide["findings"] if f["kind"] == "not_covered"] and wide["coverage"] == {"key.1": 0.0}
