import numpy as np
import pytest
import torch
from kvgate.checkpoint import precise
from torch import nn


def test_a_row_is_rounded_in_steps_of_its_largest():
    exact = torch.tensor([[3.0, -1.23456789e-3], [1e-9, -7e-9], [0.0, 0.0]], dtype=torch.float64)
    found = precise.rounded(exact.clone())
    assert torch.equal(found.float().double(), found)  # float32 holds it
    for row, got, step in zip(exact, found, (2.0**-18, 2.0**-47, 1.0), strict=True):
        assert (got / step).frac().abs().max() == 0 and (got - row).abs().max() <= step / 2
    assert found[0, 0] == 3 and found[2].tolist() == [0, 0]


def test_what_kernels_differ_by_is_rounded_away():
    """A millionth of a step is seen by about one value in a million; all bits of float32 see it ten times as often."""
    rows = torch.randn(400, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = rows + 3e-14 * torch.randn(rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert (rows != other).float().mean() > 0.99
    assert torch.equal(precise.rounded(rows.clone()), precise.rounded(other))


def test_single_is_float32_wherever_it_is_asked_for():
    exact = torch.tensor([0.1], dtype=torch.float64)
    with precise.float64():
        assert precise.single(exact).dtype == np.float32 and exact.float().dtype == torch.float64


def test_no_number_stays_what_it_is():
    rows = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [1.0, 2.0]], dtype=torch.float64)
    found = precise.rounded(rows)
    assert found[0, 1].isnan() and found[1, 0].isinf() and found[2].tolist() == [1, 2]


@pytest.mark.parametrize(
    "asked",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(dtype=torch.float),
        lambda x: x.type(torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: nn.functional.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.sum(-1, dtype=torch.float32),
        lambda x: torch.arange(3, dtype=torch.float32),
        lambda x: torch.tensor([0.1]),
        lambda x: torch.zeros(3),
    ],
)
def test_who_asks_for_float32_gets_float64(asked):
    x = torch.ones(3, dtype=torch.float64) / 3
    assert asked(x).dtype == torch.float32
    with precise.float64():
        assert asked(x).dtype == torch.float64
    assert asked(x).dtype == torch.float32


def test_the_default_is_put_back_after_an_error():
    with pytest.raises(ZeroDivisionError), precise.float64():
        1 / 0  # noqa: B018
    assert torch.zeros(1).dtype == torch.float32


def test_buffers_are_the_float32_model_s():
    model = nn.BatchNorm1d(1).double()
    model.running_var.fill_(0.1)
    precise.settle(model)
    assert model.running_var.item() == float(np.float32(0.1)) != 0.1
