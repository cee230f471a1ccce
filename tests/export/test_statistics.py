"""Statistics read whole calibration traces, whatever the capacity of the graph that is exported later."""

import graphs
import numpy as np
import pytest
import torch
from kvgate.export import load, preparation, statistics
from kvgate.export.prepare import prepare

LONG, SHORT = 40, 10


class Step:
    STATISTICS = True


def collected(folder, model, tokens) -> statistics.Statistics:
    path = folder / f"{len(tokens)}.npz"
    np.savez(path, tokens=tokens)
    with torch.no_grad():
        work = preparation.Work(prepare(model, "recipe"), [path])
        return work._measured(Step)


def test_a_trace_is_read_to_its_end(tmp_path):
    """40 tokens, as the drawn texts of 512 beside a capacity of 128: no capacity stands here yet."""
    made = graphs.Model.of(tmp_path, "llama")
    tokens = made.text(LONG).tokens
    short, long = (collected(tmp_path, load.model(made.checkpoint), x) for x in (tokens[:SHORT], tokens))
    assert set(short.gram) == set(long.gram) and len(long.gram) == 11
    for name, gram in long.gram.items():
        assert gram.trace() > 1.5 * short.gram[name].trace()
        assert (long.peak[name] >= short.peak[name] * (1 - 1e-5)).all()
    first = "model.layers.0.self_attn.qkv"  # reads normed rows: each adds about as much
    assert (long.gram[first].trace() / short.gram[first].trace()).item() == pytest.approx(LONG / SHORT, rel=0.2)
    assert any((long.peak[n] > short.peak[n]).any() for n in long.peak)
