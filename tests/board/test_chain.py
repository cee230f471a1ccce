"""What a chain of pieces says of itself: the times and the layer tables of its engines together."""

import types

import numpy as np
import pytest
from kvgate import contract as c
from kvgate.board import layertable
from kvgate.board.chain import Chain

LAYERS = [
    [{"operator": "exNorm", "target": "NPU", "us": 120.0}, {"operator": "Gather", "target": "CPU", "us": 30.0}],
    [{"operator": "Conv", "target": "NPU", "us": 200.0}, {"operator": "exNorm", "target": "NPU", "us": 100.0}],
]
TABLES = [
    {"npu_us": npu, "cpu_us": cpu, "boundary_us": 4.0, "source": layertable.SOURCE, "why": None,
     "operators": [{"name": n}], "layers": LAYERS[n]}
    for n, (npu, cpu) in enumerate(((120.0, 30.0), (300.0, 0.0)))
]  # fmt: skip
UNREAD = dict.fromkeys(TABLES[0]) | {"why": "layer table: got 0 lines", "source": layertable.SOURCE}


def contract(part: str, inputs: tuple, outputs: tuple) -> c.Contract:
    return c.Contract("cpu_managed", part, "plain", "", 4, 2, c.Cache(4), (), (), (), inputs, outputs, "")


def engine(run_us: float | None = None, table: dict | None = None) -> types.SimpleNamespace:
    made = types.SimpleNamespace(last_us=lambda: {"run_us": run_us})
    if table:
        made.layers = lambda: table
    return made


def chain(*engines: object) -> Chain:
    return Chain([(x, contract("head", (), ())) for x in engines])


def test_times_are_added_where_every_piece_has_one():
    assert chain(engine(3.0), engine(4.5)).last_us() == {"run_us": 7.5}
    assert chain(engine(3.0), engine(None)).last_us() == {"run_us": None}
    assert chain(engine(3.0), object()).last_us() == {"run_us": None}


def test_layer_tables_are_one():
    found = chain(*(engine(1, x) for x in TABLES)).layers()
    assert (found["npu_us"], found["cpu_us"], found["boundary_us"], found["why"]) == (420.0, 30.0, 8.0, None)
    assert found["operators"] == [{"name": 0}, {"name": 1}]
    assert [(x["operator"], x["target"], x["us"]) for x in found["layers"]] == [
        ("exNorm", "NPU", 220.0), ("Conv", "NPU", 200.0), ("Gather", "CPU", 30.0)
    ]  # fmt: skip
    assert chain(engine(1, TABLES[0]), engine(1)).layers() is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_table_that_was_not_understood_is_told(order):
    tables = [TABLES[0], UNREAD]
    found = chain(*(engine(1, tables[n]) for n in order)).layers()
    assert found["npu_us"] is None and found["why"] == "layer table: got 0 lines"


def test_the_stream_goes_from_piece_to_piece_and_a_wide_head_comes_together():
    stream = c.Tensor("hidden", c.HIDDEN, (1, 1, 2))
    out = c.Tensor("hidden.out", c.HIDDEN, (1, 1, 2))
    first = contract("layers.0-0", (c.Tensor("embedding", c.EMBEDDING, (1, 1, 2)),), (out,))
    heads = [contract(f"head.{n}", (stream,), (c.Tensor("logits", c.LOGITS, (1, 1, 2)),)) for n in range(2)]
    added = types.SimpleNamespace(step=lambda feeds: {"hidden.out": feeds["embedding"] + 1})
    times = [types.SimpleNamespace(step=lambda feeds, n=n: {"logits": feeds["hidden"] * n}) for n in (10, 100)]
    made = Chain([(added, first), *zip(times, heads, strict=True)])
    fed = {"embedding": np.array([[[1.0, 2.0]]], np.float32)}
    assert made.step(fed)["logits"].tolist() == [[[20, 30, 200, 300]]]
    assert made.stream(fed).tolist() == [[[2, 3]]]
