"""keep: the matrices that it names are float16 in the artifact, with the real toolkit."""

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import yaml
from kvgate.judging import metrics
from kvgate.stages import build
from test_function import Prepared

QUANT = yaml.safe_load((Path(__file__).parents[2] / "config/quants.yaml").read_text())["w4a16_g32_split2"]


def test_a_quant_that_finds_nothing_kept_is_as_if_it_did_not_ask() -> None:
    """So the same build, in one step, and the same artifact."""
    assert build._with_kept(QUANT, []) == QUANT | {"hybrid": {}}
    assert build._with_kept(QUANT, ["a", "b"])["hybrid"] == {"@a": "float16", "@b": "float16"}
    assert build._with_kept(QUANT | {"hybrid": {"Add:*": "float16"}}, ["a"])["hybrid"] == {"Add:*": "float16"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama_g8", "gpt2"])
# g8: out is a convolution. gpt2: the toolkit permutes qkv and gives it another name.
def test_what_a_preparation_kept_is_float16_in_the_artifact(family: str, tmp_path: Path) -> None:
    """By the compiler's count of the weights' bytes, and by the logits."""

    def kept(name: str, *only: str) -> tuple[dict[str, Any], float]:
        steps = [{"name": "keep", "options": {"only": [*only]}}] if only else []
        made = Prepared(tmp_path / name, family, size=families.TOOLKIT, entry={"steps": steps})
        texts = [made.model.text(12, seed) for seed in (2, 3)]
        body = made.model.build(made.graph, made.trace, 8, QUANT, texts)
        sizes = {n: np.prod(t["shape"]) for n, t in made.body["tensors"].items()}
        body["kept"] = sum(sizes[name] for name in made.body["kept"])
        seen = body["observed"]
        true = made.trace.logits[seen["isolated/positions"]]
        return body, metrics.l2(metrics.centred(seen["isolated/logits"]), metrics.centred(true))

    none, error = kept("none")
    some, less = kept("some", "*.1.*qkv", "*c_proj*" if family == "gpt2" else "*down_proj*")
    everything, least = kept("all", "*")
    assert 0 < some["kept"] < everything["kept"]
    for body in (some, everything):
        assert body["weight_bytes"] - none["weight_bytes"] == pytest.approx(1.5 * body["kept"], rel=0.05)
        assert body["cpu_operators"] == {}
    assert least < 0.01 < less < error
