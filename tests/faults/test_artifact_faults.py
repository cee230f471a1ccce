"""Faults in what an artifact gave: planted in the simulator's observations of a row that passes.

The build's record is made to say what they are, as if the chip itself were wrong. The verdict names the gate, the
first place, and the cause where the values show one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from kvgate.observe import Trace
from planting import LAYERS, SLOTS, Faults, Sweep, red

Array = np.ndarray
Seen = dict[str, Array]
fault = Faults("verify")
HISTORIES = ("isolated", "forced")


@contextmanager
def observed(sweep: Sweep, program: str = "fill") -> Iterator[Seen]:
    path = sweep.path("build", f"observations/{program}.npz")
    with np.load(path) as file:
        found = {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in file.items()}
    yield found
    np.savez(path, **found)  # type: ignore[arg-type]
    sweep.seal("build")


def reference(sweep: Sweep, program: str = "fill") -> Trace:
    return Trace.load(str(sweep.path("trace", "trace.npz", program=program)))


def everywhere(sweep: Sweep, name: str, change: Callable[[Array], Array]) -> None:
    """Change an output in every step of every history."""
    with observed(sweep) as seen:
        for history in HISTORIES:
            seen[f"{history}/{name}"] = change(seen[f"{history}/{name}"])


# Too far off, in one place


@fault(1, "key", 9, gate="kv_l2")
def one_key_is_off_by_two_percent(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["isolated/layers.1.key"][9] *= 1.02


@fault(2, "value", 20, history="forced", gate="kv_l2")
def a_cache_drifts(sweep: Sweep) -> None:
    """Each step a little more than the one before: over 1 % from position 20 on."""
    with observed(sweep) as seen:
        rate = 1 + 0.00052 * np.arange(SLOTS)
        seen["forced/layers.2.value"] *= rate[:, None, None].astype(np.float32)


@fault(0, "value", SLOTS - 1, history="forced", gate="kv_l2")
def the_last_slot_is_off(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["forced/layers.0.value"][-1] *= 0.9


@fault(None, "logits", 12, gate="logits_l2")
def logits_are_noisy_at_one_step(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        logits = seen["isolated/logits"][12]
        noise = np.random.default_rng(0).normal(size=logits.shape)
        logits += (0.006 * np.linalg.norm(logits - logits.mean()) / np.linalg.norm(noise) * noise).astype(np.float32)


@fault(None, "logits", 6, history="forced", gate="top1")
def one_best_token_is_another(sweep: Sweep) -> None:
    """By a hair, far below the gate of the logits, but beyond what the logits' own error explains."""
    with observed(sweep) as seen:
        logits = seen["forced/logits"][6]
        best, second = np.argsort(logits)[::-1][:2]
        logits[second] = logits[best] + 1e-3


# Strange outputs


@fault(2, "key", 5, gate="kv_l2", says="NaN", finds="nan")
def a_key_is_not_a_number(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["isolated/layers.2.key"][5:, 1, 3] = np.nan


@fault(None, "logits", 0, says="infinite", finds="inf")
def logits_are_infinite(sweep: Sweep) -> None:
    everywhere(sweep, "logits", lambda x: np.where(np.arange(x.shape[1]) == 3, np.inf, x).astype(np.float32))


@fault(1, "value", 3, history="forced", gate="kv_l2", finds="all_zero")
def a_value_is_zero(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["forced/layers.1.value"][3] = 0


@fault(None, "logits", 4, says="all values equal", finds="all_equal")
def logits_are_one_number(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["isolated/logits"][4:] = 1.5


# Right values in the wrong place


@fault(0, "key", 0, says="heads")
def heads_are_permuted(sweep: Sweep) -> None:
    everywhere(sweep, "layers.0.key", lambda x: x[:, ::-1])


@fault(1, "value", 0, says=r"written as \(channels, heads\), read as \(heads, channels\)")
def a_value_has_another_layout(sweep: Sweep) -> None:
    everywhere(sweep, "layers.1.value", lambda x: x.transpose(0, 2, 1).reshape(x.shape))


@fault(1, "key", 0, says="pairs of channels")
def channels_are_interleaved(sweep: Sweep) -> None:
    everywhere(sweep, "layers.1.key", lambda x: x.reshape(*x.shape[:2], 2, -1).swapaxes(2, 3).reshape(x.shape))


@fault(2, "key", 0, says="holds the value of layer 2")
def key_and_value_are_swapped(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        for h in HISTORIES:
            key, value = f"{h}/layers.2.key", f"{h}/layers.2.value"
            seen[key], seen[value] = seen[value], seen[key]


@fault(0, "key", 0, says="holds the key of layer 1")
def layers_are_in_another_order(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        for h in HISTORIES:
            moved = {
                f"{h}/layers.{n}.{t}": seen[f"{h}/layers.{(n + 1) % LAYERS}.{t}"]
                for n in range(LAYERS)
                for t in ("key", "value")
            }
            seen |= moved


@fault(0, "key", 0, history="forced", says="holds position 30 instead of 31")
def the_slot_before_is_given_back(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["forced/layers.0.key"] = np.roll(seen["forced/layers.0.key"], 1, axis=0)


@fault(0, "key", 1, says="holds position 0 instead of 31")
def the_first_position_is_baked_in(sweep: Sweep) -> None:
    everywhere(sweep, "layers.0.key", lambda x: np.repeat(x[:1], len(x), axis=0))


# Scales


@fault(0, "key", 0, gate="kv_l2")
def a_tensor_has_half_its_scale(sweep: Sweep) -> None:
    everywhere(sweep, "layers.0.key", lambda x: x / 2)


@fault(1, "value", 0, gate="kv_l2")
def one_head_has_another_scale(sweep: Sweep) -> None:
    everywhere(sweep, "layers.1.value", lambda x: x * np.array([1, 1.25], np.float32)[:, None])


@fault(2, "key", 0, gate="kv_l2")
def a_tensor_is_rounded_to_eight_steps(sweep: Sweep) -> None:
    def coarse(x: Array) -> Array:
        scale = np.abs(x).max() / 4
        return (np.round(x / scale) * scale).astype(np.float32)

    everywhere(sweep, "layers.2.key", coarse)


@fault(1, "key", 0, gate="kv_l2")
def large_values_are_cut_off(sweep: Sweep) -> None:
    everywhere(sweep, "layers.1.key", lambda x: np.clip(x, -0.5, 0.5))


# Slots that should come back as fed


@fault(
    None, "cache", 11, history="forced", gate="disturbed", says="slots that the step does not write came back changed"
)
def other_slots_are_disturbed(sweep: Sweep) -> None:
    with observed(sweep) as seen:
        seen["forced/disturbed"] = seen["forced/disturbed"] + np.where(np.arange(SLOTS) >= 11, 0.03, 0)


# The free run


@fault(None, "logits", 22, program="talk", history="free", gate="tokens", says="generated step 2: token")
def a_generated_token_is_another(sweep: Sweep) -> None:
    of = reference(sweep, "talk")
    with observed(sweep, "talk") as seen:
        free = of.tokens[of.prompt :].copy()
        free[2] = (free[2] + 1) % 200
        seen["free/tokens"], seen["free/diverged"] = free, np.array(2)


@fault(None, "", None, program="talk", history="free", gate="tokens")
def the_text_does_not_end_where_it_should(sweep: Sweep) -> None:
    with observed(sweep, "talk") as seen:
        seen["free/tokens"] = np.append(seen["free/tokens"], 7)


# Of another run


@fault(0, "key", 0, gate="kv_l2")
def the_observation_is_of_another_text(sweep: Sweep) -> None:
    other = Trace.load(str(sweep.path("trace", "trace.npz", program="warm_a")))
    with observed(sweep) as seen:
        for h in HISTORIES:
            for n in range(LAYERS):
                seen[f"{h}/layers.{n}.key"] = other.states[f"layers.{n}.key"][seen[f"{h}/positions"]]
                seen[f"{h}/layers.{n}.value"] = other.states[f"layers.{n}.value"][seen[f"{h}/positions"]]


@pytest.mark.parametrize(("plant", "place"), fault.cases())
def test_the_verdict_names_the_first_place(chip, plant, place):
    plant(chip)
    red(chip.run("verify"), place)


def test_an_observation_of_nothing_wrong_still_passes(chip: Any) -> None:
    """The planting itself is no fault."""
    with observed(chip):
        pass
    chip.run("verify")
    assert chip.failed == {} and chip.body("judge")["verdict"] == "pass"
