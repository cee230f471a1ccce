"""A text in one call is the text a token at a time, for every family whose attention is the recipe."""

import families
import pytest
import torch
from kvgate.checkpoint import load
from kvgate.checkpoint.seams import Step
from kvgate.prepare import choose_form, equality, statistics, whole
from torch import Tensor

T = 12  # beyond the window of the tiny models


def prepared(folder, family: str) -> tuple[choose_form.Prepared, Step, Tensor]:
    families.checkpoint(folder, family)
    made = choose_form.prepare(load.model(folder), "recipe")
    assert made.spec.form == "recipe", made.spec.reason
    step = Step()
    for part in (*made.spec.layers, *made.spec.rotations):
        made.model.get_submodule(part.module).step = step
    rows = made.embedding[torch.randint(len(made.embedding), (T,), generator=torch.Generator().manual_seed(1))]
    return made, step, rows if made.positions is None else rows + made.positions[:T]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_same_logits_and_statistics(tmp_path, family, monkeypatch):
    made, step, rows = prepared(tmp_path, family)
    with torch.no_grad():
        slow = equality.decode(made.model, made.spec, step, rows)[0]
        fast = whole.run(made.model, made.spec, step, rows)
    assert (fast - slow).norm() <= 1e-5 * slow.norm()
    assert not any(isinstance(m, whole._Whole) for m in made.model.modules())
    found = statistics.collect(made.model, made.spec, step, [rows, rows.flip(0)])
    monkeypatch.setattr(statistics.whole, "run", equality.decode)
    wanted = statistics.collect(made.model, made.spec, step, [rows, rows.flip(0)])
    assert found.gram.keys() == wanted.gram.keys() and any(name.endswith(".qkv") for name in found.gram)
    for name, gram in wanted.gram.items():
        torch.testing.assert_close(found.gram[name], gram, rtol=1e-3, atol=1e-4 * float(gram.abs().max()), msg=name)
        torch.testing.assert_close(found.peak[name], wanted.peak[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_wrong_mask_is_seen(tmp_path, monkeypatch):
    made, step, rows = prepared(tmp_path, "mistral")
    monkeypatch.setattr(whole._Whole, "_masks", lambda self, tokens: torch.zeros(tokens, 1, 1, 1, tokens))
    with torch.no_grad():
        slow = equality.decode(made.model, made.spec, step, rows)[0]
        assert (whole.run(made.model, made.spec, step, rows) - slow).norm() > 1e-2 * slow.norm()
