import hashlib

import numpy as np
import pytest
import torch
from kvgate.checkpoint import drawn
from kvgate.checkpoint.drawn import Drawn
from torch import nn


def filled(seed, fill, shape=(300, 400), dtype=torch.float64):
    with Drawn(seed):
        return fill(torch.empty(shape, dtype=dtype))


def test_the_normal_and_the_uniform_are_what_is_asked_for():
    normal, uniform = filled(1, lambda t: t.normal_(3.0, 0.5)), filled(1, lambda t: t.uniform_(-2, 1))
    assert normal.mean().item() == pytest.approx(3, abs=0.01) and normal.std().item() == pytest.approx(0.5, abs=0.01)
    assert uniform.min() >= -2 and uniform.max() < 1 and uniform.mean().item() == pytest.approx(-0.5, abs=0.02)
    assert not torch.equal(normal, filled(2, lambda t: t.normal_(3.0, 0.5)))
    assert torch.equal(filled(1, nn.init.normal_, dtype=torch.float32), filled(1, nn.init.normal_).float())


def test_every_pc_draws_these():
    """Known numbers: another PC, or another numpy, would give others."""
    found = filled(3, nn.init.trunc_normal_).to(torch.float32).numpy()
    assert hashlib.sha256(found.astype("<f4").tobytes()).hexdigest()[:16] == "b0ee263641fc1a6e"
    assert np.abs(found).max() <= 2


@pytest.mark.parametrize(
    "fill", [lambda t: t.normal_(3.0, 0.5), lambda t: t.uniform_(-2, 1), lambda t: t.t().normal_()]
)
def test_in_blocks_it_draws_what_it_draws_at_once(monkeypatch, fill):
    whole = filled(1, fill)
    monkeypatch.setattr(drawn, "_BLOCK", 77)
    assert torch.equal(whole, filled(1, fill))


def test_other_random_numbers_are_refused():
    with pytest.raises(ValueError, match=r"random numbers: got aten\.exponential_\.default, allowed: normal_, "):
        filled(1, lambda t: t.exponential_())
    with Drawn(1):
        assert torch.zeros(2).sum() == 0


def test_torch_s_own_state_is_left_alone():
    state = torch.random.get_rng_state()
    filled(1, lambda t: t.normal_())
    assert torch.equal(state, torch.random.get_rng_state())
