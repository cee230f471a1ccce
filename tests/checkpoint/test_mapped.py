"""Parameters that stay in their file: float64 to the bit for all that reads them, and theirs alone when written."""

import families
import numpy as np
import pytest
import torch
from kvgate.checkpoint import load, mapped, precise, reference
from kvgate.checkpoint.mapped import Mapped
from safetensors.torch import load_file, save_file


def values(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "read",
    [
        lambda w, x: torch.nn.functional.linear(x, w),
        lambda w, x: x @ w.t(),
        lambda w, x: x @ w.t().contiguous(),
        lambda w, x: x[:, :5] @ w[1:6, ::2],
        lambda w, x: torch.cat([part @ x.t() for part in w.split(4)]),
        lambda w, x: w[3] * x,
        lambda w, x: w.transpose(0, 1)[2].view(2, -1),
        lambda w, x: torch.nn.functional.embedding(torch.tensor([[3, 1]]), w) * 3.0,
        lambda w, x: w.clone().mul_(0.3) + w,
    ],
)
def test_every_reader_gets_float64s_own_bits(read, dtype):
    w, x = values(12, 8, dtype=dtype), values(3, 8).double()
    made = mapped.mapped(w)
    assert isinstance(made, Mapped) and made.dtype == torch.float64
    found, want = read(made, x), read(w.double(), x)
    assert found.dtype == torch.float64 and torch.equal(found, want)
    assert torch.equal(mapped.held(made), w)


def test_what_is_float64_or_a_vector_is_in_memory():
    exact = values(4, 4).double()
    assert mapped.mapped(exact) is exact
    assert type(mapped.mapped(values(4))) is torch.Tensor and mapped.mapped(values(4)).dtype == torch.float64
    assert mapped.mapped(torch.arange(4)).dtype == torch.int64


@pytest.mark.parametrize("place", [lambda w: w, lambda w: w.detach(), lambda w: w.t(), lambda w: w[2:5]])
def test_a_write_reaches_every_view_and_no_copy_and_no_file(place):
    w = values(8, 6)
    file, (made, exact) = w.clone(), (mapped.mapped(w), w.double())
    copies = [x.clone() for x in (made, exact)], [x.t().contiguous() for x in (made, exact)]
    views = made.t(), exact.t()
    for tensor in (made, exact):
        place(tensor).mul_(1 / 3)
    assert torch.equal(made + 0, exact) and torch.equal(views[0] + 0, views[1])
    for one, other in copies:
        assert torch.equal(one + 0, other)
        for tensor in (one, other):
            tensor.add_(1)
        assert torch.equal(one + 0, other)
    assert torch.equal(made + 0, exact) and torch.equal(w, file)


def test_in_memory_as_float64_is_what_fits(monkeypatch):
    monkeypatch.setattr(mapped, "KEEP", 8 * 64)
    before = mapped._Root.total
    first, second = (mapped.mapped(values(8, 8)) for _ in "ab")
    monkeypatch.setattr(mapped, "KEEP", before + 8 * 64)
    assert (first + 0).sum() == (second + 0).sum()
    assert first.wide() is first.wide() and second.wide() is not second.wide()
    del first
    assert mapped._Root.total == before


def test_float32_of_a_mapped_one_is_its_own_memory():
    w = values(6, 4)
    with precise.float64():
        found = precise.single(mapped.mapped(w))
        turned = precise.single(mapped.mapped(w).t().contiguous())
    assert found.dtype == np.float32 and np.shares_memory(found, w.numpy())
    assert turned.flags.c_contiguous and np.array_equal(turned, w.numpy().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpoints_matrices_stay_in_their_file(tmp_path, family, dtype):
    families.checkpoint(tmp_path, family)
    path = tmp_path / "model.safetensors"
    save_file({name: x.to(dtype) for name, x in load_file(path).items()}, path, metadata={"format": "pt"})
    ids = torch.tensor([[1, 5, 7, 2]])
    model = reference.load(tmp_path)
    with torch.inference_mode():
        found = model(ids, use_cache=False).logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "mapped", lambda x: x.double() if x.is_floating_point() else x)
        dense = reference.load(tmp_path)
    with torch.inference_mode():
        assert torch.equal(found, dense(ids, use_cache=False).logits)
    kinds = {type(x) for x in dense.parameters()}
    assert not any(isinstance(x, Mapped) for x in dense.parameters()), kinds
    for parameter in model.parameters():
        assert isinstance(parameter, Mapped) == (parameter.dim() > 1)
    with precise.float64():
        assert any(isinstance(x, Mapped) for x in load.model(tmp_path).parameters())
