"""gptq and split2 stay on the toolkit's grid, and gptq is nearer to the function than rounding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvgate.prepare import int4_grid
from kvgate.weights import gptq, split2


def data(rows=96, columns=40, seed=0):
    generator = np.random.default_rng(seed)
    mixed = generator.standard_normal((rows, rows)) / np.sqrt(rows)
    x = generator.standard_normal((400, rows)) @ mixed * np.geomspace(0.1, 3, rows)
    return x, generator.standard_normal((rows, columns)).astype(np.float32), x.T @ x


def off_grid(weight, group):
    """How far a matrix is from its own grid, relative to its scale."""
    return np.abs(int4_grid.nearest(weight, group) - weight).max() / np.abs(weight).max()


@pytest.mark.parametrize("group", [0, 32])
def test_gptq_stays_on_its_own_grid(group):
    _, weight, gram = data()
    (made,) = gptq.linear("w", weight, gram, group)
    assert off_grid(made, group) < 1e-6


@pytest.mark.parametrize("group", [0, 32])
def test_gptq_is_nearer_than_the_nearest_point(group):
    x, weight, gram = data()
    want = x @ weight
    error = {
        name: np.linalg.norm(x @ made - want)
        for name, made in (
            ("gptq", gptq.linear("w", weight, gram, group)[0]),
            ("nearest", int4_grid.nearest(weight, group)),
        )
    }
    assert error["gptq"] < 0.8 * error["nearest"]


def test_inputs_that_are_always_zero_are_no_trouble():
    x, weight, _ = data()
    x[:, 3] = 0
    (made,) = gptq.linear("w", weight, x.T @ x, 32)
    assert np.isfinite(made).all() and off_grid(made, 32) < 1e-6


@given(st.integers(0, 2**31), st.sampled_from([0, 16, 48]))
def test_split2_adds_up_and_both_terms_are_on_the_grid_within_int8(seed, group):
    weight = np.random.default_rng(seed).standard_normal((48, 5)).astype(np.float32)
    first, second = split2.linear("w", weight, None, group)
    assert np.allclose(first + second, weight, atol=1e-6)
    assert off_grid(first, group) < 1e-6
    # The second term holds what is left of half a step of the first, in steps a fourteenth as large.
    step = int4_grid.scales(weight, group)
    left = np.abs(int4_grid.nearest(second, group) - second).reshape(len(step), -1, 5)
    assert (left <= step / 28 * (1 + 1e-4)).all()


def test_a_group_must_divide():
    with pytest.raises(ValueError, match="group: got 36, allowed: a divisor of the matrix's 96 input channels"):
        gptq.linear("w", *data()[1:], group=36)


def test_searched_scales_lose_less_than_the_largest():
    group = 32
    _, weight, gram = data()
    energy = np.diag(gram)
    scale = gptq._scales(weight, group, energy)
    assert (scale <= int4_grid.scales(weight, group)).all() and (scale < int4_grid.scales(weight, group)).any()
    parts = weight.reshape(3, 32, 40)
    points = np.clip(np.rint(parts / scale), -7, 7) * scale
    lost = ((points.reshape(weight.shape) - weight) ** 2).T @ energy
    assert lost.sum() < 0.97 * (((int4_grid.nearest(weight, group) - weight) ** 2).T @ energy).sum()
