"""Faults of the host half, which feeds a graph that is right and takes its outputs in. The check names the first place.

The isolated history begins every step with the reference's cache, so what the host keeps wrongly shows in the forced
one, a position after it was kept.
"""

from typing import Any

import numpy as np
import pytest
from kvgate.strategies import host as halves
from kvgate.strategies.cpu_managed.host import Host as Managed
from kvgate.strategies.fixed_max_blend.host import Host as Blend
from planting import SLOTS, WINDOW, Faults, red
from standin import pairs

Patch = pytest.MonkeyPatch
fault = Faults("check")


def keeps(patch: Patch, write: Any) -> None:
    """What cpu_managed writes of a step: write(host, layer, key [Hk, D], value [Hk, D])."""

    def take_cache(self: Managed, outputs: Any, views: Any, valid: int) -> Any:
        taken = {name: x[-1:].copy() for name, x in views.items()}
        for layer, (k, v) in enumerate(pairs(taken)):
            write(self, layer, k[0], v[0])
        return taken, 0.0

    patch.setattr(Managed, "take_cache", take_cache)


@fault(1, "key", 1, history="forced")
def the_delta_is_written_one_slot_late(patch: Patch) -> None:
    def write(host: Managed, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        for mine, theirs in zip(pairs(host.views)[layer], (k, v), strict=True):
            mine[(host.length + 1) % SLOTS] = theirs

    keeps(patch, write)


@fault(1, "key", 1, history="forced")
def the_delta_is_not_written(patch: Patch) -> None:
    keeps(patch, lambda *args: None)


@fault(1, "key", 1, history="forced")
def the_value_is_written_where_the_key_belongs(patch: Patch) -> None:
    def write(host: Managed, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        pairs(host.views)[layer][0][host.length] = v
        pairs(host.views)[layer][1][host.length] = k

    keeps(patch, write)


@fault(1, "key", 1, history="forced")
def a_layer_is_written_into_the_next(patch: Patch) -> None:
    def write(host: Managed, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        for mine, theirs in zip(pairs(host.views)[(layer + 1) % 3], (k, v), strict=True):
            mine[host.length] = theirs

    keeps(patch, write)


@fault(1, "key", 1, history="forced")
def heads_are_written_in_another_order(patch: Patch) -> None:
    def write(host: Managed, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        pairs(host.views)[layer][0][host.length] = k[::-1]
        pairs(host.views)[layer][1][host.length] = v

    keeps(patch, write)


@fault(2, "key", 1, history="forced")
def one_layer_is_written_with_another_scale(patch: Patch) -> None:
    def write(host: Managed, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        pairs(host.views)[layer][0][host.length] = k
        pairs(host.views)[layer][1][host.length] = v * (0.9 if layer == 1 else 1)

    keeps(patch, write)


@fault(1, "key", 17, history="forced")
def the_slots_wrap_at_half_the_capacity(patch: Patch) -> None:
    def write(host: Managed, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        for mine, theirs in zip(pairs(host.views)[layer], (k, v), strict=True):
            mine[host.length % (SLOTS // 2)] = theirs

    keeps(patch, write)


@fault(1, "key", SLOTS - 1, history="forced")
def the_last_slot_that_is_read_is_not_written(patch: Patch) -> None:
    """Only a text that fills the cache with its own K and V gets there."""

    def write(host: Managed, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        if host.length < SLOTS - 2:
            pairs(host.views)[layer][0][host.length], pairs(host.views)[layer][1][host.length] = k, v

    keeps(patch, write)


@fault(1, "key", 1, history="forced", strategy="blend")
def the_returned_buffer_is_not_taken_over(patch: Patch) -> None:
    patch.setattr(
        Blend,
        "take_cache",
        lambda self, outputs, views, valid: ({name: x[self.length][None] for name, x in views.items()}, 0.0),
    )


@fault(0, "key", 0, strategy="blend")
def the_step_is_taken_from_the_slot_before(patch: Patch) -> None:
    right = Blend.take_cache

    def take_cache(self: Blend, outputs: Any, views: Any, valid: int) -> Any:
        _, disturbed = right(self, outputs, views, valid)
        return {name: x[self.length - 1][None].copy() for name, x in views.items()}, disturbed

    patch.setattr(Blend, "take_cache", take_cache)


@fault(0, "key", 0, strategy="blend")
def the_one_hot_is_one_slot_late(patch: Patch) -> None:
    right = Blend.extra
    patch.setattr(Blend, "extra", lambda self, tensor: np.roll(right(self, tensor), 1))


def columns(patch: Patch, change: Any) -> None:
    right = Managed.columns

    def columns_(self: Managed) -> np.ndarray:
        seen = right(self)
        change(self, seen)
        return seen

    patch.setattr(Managed, "columns", columns_)


@fault(1, "key", 1)
def the_newest_slot_is_hidden(patch: Patch) -> None:
    def change(host: Managed, seen: np.ndarray) -> None:
        if host.length:
            seen[host.length - 1] = -1

    columns(patch, change)


@fault(1, "key", 0)
def one_empty_slot_is_seen(patch: Patch) -> None:
    def change(host: Managed, seen: np.ndarray) -> None:
        if host.length < SLOTS:
            seen[host.length] = host.length

    columns(patch, change)


@fault(1, "key", 0)
def the_own_token_is_hidden(patch: Patch) -> None:
    """With an empty history nothing is seen at all."""

    def change(host: Managed, seen: np.ndarray) -> None:
        seen[-1] = -1

    columns(patch, change)


def masks(patch: Patch, change: Any) -> None:
    """change: (position, columns, window, value) -> the same, as the mask then takes them."""
    right = halves.additive_mask
    patch.setattr(halves, "additive_mask", lambda *args: right(*change(*args)))


@fault(None, "logits", WINDOW)
def the_window_is_ignored(patch: Patch) -> None:
    masks(patch, lambda position, seen, window, value: (position, seen, None, value))


@fault(None, "logits", WINDOW)
def the_window_sees_one_more(patch: Patch) -> None:
    masks(patch, lambda position, seen, window, value: (position, seen, window and window + 1, value))


@fault(1, "key", WINDOW)
def every_layer_has_the_window(patch: Patch) -> None:
    masks(patch, lambda position, seen, window, value: (position, seen, WINDOW, value))


@fault(1, "key", 0)
def the_mask_has_the_wrong_sign(patch: Patch) -> None:
    masks(patch, lambda position, seen, window, value: (position, seen, window, -value))


@fault(1, "key", 0)
def the_mask_hides_nothing(patch: Patch) -> None:
    masks(patch, lambda position, seen, window, value: (position, seen, window, -1e-3))


@fault(0, "key", 0)
def the_rotation_is_one_position_ahead(patch: Patch) -> None:
    rotated(patch, lambda position: min(position + 1, SLOTS - 1))


@fault(0, "key", 8)
def the_rotation_starts_over(patch: Patch) -> None:
    rotated(patch, lambda position: position % 8)


def rotated(patch: Patch, position: Any) -> None:
    right = halves.Host._rotation

    def rotation(self: Any, index: int) -> np.ndarray:
        kept, self.length = self.length, position(self.length)
        try:
            return right(self, index)
        finally:
            self.length = kept

    patch.setattr(halves.Host, "_rotation", rotation)


@fault(0, "key", 1)
def the_first_token_is_fed_for_ever(patch: Patch) -> None:
    right, first = halves.Host._feed, [0]

    def feed(self: Any, tensor: Any, token: int) -> Any:
        if not self.length:
            first[0] = token
        return right(self, tensor, first[0])

    patch.setattr(halves.Host, "_feed", feed)


@fault(0, "key", 0)
def heads_are_viewed_in_another_order(patch: Patch) -> None:
    """Read and written alike: only the reference knows."""
    right = halves.view
    patch.setattr(halves, "view", lambda *args: right(*args)[:, ::-1])


@fault(0, "key", 0)
def keys_are_viewed_as_values(patch: Patch) -> None:
    right = halves.Host._views

    def views(self: Any, tensors: Any, arrays: Any) -> Any:
        found = right(self, tensors, arrays)
        other = {"key": "value", "value": "key"}
        return {name: found[f"layers.{name.split('.')[1]}.{other[name.split('.')[2]]}"] for name in found}

    patch.setattr(halves.Host, "_views", views)


@fault(None, "logits", 0)
def the_logits_shift_is_forgotten(patch: Patch) -> None:
    right = halves.Host.take

    def take(self: Any, outputs: Any) -> halves.Step:
        step = right(self, outputs)
        return halves.Step(step.logits - np.float32(self.contract.shift), step.states, step.disturbed)

    patch.setattr(halves.Host, "take", take)


@pytest.mark.parametrize(("plant", "place"), fault.cases())
def test_the_check_names_the_first_place(host, monkeypatch, plant, place):
    plant(monkeypatch)
    red(host.of(strategy=place.strategy).run("check", strategy=place.strategy), place)
