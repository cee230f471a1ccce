"""judge: each gate holding and breaking, the reason, and the first place."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from kvgate.jobs import record
from kvgate.judging import behaviour, compare, explanations, gate, gates, operator_errors
from kvgate.planning import config
from synthetic import judged, off

OF = synthetic.trace()


def names(verdict, level):
    return {g["name"] for g in verdict["gates"] if g["verdict"] == level}


def test_a_perfect_row_passes_every_gate(tmp_path):
    verdict = judged(tmp_path)
    assert verdict["verdict"] == "pass"
    assert verdict["reason"] == "all 9 gates hold"
    assert verdict["first"] is None
    assert names(verdict, "pass") == {"kv_l2", "disturbed", "logits_l2", "top1", "tokens"}
    assert verdict["row"] == synthetic.ROW
    assert verdict["announce"] == "pass    tiny cpu_managed fp16 rk3576 (simulator): all 9 gates hold"


def scale(tensor, error, step=1, history="isolated"):
    def change(seen):
        seen[f"{history}/{tensor}"][step] = off(seen[f"{history}/{tensor}"][step], error)

    return change


@pytest.mark.parametrize(
    ("error", "expected"), [(0.0049, "pass"), (0.0051, "warn"), (0.0099, "warn"), (0.0101, "fail")]
)
def test_kv_gate(tmp_path, error, expected):
    verdict = judged(tmp_path, scale("layers.1.value", error))
    assert verdict["verdict"] == expected
    if expected != "pass":
        place = {k: verdict["first"][k] for k in ("stage", "gate", "history", "layer", "tensor", "step", "position")}
        assert place == {
            "stage": "verify",
            "gate": "kv_l2",
            "history": "isolated",
            "layer": 1,
            "tensor": "value",
            "step": 1,
            "position": 7,
        }
        limit = "1.00 %" if expected == "fail" else "0.50 %"
        assert (
            f"K/V delta {error:.2%}, allowed {limit} at layer 1 value, position 7".replace("%,", " %,")
            in (verdict["reason"])
        )


@pytest.mark.parametrize(("error", "expected"), [(0.0049, "pass"), (0.0051, "fail")])
def test_logits_gate(tmp_path, error, expected):
    verdict = judged(tmp_path, scale("logits", error, step=8, history="forced"))
    assert verdict["verdict"] == expected
    if expected == "fail":
        assert (verdict["first"]["gate"], verdict["first"]["position"]) == ("logits_l2", 8)


def test_an_offset_breaks_the_raw_measure_only(tmp_path):
    def change(seen):
        for history in ("isolated", "forced"):
            seen[f"{history}/logits"] += 0.5

    assert judged(tmp_path, change)["verdict"] == "pass"
    results = synthetic.Results(tmp_path)
    raw = results.judge(synthetic.THRESHOLDS | {"logits_measure": "raw"})
    assert raw["verdict"] == "fail"
    assert "logits (raw)" in raw["reason"]


@pytest.mark.parametrize(("value", "expected"), [(0.004, "pass"), (0.006, "warn"), (1.41, "fail")])
def test_slots_that_should_be_as_fed(tmp_path, value, expected):
    def change(seen):
        seen["forced/disturbed"][7] = value

    verdict = judged(tmp_path, change)
    assert verdict["verdict"] == expected
    if expected == "fail":
        assert verdict["first"]["gate"] == "disturbed"
        assert verdict["reason"].startswith("slots that the step does not write came back changed; other slots 141 %")


def swapped(seen, margin, noise):
    """Generated step 2: another token wins by a hair; the reference's margin there is `margin`, the error `noise`."""
    position = synthetic.PROMPT + 1
    row = seen["forced/logits"][position]
    best = int(OF.tokens[position + 1])
    other = (best + 1) % synthetic.VOCABULARY
    row += noise * np.where(np.arange(synthetic.VOCABULARY) % 2, 1, -1)
    row[other] = row[best] + 0.01
    seen["free/tokens"] = np.append(OF.tokens[synthetic.PROMPT :][:2], [other] * 17)
    seen["free/diverged"] = np.array(2)


def near(margin, noise, tmp_path, thresholds=None):
    """A trace whose margin at that step is `margin`."""
    of = synthetic.trace()
    position = synthetic.PROMPT + 1
    best = int(of.tokens[position + 1])
    of.logits[position, (best + 1) % synthetic.VOCABULARY] = of.logits[position, best] - margin
    results = synthetic.Results(tmp_path)
    seen = synthetic.observation(of)
    swapped(seen, margin, noise)
    results.verify("capital", of, seen)
    loose = synthetic.THRESHOLDS | {"logits_l2": {"pass": 1, "warn": 1}}
    return results.judge(loose)


def test_a_near_tie_warns(tmp_path):
    verdict = near(0.1, 0.3, tmp_path)
    assert verdict["verdict"] == "warn"
    assert names(verdict, "warn") == {"top1", "tokens"}
    assert "near tie: token" in verdict["reason"]
    assert verdict["figures"]["diverged"]["step"] == 2
    assert verdict["figures"]["diverged"]["margin"] == pytest.approx(0.1, rel=1e-3)


def test_a_change_beyond_the_error_fails(tmp_path):
    verdict = near(0.1, 0.001, tmp_path)
    assert verdict["verdict"] == "fail"
    assert names(verdict, "fail") == {"top1", "tokens"}
    assert "near tie" not in verdict["reason"]


def test_an_end_that_differs_fails_without_a_divergence(tmp_path):
    def change(seen):
        seen["free/tokens"] = np.append(seen["free/tokens"], 3)

    assert judged(tmp_path, change)["verdict"] == "fail"


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "nan"), (np.inf, "inf"), (0, "all_zero"), (3, "all_equal")])
def test_strange_outputs_fail_by_their_own_name(tmp_path, value, kind):
    def change(seen):
        seen["forced/logits"][9] = value

    verdict = judged(tmp_path, change)
    assert verdict["verdict"] == "fail"
    assert kind in names(verdict, "fail")
    assert verdict["first"]["position"] == 9


def test_a_permuted_tensor_is_the_reason(tmp_path):
    def change(seen):
        for history in ("isolated", "forced"):
            k = seen[f"{history}/layers.1.key"]
            seen[f"{history}/layers.1.key"] = k.transpose(0, 2, 1).reshape(k.shape)

    verdict = judged(tmp_path, change)
    assert verdict["reason"].startswith("values permuted, not imprecise: key of layer 1 written as (channels, heads)")
    assert (verdict["first"]["gate"], verdict["first"]["layer"]) == ("kv_l2", 1)


@pytest.mark.parametrize("history", ["isolated", "forced"])
def test_a_history_that_is_there_and_short_fails_by_its_count(tmp_path, history):
    def cut(seen):
        for name in seen:
            if name.startswith(f"{history}/"):
                seen[name] = seen[name][:2]

    verdict = judged(tmp_path, cut)
    assert verdict["verdict"] == "fail"
    of = {"isolated": 4, "forced": 23}[history]
    assert verdict["reason"] == f"2 of {of} steps compared at {history} run of capital"
    assert verdict["cause"] == "" and behaviour.ships(verdict) == ""


def test_a_free_run_that_stopped_early_fails_by_its_count(tmp_path):
    verdict = judged(tmp_path, lambda seen: seen.update({"free/tokens": seen["free/tokens"][:5]}))
    assert "5 of 19 tokens compared" in [g["text"] for g in verdict["gates"]]


def test_metrics_with_fewer_steps_than_they_say_fail():
    seen = synthetic.observation(OF)
    body, arrays = compare.compare(synthetic.contract(), OF, seen)
    body["steps"] = compare.counted(synthetic.contract(), OF, seen, ("isolated", "forced"), synthetic.ISOLATED)
    assert {g.verdict for g in gates.judge("capital", body, arrays, synthetic.THRESHOLDS)} == {"pass"}
    cut = {k: v[:2] if k.startswith("forced/") else v for k, v in arrays.items()}
    failed = [g for g in gates.judge("capital", body, cut, synthetic.THRESHOLDS) if g.verdict == "fail"]
    assert [(g.name, g.text, g.history) for g in failed] == [("compared", "2 of 23 steps compared", "forced")]


def test_a_row_whose_own_cache_was_not_run_to_its_last_slot_is_red(tmp_path):
    """Nor is one of isolated steps only: nobody has seen what its host half writes."""
    results = synthetic.Results(tmp_path)
    seen = {k: v for k, v in synthetic.observation(OF).items() if k.startswith("isolated/")}
    results.verify("capital", OF, seen, ("isolated",))
    integers = [{"name": t.name, "dtype": "int8"} for t in synthetic.contract().cache_inputs()]
    results.built(synthetic.BUILD | {"boundary": {"inputs": integers}})  # no cause of this
    verdict = results.judge()
    assert verdict["cause"] == ""
    said = "own cache reached slot 0 of 23; a forced text of 23 tokens reaches the last"
    assert (verdict["verdict"], verdict["reason"]) == ("fail", said)
    assert verdict["first"]["gate"] == "capacity" and behaviour.ships(verdict) == ""
    short = synthetic.trace(tokens=20)
    results.verify("capital", short, synthetic.observation(short))
    assert results.judge()["reason"] == said.replace("slot 0", "slot 19")
    results.verify("market", OF, synthetic.observation(OF))  # another program's reaches it
    assert results.judge()["verdict"] == "pass"


def test_a_cache_that_no_graph_keeps_has_no_last_slot(tmp_path):
    results = synthetic.Results(tmp_path)
    made = synthetic.contract()
    results.contract(synthetic.contract(strategy="recompute", inputs=made.inputs[:2], outputs=made.outputs[:1]))
    seen = {k: v for k, v in synthetic.observation(OF).items() if k.startswith("isolated/")}
    results.verify("capital", OF, seen, ("isolated",))
    assert results.judge()["verdict"] == "pass"


def test_a_row_without_a_comparison_fails(tmp_path):
    results = synthetic.Results(tmp_path)
    verdict = results.judge()
    assert (verdict["verdict"], verdict["reason"]) == ("fail", "no comparison was made")


def test_the_first_place_is_isolated_before_forced_and_early_before_late(tmp_path):
    def change(seen):
        scale("layers.0.key", 0.5, step=2, history="forced")(seen)
        scale("layers.2.value", 0.1, step=3)(seen)
        scale("layers.1.value", 0.1, step=2)(seen)
        scale("layers.2.key", 0.9, step=2)(seen)

    first = judged(tmp_path, change)["first"]
    assert (first["history"], first["step"], first["layer"], first["tensor"]) == ("isolated", 2, 1, "value")
    assert first["value"] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("stage", ["export", "check", "build", "verify"])
def test_a_blocked_input_blocks_the_row_for_its_reason(tmp_path, stage):
    results = synthetic.Results(tmp_path)
    results.verify("capital", OF, synthetic.observation(OF))
    body = {"status": "blocked", "reason": "build: no memory", "findings": [{"kind": "error", "text": "x"}]}
    results.write(stage, body | ({"blocked_by": "trace"} if stage == "verify" else {}))
    verdict = results.judge()
    assert (verdict["verdict"], verdict["reason"]) == ("blocked", "build: no memory")
    assert verdict["first"] == {"stage": "trace" if stage == "verify" else stage}
    assert verdict["findings"] == body["findings"]
    assert verdict["announce"] == "blocked tiny cpu_managed fp16 rk3576 (simulator): build: no memory"


def test_no_reason_is_ever_empty(tmp_path):
    results = synthetic.Results(tmp_path)
    results.write("build", {"status": "blocked", "reason": "", "findings": []})
    assert results.judge()["reason"] == "build gave no reason"


def test_a_float16_row_says_the_models_own_limit_and_others_do_not(tmp_path):
    def reason(folder, dtype, error):
        results = synthetic.Results(tmp_path / folder)
        check = record.read(results.path("check"))
        results.write("check", check | {"float16": {"kv_l2": 0.0039, "logits_l2": 0.0035}})
        contract = results.path("build").with_name("contract.json")
        identity = record.read(contract)["identity"]
        record.write(contract, {"identity": identity | {"quant": dtype}})
        seen = synthetic.observation(OF)
        seen["isolated/layers.1.key"][1] = synthetic.off(seen["isolated/layers.1.key"][1], error)
        results.verify("capital", OF, seen)
        verdict = results.judge()
        assert verdict["figures"]["float16"] == {"kv_l2": 0.0039, "logits_l2": 0.0035}
        return verdict["reason"]

    said = "; float16's own limit for this model: K/V 0.39 %, logits 0.35 %"
    assert reason("warns", {}, 0.007).endswith(said)
    assert reason("fails", {}, 0.07).endswith(said)
    assert said not in reason("passes", {}, 0.0)
    assert said not in reason("int8", {"config": {"quantized_dtype": "w8a8"}}, 0.07)


def test_findings_risks_and_figures_are_carried_over(tmp_path):
    verdict = judged(tmp_path, build={"findings": [{"kind": "unknown_target", "text": "2 operators"}]})
    assert verdict["risks"] == synthetic.BUILD["risks"]
    assert verdict["findings"] == [{"kind": "unknown_target", "text": "2 operators"}]
    figures = verdict["figures"]
    assert figures["history_bytes"] == 4 * 3 * 2 * synthetic.CAPACITY * 2 * 8  # float32: the build names no boundary
    assert figures["top1_equal"] == figures["top1_of"] == 27
    assert figures["tokens"] == dict.fromkeys(("0", "1", "2", "3", "16", "end"), "1/1")


def test_bytes_follow_the_artifacts_boundary(tmp_path):
    names_ = [t.name for t in synthetic.contract().cache_inputs()]
    build = {"boundary": {"inputs": [{"name": n, "dtype": "float16"} for n in names_]}}
    assert judged(tmp_path, build=build)["figures"]["history_bytes"] == 2 * 3 * 2 * synthetic.CAPACITY * 2 * 8


def test_bytes_of_a_boundary_of_several_dtypes_are_their_sum(tmp_path):
    first, *rest = [t.name for t in synthetic.contract().cache_inputs()]
    outputs = [t.name for t in synthetic.contract().cache_outputs()]
    build = {
        "boundary": {
            "inputs": [{"name": first, "dtype": "float16"}, *({"name": n, "dtype": "int8"} for n in rest)],
            "outputs": [{"name": n, "dtype": "float16"} for n in outputs],
        }
    }
    found = judged(tmp_path, build=build)["figures"]
    one = synthetic.CAPACITY * 2 * 8  # values of a cache tensor
    assert found["history_bytes"] == one * 2 + one * len(rest)
    assert found["delta_bytes"] == 2 * 2 * 8 * len(outputs)


def test_a_moved_threshold_changes_the_verdict_from_the_same_metrics(tmp_path):
    verdict = judged(tmp_path, scale("layers.1.value", 0.02))
    assert verdict["verdict"] == "fail"
    results = synthetic.Results(tmp_path)
    moved = synthetic.THRESHOLDS | {"kv_l2": {"pass": 0.03, "warn": 0.05}}
    assert results.judge(moved)["verdict"] == "pass"


# Causes: found by evidence


RANGE = [{"kind": "fp16_range", "text": "61 values left float16, the first in pow-rs"}]


def zeros_from_layer_1(seen):
    for history in ("isolated", "forced"):
        seen[f"{history}/logits"][...] = 0
        for layer in (1, 2):
            for name in ("key", "value"):
                seen[f"{history}/layers.{layer}.{name}"][...] = 0


def test_an_unfused_norm_beyond_float16_is_the_cause(tmp_path):
    build = {"findings": RANGE, "cpu_operators": {"Div": 61, "Gather": 1, "Sqrt": 61}}
    verdict = judged(tmp_path, zeros_from_layer_1, build=build)
    assert verdict["verdict"] == "fail"
    assert verdict["cause"] == (
        "values leave float16's range in norms that were not fused (61 Div, 61 Sqrt on the CPU): "
        "their outputs are zero, first in layer 1"
    )
    assert verdict["reason"].startswith(verdict["cause"])
    assert (verdict["first"]["layer"], verdict["first"]["position"]) == (1, 0)


@pytest.mark.parametrize(
    "build", [{"findings": RANGE}, {"cpu_operators": {"Div": 61}}, {"findings": RANGE, "cpu_operators": {"Gather": 2}}]
)
def test_half_the_evidence_is_not_that_cause(tmp_path, build):
    assert "norm" not in judged(tmp_path, zeros_from_layer_1, build=build)["reason"]


def test_a_range_warning_alone_does_not_colour_a_row(tmp_path):
    assert judged(tmp_path, build={"findings": RANGE, "cpu_operators": {"Div": 61}})["verdict"] == "pass"


def test_only_the_first_token(tmp_path):
    verdict = judged(tmp_path, scale("layers.1.value", 0.0087, step=0))
    assert verdict["verdict"] == "warn"
    assert verdict["reason"].startswith(
        "only the first token, whose cache is empty: the arithmetic, not the cache; K/V"
    )
    later = judged(tmp_path / "later", lambda seen: [scale("layers.1.value", 0.0087, step=n)(seen) for n in (0, 2)])
    assert "only the first token" not in later["reason"]


def test_errors_that_only_add_up(tmp_path):
    change = scale("layers.2.key", 0.2, step=20, history="forced")
    verdict = judged(tmp_path, change)
    assert verdict["cause"] == (
        "the arithmetic of fp16, not the cache: 2e-06 in float32; every step tried holds "
        "with the reference's cache, the rounding adds up"
    )
    results = synthetic.Results(tmp_path)
    results.write("check", {"status": "ok", "findings": [], "programs": {}})
    assert results.judge()["cause"] == "steps hold with the reference's cache, errors add up with the own one"
    verdict = judged(tmp_path / "own", scale("layers.2.key", 0.2))
    assert verdict["cause"] == "off with the reference's own cache: the arithmetic of fp16"


def test_a_cache_that_was_touched_is_not_acquitted(tmp_path):
    def change(seen):
        scale("layers.2.key", 0.2, step=20, history="forced")(seen)
        seen["forced/disturbed"][21] = 0.2

    assert "not the cache" not in judged(tmp_path, change)["reason"]


def evidence(**changes):
    first = {"gate": "kv_l2", "history": "isolated", "position": 90}
    return explanations.Evidence(
        **({"first": first, "broken": [("isolated", 90)], "steps": [("isolated", 90)]} | changes)
    )


def test_angles_in_the_graph():
    drift = {"early": 0.002, "late": 0.015}
    assert "grows with the position (0.2 % early, 1.5 % late)" in explanations.explain(evidence(roles=["ids"], **drift))
    assert "grows" not in explanations.explain(evidence(roles=["rotation"], **drift))
    assert "grows" not in explanations.explain(evidence(roles=["ids"], early=0.002, late=0.003))


def test_integers_at_the_boundary():
    assert explanations.explain(evidence(boundary=["float16", "int8"], mask=-100.0)) == "activations and cache are int8"
    coarse = explanations.explain(evidence(boundary=["int8"], mask=-1e4))
    assert coarse == "activations and cache are int8, and the mask of -10000 leaves scores no resolution"
    assert "mask" not in explanations.explain(evidence(boundary=["float16"], mask=-1e4))


@pytest.mark.parametrize(
    ("dtype", "weights", "quant", "told"),
    [
        ("w8a8", "plain", "w8a8", True),
        ("w8a8", "int8", "w8a8", True),
        ("w8a8", "plain", "w8a8_outliers", True),
        ("w8a8", "int8", "w8a8_outliers", False),
        ("w8a8", "int8_fold", "w8a8_outliers", False),
        ("w16a16i_dfp", "int8", "w16a16i_outliers", False),
        ("w4a16", "gptq_g32", "w4a16_g32", True),
        ("w4a16", "split_g32", "w4a16_g32_split2", False),
        ("fp16", "plain", "fp16", False),  # nothing is known against it
    ],
)
def test_no_remedy_is_what_the_row_has(dtype, weights, quant, told):
    remedy = explanations.remedy(evidence(boundary=["int8"], dtype=dtype))
    assert bool(remedy.beyond({"weights": weights, "quant": quant})) is told


def test_a_remedy_of_weights_alone_whatever_the_quant():
    remedy = explanations.remedy(evidence(findings=[{"kind": "nan", "text": ""}]))
    assert "scaled" in remedy.beyond({"weights": "plain", "quant": "fp16"})
    assert remedy.beyond({"weights": "scaled", "quant": "w8a8"}) == ""


def test_only_an_order_of_axes_is_against_rank_4():
    def remedy(how):
        text = f"isolated: values permuted, not imprecise: key of layer 0 {how}"
        return explanations.remedy(evidence(findings=[{"kind": "permuted", "text": text}]))

    assert remedy("NCHW read as NHWC") is explanations.RANK_3
    assert remedy("has its heads permuted: 1, 0") is explanations.NOTHING


def test_a_wrong_rotation_and_a_window_that_hides_nothing_are_causes(tmp_path):
    """From layer 0's keys alone: they follow from the token and its position, and no cache."""

    def turn(seen):
        for history in ("isolated", "forced"):
            keys, late = seen[f"{history}/layers.0.key"], seen[f"{history}/positions"] > 0
            x, y = keys[late, :, :4].copy(), keys[late, :, 4:].copy()
            keys[late, :, :4], keys[late, :, 4:] = -y, x

    verdict = judged(tmp_path, turn)
    assert verdict["cause"] == "keys of layer 0 turned by other angles than the reference's, from position 1 on"
    assert (verdict["first"]["gate"], verdict["first"]["layer"]) == ("kv_l2", 0)
    said = "off from position 8 on, the first where the window of 8 tokens hides a slot"
    window = {"kind": "no_window", "position": 8, "text": f"forced: {said}"}
    assert explanations.explain(evidence(findings=[window])) == said


def test_what_remedies_name_is_shipped():
    """In weights.yaml and quants.yaml, and in the text as in the names."""
    remedies = [*explanations._BY_DTYPE.values(), *explanations._REMEDIES.values()]
    remedies += [x for x in vars(operator_errors).values() if isinstance(x, explanations.Remedy)]
    whole = config.load(Path(__file__).parents[2], {})
    shipped = {*whole["weights"], *whole["quants"]} - {"plain"}  # a form of graphs too
    assert any(x.weights for x in remedies) and any(x.quants for x in remedies)
    for remedy in remedies:
        words = set(re.findall(r"\w+", remedy.text))
        assert words & shipped == {*remedy.weights, *remedy.quants}, remedy


def test_a_verdict_of_nothing_raises():
    with pytest.raises(ValueError, match="empty"):
        gate.worst([])


def test_a_window_that_sees_less_than_the_cache_keeps_is_a_finding(tmp_path):
    results = synthetic.Results(tmp_path)
    made = synthetic.contract(windows=(None, 7))
    results.contract(replace(made, layers=(made.layers[0], *(replace(x, mask=1) for x in made.layers[1:]))))
    results.verify("capital", OF, synthetic.observation(OF))
    verdict = results.judge()
    assert verdict["verdict"] == "pass"
    assert [x["text"] for x in verdict["findings"]] == ["layers 1, 2 see the last 7 of 23 slots, and keep all"]
    assert judged(tmp_path / "other")["findings"] == []


def test_what_the_reference_says_of_itself_is_among_the_findings(tmp_path):
    said = record.finding("turn_end", "the chat template ends a turn with '<|turn|>', which no list of end ids has")
    results = synthetic.Results(tmp_path)
    results.verify("capital", OF, synthetic.observation(OF), said=[said])
    assert results.judge()["findings"] == [said | {"program": "capital"}]


def test_replaced_states_that_nothing_compared_are_no_pass():
    figures = {"kv": None, "replaced": None, "logits": None}
    metrics = {"histories": {"forced": figures}, "states": [], "free": None, "steps": {}, "findings": []}
    limits = synthetic.THRESHOLDS
    (found,) = gates.judge("p", metrics | {"replaced": ["layers.0.recurrent"]}, {}, limits)
    assert (found.name, found.verdict, found.text) == ("compared", "fail", "none of 1 replaced states compared")
    assert gates.judge("p", metrics | {"replaced": []}, {}, limits) == []
