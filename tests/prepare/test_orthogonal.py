"""Orthogonal matrices for any width; Hadamard where it factors."""

import numpy as np
import pytest
from kvgate.prepare import orthogonal


@pytest.mark.parametrize("width", [1, 2, 7, 12, 20, 30, 64, 144, 576, 640, 960])
def test_it_is_orthogonal(width):
    made = orthogonal.rotation(width).numpy()
    assert np.abs(made @ made.T - np.eye(width)).max() < 1e-12


@pytest.mark.parametrize(("width", "known"), [(576, True), (640, True), (896, False), (6, False), (36, False)])
def test_hadamard_where_the_width_factors(width, known):
    made = orthogonal.hadamard(width)
    assert (made is not None) == known
    assert made is None or set(np.unique(made)) == {-1.0, 1.0}


def test_the_same_each_time_and_spread_out():
    a, b = orthogonal.rotation(576), orthogonal.rotation(576)
    assert (a == b).all()
    assert abs(a[:, 0]).max() == pytest.approx(576**-0.5)
