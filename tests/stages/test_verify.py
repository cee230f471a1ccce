"""verify: the figures of an observation, against the change that was made to it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import standin
import synthetic
from kvgate import contract as c
from kvgate.judging import compare
from kvgate.observe import observe
from kvgate.strategies.cpu_managed.host import Host
from kvgate.strategies.dynamic_concat.host import Host as Concat

OF = synthetic.trace()


def compared(change=None, of=OF, contract=None):
    seen = synthetic.observation(of)
    if change:
        change(seen)
    return compare.compare(contract or synthetic.contract(), of, seen)


def test_a_perfect_row_is_perfect():
    body, arrays = compared()
    for history, steps in (("isolated", 4), ("forced", 23)):
        figures = body["histories"][history]
        assert figures["steps"] == steps
        assert figures["kv"]["worst"]["value"] == 0
        assert figures["logits"]["raw"]["worst"]["value"] == 0
        assert figures["top1"] == {"equal": steps, "of": steps, "changed": []}
        assert arrays[f"{history}/kv"].shape == (steps, 2 * synthetic.LAYERS)
    assert body["findings"] == []
    assert body["free"]["equal"] == {"0": True, "1": True, "2": True, "3": True, "16": True, "end": True}
    assert body["free"]["diverged"] is None
    assert body["perplexity"] is None


def test_the_worst_delta_is_found_with_layer_tensor_step_and_position():
    def change(seen):
        seen["isolated/layers.1.value"][2] = synthetic.off(seen["isolated/layers.1.value"][2], 0.25)
        seen["isolated/layers.2.key"][1] = synthetic.off(seen["isolated/layers.2.key"][1], 0.1)

    worst = compared(change)[0]["histories"]["isolated"]["kv"]["worst"]
    place = {"state": "layers.1.value", "layer": 1, "tensor": "value", "step": 2, "position": 15}
    assert worst == {"value": pytest.approx(0.25, rel=1e-5)} | place
    states = compared(change)[0]["histories"]["isolated"]["kv"]["states"]
    assert states["layers.2.key"]["worst"] == pytest.approx(0.1, rel=1e-5)
    assert states["layers.0.key"]["worst"] == 0


def test_a_common_offset_of_the_logits_shows_raw_but_not_centred():
    def change(seen):
        seen["forced/logits"] += 1

    logits = compared(change)[0]["histories"]["forced"]["logits"]
    assert logits["raw"]["median"] > 0.3
    assert logits["centred"]["worst"]["value"] < 1e-6


def test_a_changed_token_comes_with_the_reference_margin_and_the_error():
    def change(seen):
        seen["forced/logits"][6, 3] = 99

    changed = compared(change)[0]["histories"]["forced"]["top1"]["changed"]
    assert [(x["step"], x["position"], x["token"]) for x in changed] == [(6, 6, 3)]
    assert changed[0]["reference"] == int(OF.tokens[7])
    assert changed[0]["margin"] == pytest.approx(5, rel=1e-5)
    delta = 99 - OF.logits[6, 3]
    assert changed[0]["error"] == pytest.approx(np.std([delta] + [0] * (synthetic.VOCABULARY - 1)), rel=1e-4)


def test_a_divergence_of_the_free_run():
    def change(seen):
        seen["free/tokens"] = np.append(
            OF.tokens[synthetic.PROMPT :][:2], (OF.tokens[synthetic.PROMPT + 2 :][:3] + 1) % synthetic.VOCABULARY
        )
        seen["free/diverged"] = np.array(2)
        seen["forced/logits"][synthetic.PROMPT + 1, 1] = 50

    free = compared(change)[0]["free"]
    assert free["equal"] == {"0": True, "1": True, "2": False, "3": False, "16": False, "end": False}
    assert (free["diverged"]["step"], free["diverged"]["position"]) == (2, synthetic.PROMPT + 1)
    assert free["diverged"]["margin"] == pytest.approx(5, rel=1e-5)
    assert free["diverged"]["error"] > 1


def test_a_run_cut_by_the_full_cache_is_not_called_a_different_end():
    def change(seen):
        seen["free/tokens"] = OF.tokens[synthetic.PROMPT :][:2]

    equal = compared(change)[0]["free"]["equal"]
    assert equal == {"0": True, "1": True, "2": None, "3": None, "16": None, "end": None}


def test_perplexity_of_a_text_beside_the_reference():
    of = synthetic.trace(text=True)
    body, _ = compared(of=of)
    p = of.logits[:-1] - of.logits[:-1].max(1, keepdims=True)
    p = p - np.log(np.exp(p).sum(1, keepdims=True))
    expected = np.exp(-p[np.arange(23), of.tokens[1:]].mean())
    assert body["perplexity"]["tokens"] == 23
    assert body["perplexity"]["value"] == body["perplexity"]["reference"] == pytest.approx(expected, rel=1e-4)

    def flat(seen):
        seen["forced/logits"][...] = np.arange(synthetic.VOCABULARY) % 2 * 1e-6

    worse, _ = compared(flat, of)
    assert worse["perplexity"]["value"] == pytest.approx(synthetic.VOCABULARY, rel=1e-3)
    assert worse["perplexity"]["reference"] == pytest.approx(expected, rel=1e-4)
    assert worse["perplexity"]["kl"] == worse["histories"]["forced"]["kl"] > 1


def test_a_text_that_only_ran_isolated_has_no_perplexity():
    """Its positions are spread over the context: not the text's perplexity."""
    of = synthetic.trace(text=True)
    seen = {k: v for k, v in synthetic.observation(of).items() if not k.startswith("forced")}
    assert compare.compare(synthetic.contract(), of, seen)[0]["perplexity"] is None


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "nan"), (np.inf, "inf"), (0, "all_zero"), (3, "all_equal")])
def test_strange_outputs_are_findings_and_json_stays_json(value, kind):
    def change(seen):
        seen["forced/layers.1.key"][5:] = value
        seen["forced/layers.2.key"][4:] = value

    body, _ = compared(change)
    found = next(x for x in body["findings"] if x["kind"] == kind)
    assert (found["history"], found["tensor"], found["layer"], found["position"]) == ("forced", "key", 2, 4)
    assert found["count"] == 18 + 19
    json.dumps(body, allow_nan=False)
    if kind in ("nan", "inf"):
        assert body["histories"]["forced"]["kv"]["worst"]["value"] is None
        assert body["histories"]["forced"]["kv"]["states"]["layers.0.key"]["worst"] == 0


def test_nan_in_the_logits_is_the_worst_value():
    def change(seen):
        seen["forced/logits"][3, 7] = np.nan

    body, _ = compared(change)
    assert body["histories"]["forced"]["logits"]["centred"]["worst"] == {"value": None, "step": 3, "position": 3}
    assert [x["kind"] for x in body["findings"]] == ["nan"]
    json.dumps(body, allow_nan=False)


def test_a_zero_reference_is_no_oddity():
    of = synthetic.trace()
    of.states["layers.0.value"][:] = 0
    assert compared(of=of)[0]["findings"] == []


def test_permuted_values_are_named():
    def heads(seen):
        for history in ("isolated", "forced"):
            k = seen[f"{history}/layers.1.key"]
            seen[f"{history}/layers.1.key"] = k.transpose(0, 2, 1).reshape(k.shape)

    found = compared(heads)[0]["findings"]
    assert {x["kind"] for x in found} == {"permuted"}
    assert found[0]["how"] == "written as (channels, heads), read as (heads, channels)"
    assert "values permuted, not imprecise: key of layer 1" in found[0]["text"]


def test_swapped_tensors_and_a_shifted_slot_are_named():
    def swap(seen):
        for history in ("isolated", "forced"):
            seen[f"{history}/layers.0.key"], seen[f"{history}/layers.0.value"] = (
                seen[f"{history}/layers.0.value"],
                seen[f"{history}/layers.0.key"],
            )

    found = compared(swap)[0]["findings"][0]
    assert (found["how"], found["count"]) == ("holds the value of layer 0", 2)

    def shift(seen):
        seen["forced/layers.2.key"] = np.roll(OF.states["layers.2.key"], 1, axis=0)[:23]

    assert compared(shift)[0]["findings"][0]["how"] == "holds position 21 instead of 22"


def test_noise_is_not_called_permuted():
    def change(seen):
        seen["forced/layers.1.key"] = np.random.default_rng(0).normal(size=seen["forced/layers.1.key"].shape)

    assert compared(change)[0]["findings"] == []


def test_nothing_to_compare_raises():
    with pytest.raises(ValueError, match="allowed: at least one step of isolated or forced"):
        compare.compare(synthetic.contract(), OF, {})
    with pytest.raises(ValueError, match=r"lacks forced/layers.2.key"):
        compared(lambda seen: seen.pop("forced/layers.2.key"))
    with pytest.raises(ValueError, match="0 logits for 0 steps"):
        compared(lambda seen: seen.update({"forced/positions": np.array([]), "forced/logits": np.zeros((0, 40))}))


def test_a_missing_history_is_not_passed_over(tmp_path):
    results = synthetic.Results(tmp_path)
    seen = {k: v for k, v in synthetic.observation(OF).items() if not k.startswith("isolated")}
    results.verify("capital", OF, seen, ("forced", "free"))
    with pytest.raises(ValueError, match="lacks the history isolated"):
        results.verify("capital", OF, seen, ("isolated", "forced", "free"))


def test_a_strategy_without_a_cache_has_no_delta():
    contract = synthetic.contract(strategy="recompute", inputs=(), outputs=synthetic.contract().outputs[:1])
    body, arrays = compared(contract=contract)
    assert body["histories"]["forced"]["kv"] is None
    assert arrays["forced/kv"].shape == (23, 0)


def test_the_stage_writes_the_same_bytes_again(tmp_path):
    results = synthetic.Results(tmp_path)
    first = results.verify("capital", OF, synthetic.observation(OF))
    bytes_ = results.path("verify", program="capital").read_bytes()
    assert first == results.verify("capital", OF, synthetic.observation(OF))
    assert bytes_ == results.path("verify", program="capital").read_bytes()
    assert first["kind"] == "chat"


# `differences`, the check's gate, on a numpy decoder behind a real host half

LAYERS = (standin.Layer(2, 4, 4, mask=0), standin.Layer(2, 4, 4, mask=1))
CACHE = c.Cache(capacity=12)
WINDOWS = (None, 3)


def checked(strategy="cpu_managed", half=Host, break_="", spoil=None, engine=standin.Engine):
    contract = standin.contract(strategy, CACHE)
    tables = standin.tables(12)
    reference = standin.Model(LAYERS).generate([1, 2, 3], 6, tables, WINDOWS)
    host = half(contract, tables, -1e4)
    if spoil:
        spoil(host)
    seen = observe(engine(contract, break_), host, reference, ["isolated", "forced", "free"], 4)
    return compare.differences(contract, reference, seen)


@pytest.mark.parametrize(("strategy", "half"), [("cpu_managed", Host), ("dynamic_concat", Concat)])
def test_a_right_graph_does_not_differ(strategy, half):
    facts, found = checked(strategy, half)
    assert found == []
    assert facts["steps"] == facts["top1"] == 4 + 8
    assert 0 < facts["logits_l2"] < 1e-5
    assert facts["kv_l2"] < 1e-5


def shuffled(host):
    original = host.feeds

    def feeds(tokens):
        if host.length > 1:
            for k, _ in standin.pairs(host.views):
                k[[0, 1]] = k[[1, 0]]
        return original(tokens)

    host.feeds = feeds


def late_mask(host):
    original = host.columns

    def columns_():
        seen = original()
        if host.length > 0:
            seen[host.length - 1] = -1
        return seen

    host.columns = columns_


def baked_position(host):
    first = host._rotation(0)
    host._rotation = lambda index: first


@pytest.mark.parametrize("spoil", [shuffled, late_mask, baked_position])
def test_wrong_ways_differ(spoil):
    facts, found = checked(spoil=spoil)
    assert {"logits_l2"} <= {x.get("gate") for x in found}
    assert facts["logits_l2"] > 1e-3
    assert "allowed 0.0001" in found[0]["text"]


def test_a_disturbed_slot_differs():
    _, found = checked("dynamic_concat", Concat, "disturb")
    assert "disturbed" in {x.get("gate") for x in found}


# The first place, and what it looks like


def one_slot_off(host):
    """Each step's K and V go into the slot after their own."""
    original = host.take_cache

    def take_cache(outputs, views, valid):
        taken = original(outputs, views, valid)
        for rows in host.views.values():
            rows[min(host.length + 1, len(rows) - 1)] = rows[host.length]
            rows[host.length] = 0
        return taken

    host.take_cache = take_cache


def no_window(host):
    host.contract = replace(host.contract, windows=(None, None))


class OtherHeads(standin.Engine):
    def layer(self, i, x, rotate):
        q, k, v = super().layer(i, x, rotate)
        return [q, k[::-1], v[::-1]]


class Garbage(standin.Engine):
    """The last slots, which nothing has filled yet, come back full."""

    def step(self, feeds):
        out = super().step(feeds)
        out["key.0.out"][..., -2] = 1e3
        return out


@pytest.mark.parametrize(
    ("change", "place", "said"),
    [
        (
            {"spoil": baked_position},
            ("forced", "kv_l2", 1, 0, "key"),
            "forced: keys of layer 0 turned by other angles than the reference's, from position 1 on",
        ),
        (
            {"engine": OtherHeads},
            ("isolated", "kv_l2", 0, 0, "key"),
            "values permuted, not imprecise: key of layer 0 has its heads permuted: 1, 0, and 1 tensors more",
        ),
        (
            {"spoil": one_slot_off},
            ("forced", "kv_l2", 1, 1, "key"),
            "every step holds with the reference's own cache: what is kept in the slots between steps",
        ),
        (
            {"spoil": no_window},
            ("forced", "logits_l2", 3, None, None),
            "forced: off from position 3 on, the first where the window of 3 tokens hides a slot",
        ),
        (
            {"strategy": "dynamic_concat", "half": Concat, "engine": Garbage},
            ("isolated", "disturbed", 0, None, None),
            "isolated: disturbed ",
        ),
    ],
)
def test_the_first_place_is_named_and_what_it_looks_like(change, place, said):
    """Not the worst one, which lies anywhere; K and V before the logits of the same step."""
    _, found = checked(**change)
    first = found[0]
    assert (first["history"], first["gate"], first["position"], first.get("layer"), first.get("tensor")) == place
    reason = compare.reason(found, isolated=True)
    assert reason.startswith(f"{place[0]}: {place[1]} ")
    assert said in reason


def test_slots_that_changed_are_said_behind_the_first_place():
    class Both(OtherHeads, Garbage):
        pass

    _, found = checked("dynamic_concat", Concat, engine=Both)
    assert found[0]["gate"] == "kv_l2" and "; isolated: disturbed " in compare.reason(found, isolated=True)


def test_partial_and_split_rotations_are_recognised_and_noise_is_not():
    rng = np.random.default_rng(0)
    of = synthetic.trace()
    flat = np.linspace(0, 2, 23)[:, None, None]  # angles, none at position 0

    def turn(k, count, halves):
        got = k.copy()
        at = [(i, i + count // 2) if halves else (2 * i, 2 * i + 1) for i in range(count // 2)]
        for a, b in at:
            x, y = k[..., a : a + 1], k[..., b : b + 1]
            got[..., a : a + 1], got[..., b : b + 1] = (
                x * np.cos(flat) - y * np.sin(flat),
                x * np.sin(flat) + y * np.cos(flat),
            )
        return got

    def kinds(change):
        seen = synthetic.observation(of)
        seen["forced/layers.0.key"] = change(seen["forced/layers.0.key"])
        _, found = compare.differences(synthetic.contract(), of, seen)
        return {x["kind"] for x in found}

    for count in (8, 4):
        for halves in (True, False):
            assert "rotation" in kinds(lambda k, n=count, h=halves: turn(k, n, h)), (count, halves)
    assert "rotation" not in kinds(lambda k: k + 0.3 * rng.normal(size=k.shape).astype(np.float32))
    assert "rotation" not in kinds(lambda k: 1.1 * k)


# Steps are counted


def counted(change=None, of=OF, histories=("isolated", "forced", "free")):
    seen = synthetic.observation(of)
    if change:
        change(seen)
    return compare.counted(synthetic.contract(), of, seen, histories, synthetic.ISOLATED)


def test_steps_are_counted_at_their_positions():
    assert counted() == {
        "isolated": {"got": 4, "of": 4},
        "forced": {"got": 23, "of": 23},
        "free": {"got": 19, "of": 19},
    }

    def cut(seen):
        seen["forced/positions"] = seen["forced/positions"][:2]
        seen["isolated/positions"] = np.array([0, 7, 8, 22])
        seen["free/tokens"] = seen["free/tokens"][:3]

    assert {name: x["got"] for name, x in counted(cut).items()} == {"isolated": 2, "forced": 2, "free": 3}
    assert "free" not in counted(of=synthetic.trace(text=True))


def test_a_free_run_of_its_own_may_end_before_the_reference():
    def own(seen, token):
        seen["free/tokens"], seen["free/diverged"] = np.array([OF.tokens[synthetic.PROMPT], token]), np.array(1)

    assert counted(lambda seen: own(seen, OF.end_ids[0]))["free"] == {"got": 2, "of": 2}
    assert counted(lambda seen: own(seen, (OF.end_ids[0] + 1) % 40))["free"] == {"got": 2, "of": 19}
