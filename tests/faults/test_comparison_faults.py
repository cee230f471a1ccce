"""Comparisons of nothing, or of less than was asked: empty, short, repeated, zero-length, NaN. None of them is green.

What cannot be compared at all fails the job with one line; what was compared in part is a verdict that says how much.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgate.planning.config import ConfigError
from planting import CHIP, HOST, INT8, PROGRAMS, SLOTS, Faults, Sweep, config, red, shipped
from test_artifact_faults import observed

short = Faults("verify")
nothing: dict[str, tuple[Any, str]] = {}


def steps(seen: dict[str, np.ndarray], history: str, keep: Any) -> None:
    """Only these steps of a history."""
    for name in [x for x in seen if x.startswith(f"{history}/") and x != "free/diverged"]:
        seen[name] = seen[name][keep]


@short(gate="compared", program="fill", history="forced", says="31 of 32 steps")
def the_last_step_is_missing(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        steps(seen, "forced", slice(-1))


@short(gate="compared", program="fill", history="isolated", says="1 of 32 steps")
def only_the_first_position_ran(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        steps(seen, "isolated", slice(1))


@short(gate="compared", program="fill", history="isolated", says="1 of 32 steps")
def one_position_ran_over_and_over(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        steps(seen, "isolated", np.zeros(SLOTS, int))


@short(gate="compared", program="fill", history="forced", says="9 of 32 steps")
def one_step_in_the_middle_is_missing(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        steps(seen, "forced", np.arange(SLOTS) != 9)


@short(gate="compared", program="talk", history="free", says="2 of 6 tokens")
def the_free_run_stopped_early(sweep: Sweep) -> None:
    with observed(sweep, "talk") as seen:
        steps(seen, "free", slice(2))


@short(gate="compared", says="no comparison was made")
def no_program_is_in_the_metrics(sweep: Sweep) -> None:
    sweep.rewrite("verify", lambda body: body.update(programs={}))


@pytest.mark.parametrize(("plant", "place"), short.cases())
def test_the_verdict_says_how_much_was_compared(chip, plant, place):
    plant(chip)
    red(chip.run("judge" if "metrics" in plant.__name__ else "verify"), place)


def fails(says: str) -> Any:
    def add(plant: Any) -> Any:
        nothing[plant.__name__] = (plant, says)
        return plant

    return add


@fails("fill.npz: lacks the history isolated, forced")
def the_observation_is_empty(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen.clear()


@fails("fill.npz: lacks the history forced")
def a_history_is_missing(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        for name in [x for x in seen if x.startswith("forced/")]:
            del seen[name]


@fails("isolated: got 0 logits for 0 steps, allowed: equal, at least 1")
def a_history_has_no_steps(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        steps(seen, "isolated", slice(0))


@fails("lacks forced/layers.2.value, which the contract returns")
def a_tensor_was_not_observed(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        del seen["forced/layers.2.value"]


@fails(r"comparison: got shape \(287,\), allowed: the reference's \(288,\)")
def the_vocabulary_is_cut(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["isolated/logits"] = seen["isolated/logits"][:, :-1]


@fails(r"comparison: got shape \(32, 1, 16\), allowed: the reference's \(32, 2, 16\)")
def a_head_is_missing(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["isolated/layers.0.key"] = seen["isolated/layers.0.key"][:, :1]


@fails("isolated: got 31 logits for 32 steps, allowed: equal, at least 1")
def logits_of_one_step_are_missing(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["isolated/logits"] = seen["isolated/logits"][1:]


@fails("free: got 0 tokens for 6 of the reference, allowed: at least one")
def the_free_run_gave_no_token(sweep: Sweep) -> None:
    with observed(sweep, "talk") as seen:
        seen["free/tokens"] = seen["free/tokens"][:0]


@pytest.mark.parametrize(
    ("plant", "says"), [pytest.param(*x, id=name.replace("_", " ")) for name, x in nothing.items()]
)
def test_what_cannot_be_compared_fails_the_job(chip, plant, says):
    plant(chip)
    chip.run("verify")
    assert set(chip.failed) == {"verify"}
    assert re.match(f"verify .*: failed: ValueError: .*{says}", chip.failed["verify"]), chip.failed
    assert not chip.path("judge").exists() and chip.command("gate") == 1


# The reference itself


def retraced(sweep: Sweep, change: Any) -> None:
    path = sweep.path("trace", "trace.npz")
    with np.load(path) as file:
        arrays = dict(file)
    change(arrays)
    np.savez(path, **arrays)
    sweep.seal("trace")


def test_a_reference_that_is_not_a_number_compares_with_nothing(chip):
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays["layers.1.key"][4] = np.nan

    retraced(chip, change)
    chip.run("verify")
    verdict = chip.body("judge")
    assert verdict["verdict"] == "fail" and not shipped(chip)
    place = {k: verdict["first"][k] for k in ("gate", "history", "layer", "tensor", "position")}
    assert place == {"gate": "kv_l2", "history": "isolated", "layer": 1, "tensor": "key", "position": 4}


def test_a_reference_without_logits_is_no_reference(chip):
    """As a calibration text's trace has none."""
    retraced(chip, lambda arrays: arrays.pop("logits"))
    chip.run("verify")
    assert "trace: got no logits, allowed: the trace of a chat or a text" in chip.failed["verify"]


def test_a_shorter_reference_does_not_shorten_the_comparison(chip):
    """The observation has 32 steps, the reference 16: what has no reference is not right."""

    def change(arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            if array.ndim:
                arrays[name] = array[:16]

    retraced(chip, change)
    chip.run("verify")
    assert "verify" in chip.failed and not chip.path("judge").exists()


# What a sweep asks for


def test_a_cache_that_no_text_fills_is_not_passed(host):
    """The isolated steps reach every slot with the reference's K and V; the row's own stop before the end."""
    programs = PROGRAMS | {"fill": PROGRAMS["fill"] | {"histories": ["isolated"]}}
    less = host.planned(HOST | {"programs": programs}).run("check", strategy="managed")
    verdict = less.body("judge")
    assert verdict["verdict"] == "fail" and not shipped(less)
    assert "own cache reached slot 26 of 32" in verdict["reason"]


ROWS = {"strategies": ["managed"], "platforms": ["host"], "quants": ["fp32"]}
NUMBERS = [float("nan"), float("inf"), -0.1, "0.005", None]


@pytest.mark.parametrize("value", NUMBERS, ids=str)
@pytest.mark.parametrize("gate", ["kv_l2", "logits_l2", "disturbed"])
def test_a_limit_that_holds_nothing_is_no_limit(tmp_path, gate, value):
    with pytest.raises(ConfigError, match=rf"thresholds\.{gate}"):
        Sweep(tmp_path, config(ROWS, thresholds={gate: {"pass": 0.005, "warn": value}}))


def test_a_limit_that_is_not_a_number_for_behaviour(tmp_path):
    with pytest.raises(ConfigError, match=r"thresholds\.behaviour"):
        Sweep(tmp_path, config(ROWS, thresholds={"behaviour": {"perplexity": float("nan"), "top1": 0.95}}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"programs": []}, "sweep.programs"),
        ({"isolated": 0}, "sweep.isolated"),
        ({"blocks": []}, "sweep.blocks"),
        ({"programs": ["talk"]}, "which no text of the sweep fills"),
    ],
    ids=["no programs", "no isolated steps", "no rows", "no text"],
)
def test_a_sweep_that_compares_nothing(tmp_path, change, says):
    asked = config(ROWS)
    with pytest.raises(ConfigError, match=says):
        Sweep(tmp_path, asked | {"sweep": asked["sweep"] | change})


def test_a_program_without_a_history(tmp_path):
    programs = PROGRAMS | {"fill": PROGRAMS["fill"] | {"histories": []}}
    with pytest.raises(ConfigError, match="fill"):
        Sweep(tmp_path, config(ROWS, programs=programs))


@pytest.mark.parametrize("require", [[{"quant": "fp32"}], [{"model": "other"}]], ids=["no such row", "no such model"])
def test_a_requirement_that_no_row_meets_is_red(chip, capfd, require):
    asked = chip.planned(CHIP | {"sweep": CHIP["sweep"] | {"require": require}})
    assert asked.command("gate") == 1
    said = "".join(capfd.readouterr())
    assert "no row matches" in said


def test_a_row_that_was_never_judged_is_red(chip, capfd):
    assert chip.planned(INT8).command("gate") == 1
    assert "missing: tiny/plain/managed/rk3576/w8a8/simulator: not judged yet" in capfd.readouterr().out


def test_tables_of_no_rows_are_no_success(tmp_path: Path):
    assert Sweep(tmp_path, config(ROWS)).command("table") == 1
