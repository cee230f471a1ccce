"""What the real toolkit makes of a prefill part: nothing on the CPU, fused attention, K and V as in float32."""

import families
import graphs
import pytest
from graphs import STRATEGIES, Model

CAPACITY, T = 64, 16
# Row by row what could leave the NPU or the fusion: norms of heads, one KV head, a soft cap, alibi and its rounding.
FUSED = {"qwen3": 1, "olmo2": 1, "gemma2": 0, "gemma3_text": 1, "phi": 1, "bloom": 1, "falcon_alibi": 1}


def built(model: Model, module: str, form: str = "recipe", **config):
    """build.json, and the worst L2 of a token's K or V over isolated chunks."""
    text = model.text(CAPACITY)
    body = model.build(model.prefill(module, form, CAPACITY, T), text, quant={"config": config})
    found = body["observed"]
    at = found["isolated/positions"]
    assert len(at) == 4 * T
    pairs = [
        (x, rows[p]) for name, rows in text.states.items() for x, p in zip(found[f"isolated/{name}"], at, strict=True)
    ]
    return body, max(graphs.relative(*pair) for pair in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("module", STRATEGIES)
def test_nothing_runs_on_the_cpu(tmp_path, module):
    """But the scatters and the making of their index, as in the decode part; one attention, as the last is dropped."""
    body, error = built(Model.of(tmp_path, "llama", families.TOOLKIT), module)
    scatters = {"ScatterND": 4, "Concat": 2, "Reshape": 1} if module == "fixed_max_scatter" else {}
    assert body["cpu_operators"] == scatters
    assert body["operators"]["exSDPAttention@NPU"] == 1
    assert error < 3e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", FUSED)
def test_every_kind_of_attention(tmp_path, family):
    body, error = built(Model.of(tmp_path, family, families.TOOLKIT), "cpu_managed")
    assert body["cpu_operators"] == {}
    assert body["operators"].get("exSDPAttention@NPU", 0) == FUSED[family]
    assert error < 3e-3


@pytest.mark.slow
@pytest.mark.parametrize("module", ["cpu_managed", "fixed_max_blend"])
def test_the_plain_form(tmp_path, module):
    body, error = built(Model.of(tmp_path, "llama", families.TOOLKIT), module, "plain")
    assert body["cpu_operators"] == {} and body["operators"]["exSDPAttention@NPU"] == 1
    assert error < 3e-3


@pytest.mark.slow
def test_without_its_weights_it_is_small_and_simulates_the_same(tmp_path):
    """`remove_weight`: the artifact for a runtime that lends it those of the decode part."""
    whole, error = built(Model.of(tmp_path / "whole", "llama", families.TOOLKIT), "cpu_managed")
    slave, same = built(Model.of(tmp_path / "slave", "llama", families.TOOLKIT), "cpu_managed", remove_weight=True)
    assert slave["artifact_bytes"] * 5 < whole["artifact_bytes"]
    assert error == same
