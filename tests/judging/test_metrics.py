"""The measures against their formulas, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kvgate.judging import metrics

VALUES = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
VECTORS = hnp.arrays(np.float32, st.integers(2, 30), elements=VALUES).filter(lambda x: np.abs(x).max() > 0)


@given(VECTORS, st.floats(0.001, 3))
def test_l2_of_a_scaled_vector_is_the_scale(vector, scale):
    assert metrics.l2(vector.astype(np.float64) * (1 + scale), vector) == pytest.approx(scale, rel=1e-9)


@given(VECTORS)
def test_equal_vectors_are_zero_apart_and_infinitely_clean(vector):
    assert metrics.l2(vector, vector) == 0
    assert metrics.sqnr(np.float64(metrics.l2(vector, vector))) == np.inf
    assert metrics.cosine(vector, vector) == pytest.approx(1)


def test_l2_is_not_taken_in_half_precision():
    big = np.full(1000, 300, np.float16)  # the sum of squares is 9e7, far beyond float16
    assert metrics.l2(big + np.float16(3), big) == pytest.approx(0.01)


def test_shapes_are_not_broadcast_and_nothing_is_no_match():
    with pytest.raises(ValueError, match=r"got shape \(1, 3\), allowed: the reference's \(3, 3\)"):
        metrics.l2(np.ones((1, 3)), np.ones((3, 3)))
    with pytest.raises(ValueError, match="got no values"):
        metrics.l2(np.ones((0, 3)), np.ones((0, 3)))
    with pytest.raises(ValueError, match="got no tokens"):
        metrics.perplexity(np.array([]))
    with pytest.raises(ValueError, match="allowed: equal, at least one"):
        metrics.surprise(np.ones((0, 3)), np.array([], int))


def test_rows_are_measured_apart_and_strange_ones_do_not_look_fine():
    want = np.array([[3.0, 4], [0, 0], [0, 0], [3, 4], [3, 4]])
    got = np.array([[3.0, 4.5], [0, 0], [1, 0], [np.nan, 4], [np.inf, 4]])
    error = metrics.l2_rows(got, want)
    assert error[0] == pytest.approx(0.1)
    assert error[1] == 0
    assert error[2] == np.inf
    assert np.isnan(error[3])
    assert error[4] == np.inf


@given(VECTORS, st.floats(-100, 100))
def test_a_common_offset_leaves_centred_logits_kl_and_rms_alone(logits, offset):
    moved = logits.astype(np.float64) + offset
    assert np.allclose(metrics.centred(moved), metrics.centred(logits), atol=1e-9)
    assert metrics.kl(moved, logits) == pytest.approx(0, abs=1e-9)
    assert metrics.rms_error(moved, logits.astype(np.float64)) == pytest.approx(0, abs=1e-9)


@given(VECTORS, st.integers(0, 10_000))
def test_kl_is_not_negative_and_sees_a_change(logits, seed):
    other = logits + np.random.default_rng(seed).normal(size=logits.shape)
    assert metrics.kl(other, logits) >= -1e-12
    assert metrics.kl(np.array([0.0, 1.0]), np.array([1.0, 0.0])) == pytest.approx(np.tanh(0.5))


def test_sqnr_is_20_db_a_factor_of_ten():
    assert metrics.sqnr(np.array([0.1, 0.01])).tolist() == pytest.approx([20, 40])


def test_perplexity_of_a_uniform_guess_is_the_vocabulary():
    assert metrics.perplexity(metrics.surprise(np.zeros((3, 50)), np.array([1, 2, 3]))) == pytest.approx(50)
    certain = np.array([[0.0, 30.0]])
    assert metrics.perplexity(metrics.surprise(certain, np.array([1]))) == pytest.approx(1)
    assert metrics.perplexity(metrics.surprise(certain, np.array([0]))) == pytest.approx(np.exp(30))


def test_margin_is_between_the_two_best():
    assert metrics.margin(np.array([[1.0, 5.0, 4.5, -9.0], [2.0, 2.0, 0.0, 0.0]])).tolist() == [0.5, 0]


def test_a_change_of_the_best_token_is_not_always_within_the_error():
    """The measure that a near tie is held against must be able to say no."""
    want = np.zeros(1000)
    want[0], want[1] = 1.0, 0.5
    got = want.copy()
    got[1] = 1.1
    assert metrics.margin(want) > metrics.rms_error(got, want)
    assert metrics.margin(want) < np.abs(got - want).max()  # the worst logit's error would call it a tie


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        ([1, np.nan, 0], "nan"),
        ([1, -np.inf, 0], "inf"),
        ([0, 0], "all_zero"),
        ([2, 2], "all_equal"),
        ([2], None),
        ([1, 2], None),
    ],
)
def test_oddities(array, kind):
    assert metrics.oddity(np.array(array, np.float16)) == kind


@given(st.permutations(range(3)), st.integers(0, 1000))
def test_a_permuted_tensor_is_named(order, seed):
    want = np.random.default_rng(seed).normal(size=(3, 4, 5)).astype(np.float32)
    got = want.transpose(order).reshape(want.shape)
    named = metrics.permuted(got, want, ("a", "b", "c"))
    if list(order) == [0, 1, 2]:
        assert named is None
    else:
        assert metrics.l2(got, want) > metrics.SUSPECT_L2
        written = ", ".join("abc"[i] for i in order)
        assert named == f"written as ({written}), read as (a, b, c)"


def test_layout_mixups_of_four_axes_have_their_names():
    want = np.random.default_rng(0).normal(size=(1, 8, 8, 8))
    assert metrics.permuted(want.transpose(0, 3, 1, 2), want) == "NCHW read as NHWC"
    assert metrics.permuted(want.transpose(0, 2, 3, 1), want) == "NHWC read as NCHW"
    flat = np.random.default_rng(0).normal(size=(2, 3, 5, 7))
    assert metrics.permuted(flat.transpose(0, 2, 3, 1).reshape(flat.shape), flat) == "NHWC read as NCHW"


def test_rotary_pairs_are_named():
    want = np.random.default_rng(0).normal(size=(2, 64))
    got = want.reshape(2, 2, 32).swapaxes(1, 2).reshape(2, 64)
    assert metrics.permuted(got, want, ("heads", "channels")) == "pairs of channels interleaved"


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0])
def test_noise_and_other_norms_are_no_permutation(scale):
    rng = np.random.default_rng(0)
    want = rng.normal(size=(3, 64))
    assert metrics.permuted(rng.normal(size=(3, 64)), want) is None
    assert metrics.permuted(scale * want.T.reshape(3, 64), want) is None
    assert metrics.permuted(want * 1.01, want) is None
