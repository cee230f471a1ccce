"""widen: 16 levels out of 15, on the toolkit's grid, in the graph and in the compiler's count of bytes."""

from pathlib import Path

import families
import numpy as np
import onnx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kvgate.jobs import record
from kvgate.judging import metrics
from kvgate.observe import observe
from kvgate.prepare import int4_grid, widened
from kvgate.prepare.widened import Widened
from kvgate.weights import gptq, widen
from test_function import Prepared
from test_gptq import data, off_grid

CONFIG = {
    name: yaml.safe_load((Path(__file__).parents[2] / f"config/{name}.yaml").read_text())
    for name in ("quants", "weights")
}
QUANT = CONFIG["quants"]["w4a16_g32_split2"]


def of_16_levels(rows=96, columns=40, seed=0):
    """Weights as Q4_1 has them: d q + m with q in 0..15, both ends in each group of 32."""
    generator = np.random.default_rng(seed)
    levels = np.clip(np.rint(generator.normal(7.5, 3, (rows // 32, 32, columns))), 1, 14)
    levels[:, 3], levels[:, 20] = 0, 15
    step, low = generator.uniform(0.5, 2, (2, rows // 32, 1, columns))
    return (levels * step - low * 7).reshape(rows, columns).astype(np.float32)


def lost(found, weight, gram):
    error = found - weight
    return float(np.sum(error * (gram @ error)))


def points(made, group=32):
    """Q, and M as the toolkit sees it: padded, its last group is its own."""
    rows = widened.rows(made.matrix, made.signs)
    more = made.matrix[rows:]
    return made.matrix[:rows], np.pad(more, ((0, -len(more) % group), (0, 0)))


@pytest.mark.parametrize("signs", [1, 3, 5])
@pytest.mark.parametrize("measured", [True, False])
def test_both_parts_stay_on_the_toolkits_grid(signs, measured):
    _, weight, gram = data()
    for part in points(widen.linear("w", weight, gram if measured else None, 32, signs)):
        assert off_grid(part, 32) < 1e-6


def test_weights_of_16_levels_lose_next_to_nothing():
    """One sign a group keeps both ends: what is left is the rounding of the offsets."""
    weight = of_16_levels()
    made = widen.linear("w", weight, None, 32, 5)
    step = (weight.reshape(-1, 32, 40).max(1) - weight.reshape(-1, 32, 40).min(1)) / 15
    error = np.abs(made.flat() - weight).reshape(-1, 32, 40) / step[:, None]
    assert np.sqrt(np.mean(error**2)) < 0.08  # of a step; the nearest points of a grid about zero: 0.5 and more
    nearest = np.abs(int4_grid.nearest(weight, 32) - weight).reshape(-1, 32, 40) / step[:, None]
    assert np.sqrt(np.mean(nearest**2)) > 3 * np.sqrt(np.mean(error**2))


def test_more_signs_lose_less_and_the_fit_less_again():
    _, _, gram = data()
    weight = of_16_levels()
    rounded = [lost(widen.linear("w", weight, np.diag(np.diag(gram)), 32, n).flat(), weight, gram) for n in (1, 3, 6)]
    assert rounded[0] > rounded[1] > rounded[2]
    assert lost(widen.linear("w", weight, gram, 32, 3).flat(), weight, gram) < 0.97 * rounded[1]  # measured: 0.94


def test_weights_of_more_levels_are_rounded_as_in_gptq(monkeypatch):
    _, weight, gram = data()
    made = lost(widen.linear("w", weight, gram, 32, 3).flat(), weight, gram)
    assert made < 0.8 * lost(gptq.linear("w", weight, gram, 32)[0], weight, gram)
    monkeypatch.setattr(widen, "_EXACT", 1.0)
    assert made < 0.8 * lost(widen.linear("w", weight, gram, 32, 3).flat(), weight, gram)


@given(st.integers(0, 2**31), st.integers(1, 4))
def test_the_flat_matrix_is_what_the_wide_product_gives(seed, kinds):
    generator = np.random.default_rng(seed)
    signs = generator.standard_normal((8, kinds)).astype(np.float32)
    matrix = generator.standard_normal((24 + 3 * kinds, 5)).astype(np.float32)
    x = generator.standard_normal(24).astype(np.float32)
    wide = np.concatenate([x, (x.reshape(3, 8) @ signs).T.reshape(-1)])
    assert widened.rows(matrix, signs) == 24
    assert np.allclose(wide @ matrix, x @ Widened(matrix, signs).flat(), atol=1e-4)


def test_equal_weights_and_zeros_come_back():
    weight = np.zeros((64, 3), np.float32)
    weight[:, 1] = 0.5
    assert np.allclose(widen.linear("w", weight, None, 32, 3).flat(), weight, atol=2e-2)
    assert np.isfinite(widen.linear("w", weight, np.eye(64), 32, 3).matrix).all()


@pytest.mark.parametrize(
    ("group", "signs", "text"),
    [
        (24, 3, "group: got 24, allowed: a power of two"),
        (64, 3, "group: got 64, allowed: a divisor of the matrix's 96 input channels"),
        (32, 0, "signs: got 0, allowed: 1 to 6"),
        (32, 7, "signs: got 7, allowed: 1 to 6"),
    ],
)
def test_what_does_not_fit_is_one_line(group, signs, text):
    with pytest.raises(ValueError, match=text):
        widen.linear("w", *data()[1:], group=group, signs=signs)


def test_products_that_read_the_same_tensor_share_its_sums(tmp_path):
    made = Prepared(tmp_path, "llama", "widen", group=16)
    graph = onnx.load(made.graph.folder / "model.onnx", load_external_data=False).graph
    wide = [node for node in graph.node if node.op_type == "Concat" and node.name.endswith("wide.signs.16.5")]
    assert len(made.body["widened"]) == 11  # two layers of qkv, out, gate, up, down; the head
    assert len(wide) == 9  # gate and up are one


def test_a_convolution_is_refused(tmp_path):
    with pytest.raises(record.Blocked, match=r"preparation widen: model\.layers\.0\.self_attn\.out: got a convolution"):
        Prepared(tmp_path, "llama_g8", "widen", group=16)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_entry_without_a_search_leaves_no_matrix_to_the_toolkits_rounding(tmp_path, family):
    steps = [{"options": {}, **step} for step in CONFIG["weights"]["wide_g32"]["steps"]]
    made = Prepared(tmp_path, family, size=families.TOOLKIT, entry={"steps": steps})
    sums, wide = set(made.body["sums"]), set(made.body["widened"])
    assert {name.rpartition(".")[2] for name in sums} == {"out", "weight"} and "lm_head.weight" in sums
    assert len(sums) == 3 and len(wide) == 8 and not sums & wide  # two layers


@pytest.mark.slow
def test_the_artifact_is_the_graph_at_the_bytes_that_it_says(tmp_path):
    """The toolkit finds the same points and rounds nothing; all on the NPU, five rows of 32 more bytes."""
    found = {}
    for name, steps in {"int4": [], "wide": [{"name": "widen", "options": {"group": 32, "signs": 3}}]}.items():
        made = Prepared(tmp_path / name, "llama", size=families.TOOLKIT, entry={"steps": steps})
        body = made.model.build(made.graph, made.trace, 8, QUANT, [made.model.text(12, seed) for seed in (2, 3)])
        float32 = observe(made.graph.engine, made.host, made.trace, ["isolated"], 8)
        got, want = (metrics.centred(x["isolated/logits"]) for x in (body["observed"], float32))
        found[name] = body | {"error": metrics.l2(got, want), "matrices": made.body["parameter_bytes"] / 8}
        assert body["cpu_operators"] == {}
    assert found["wide"]["error"] < 0.005 < 0.05 < found["int4"]["error"]
    more = found["wide"]["matrices"] - found["int4"]["matrices"]
    assert found["wide"]["weight_bytes"] - found["int4"]["weight_bytes"] == pytest.approx(
        more, rel=0.2
    )  # rows are padded
