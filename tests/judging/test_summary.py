"""Figures that stand for many steps."""

import numpy as np
from kvgate.judging import errors


def test_the_share_of_errors_over_a_limit():
    arrays = {
        "a": {"isolated/kv": np.array([[[0.001, 0.02]]]), "forced/kv": np.array([[[0.01, np.nan]]])},
        "b": {"forced/kv": np.full((2, 1, 2), 0.5), "free/kv": np.ones((9, 1, 2))},
    }
    assert errors.share_over(arrays, "kv", 0.01) == 0.75  # not a number is over; the free run is the forced one's
    assert errors.share_over({"a": {}}, "kv", 0.01) is None
