"""Figures of quantized rows must not hang on what PCs differ by: calibrated on a cache disturbed by 1e-6."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import Graph, Model, relative
from kvgate.checkpoint import reference
from kvgate.observe import Trace

pytestmark = pytest.mark.slow

CAPACITY = 24
# The kinds of rows that are meant to behave: weights in int4 alone, and activations in int16.
QUANTS: dict[str, dict[str, Any]] = {
    "w4a16_g32": {
        "mask": -10000,
        "calibrate": True,
        "config": {"quantized_dtype": "w4a16", "quantized_method": "group32"},
    },
    "w16a16i_dfp": {"mask": -100, "calibrate": True, "config": {"quantized_dtype": "w16a16i_dfp"}, "headroom": 4},
}


def disturbed(trace: Trace, by: float) -> Trace:
    generator = np.random.default_rng(7)

    def off(rows: np.ndarray) -> np.ndarray:
        return (rows * (1 + by * generator.standard_normal(rows.shape))).astype(np.float32)

    return replace(trace, states={name: off(x) for name, x in trace.states.items()})


class Rows:
    """A text's perplexity and mean error of the logits, by calibration."""

    def __init__(self, root: Path, quant: str) -> None:
        self.model, self.quant = Model.of(root, "llama"), QUANTS[quant]
        self.graph: Graph = self.model.export("fixed_max_blend", capacity=CAPACITY)
        self.text = self.model.text(CAPACITY, seed=5)
        self.calibration = [self.model.text(CAPACITY, seed=seed) for seed in (2, 3)]

    def figures(self, by: float) -> tuple[float, float]:
        texts = [disturbed(text, by) if by else text for text in self.calibration]
        seen = self.model.build(self.graph, self.text, CAPACITY, self.quant, texts)["observed"]
        logits = seen["isolated/logits"].astype(np.float32)
        assert seen["isolated/positions"].tolist() == list(range(CAPACITY))
        return reference.perplexity(self.text.tokens, logits), relative(logits, self.text.logits)


@pytest.mark.parametrize("quant", QUANTS)
def test_figures_of_rows_that_behave_stay_within_a_percent(tmp_path: Path, quant: str) -> None:
    rows = Rows(tmp_path, quant)
    found, other, far = (rows.figures(by) for by in (0, 1e-6, 0.5))
    assert other == pytest.approx(found, rel=0.01)
    wanted = reference.perplexity(rows.text.tokens, rows.text.logits)
    assert found[0] == pytest.approx(wanted, rel=0.05)  # it behaves
    if quant == "w16a16i_dfp":  # where activations are calibrated, another calibration is seen
        assert far != found
