"""Statistics read whole calibration traces, whatever the capacity of the graph that is exported later."""

import graphs
import numpy as np
import pytest
import torch
from kvgate.checkpoint import load
from kvgate.prepare import hooks, statistics
from kvgate.prepare.choose_form import prepare

LONG, SHORT = 40, 10


class Step:
    STATISTICS = True


def collected(folder, model, tokens) -> statistics.Statistics:
    path = folder / f"{len(tokens)}.npz"
    np.savez(path, tokens=tokens)
    with torch.no_grad():
        work = hooks.Work(prepare(model, "recipe"), [path])
        return work._measured(Step)


@pytest.mark.parametrize("family", ["llama", "llama_g8"])  # g8: one KV head, its output projection a convolution
def test_a_trace_is_read_to_its_end(tmp_path, family):
    """40 tokens, as the drawn texts of 512 beside a capacity of 128: no capacity stands here yet."""
    made = graphs.Model.of(tmp_path, family)
    tokens = made.text(LONG).tokens
    short, long = (collected(tmp_path, load.model(made.checkpoint), x) for x in (tokens[:SHORT], tokens))
    assert set(short.gram) == set(long.gram) and len(long.gram) == 11
    for name, gram in long.gram.items():
        assert gram.trace() > 1.5 * short.gram[name].trace()
        assert (long.peak[name] >= short.peak[name] * (1 - 1e-5)).all()
    first = "model.layers.0.self_attn.qkv"  # reads normed rows: each adds about as much
    assert (long.gram[first].trace() / short.gram[first].trace()).item() == pytest.approx(LONG / SHORT, rel=0.2)
    assert any((long.peak[n] > short.peak[n]).any() for n in long.peak)


def divergence(model, spec, step, texts) -> list[torch.Tensor]:
    return [statistics.run(model, spec, step, rows).double().log_softmax(1) for rows in texts]


@pytest.mark.parametrize("family", ["llama", "llama_g8", "gpt2"])
def test_the_loss_of_a_change_is_its_divergence(tmp_path, family):
    """Against the measured divergence: both are means over the same few tokens, and a draw is one of many."""
    made = graphs.Model.of(tmp_path, family)
    work = hooks.Work(prepare(load.model(made.checkpoint), "recipe"), [])
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(97, (24, 16), generator=generator)
    texts = [
        work.prepared.embedding[x] + (0 if work.prepared.positions is None else work.prepared.positions[:16])
        for x in ids
    ]
    tensors = {n: t for n, t in work.model.named_parameters() if work._is_product(n, t)}
    matrices = {n: statistics.matrix(t.detach()) for n, t in tensors.items()}
    changes = {n: 0.03 * t.std() * torch.randn(t.shape, generator=generator) for n, t in matrices.items()}
    names = [n for n in changes if n.endswith(("qkv", "attn.out", "down_proj.weight", "c_proj.weight", "head.weight"))]
    lost = statistics.loss(
        work.model, work.spec, work._stepped(), texts, {n: changes[n] for n in names} | {"none": changes[names[0]]}
    )
    assert lost.pop("none") == 0  # of a name that no product has
    with torch.no_grad():
        want = divergence(work.model, work.spec, work._stepped(), texts)
        for name in names:
            matrices[name] += changes[name]  # a view of the tensor
            got = divergence(work.model, work.spec, work._stepped(), texts)
            matrices[name] -= changes[name]
            measured = float(sum((w.exp() * (w - g)).sum() for w, g in zip(want, got, strict=True)) / ids.numel())
            assert 0.5 < lost[name] / measured < 2, (name, lost[name], measured)
