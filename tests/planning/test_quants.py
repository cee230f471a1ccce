"""What a quant may ask of the toolkit, while planning: every mistake is one line."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvgate.jobs.rows import Row
from kvgate.planning import config, sweep

BASE = Path(__file__).parents[2]
TINY = yaml.safe_load((BASE / "tests/workflow/tiny.yaml").read_text())
SHIPPED = yaml.safe_load((BASE / "config/quants.yaml").read_text())


def rows(entry: dict[str, Any], platform: str = "rk3576") -> list[Row]:
    override = copy.deepcopy(TINY) | {"quants": {"q": copy.deepcopy(entry)}}
    override["sweep"]["blocks"][0] |= {"quants": ["q"], "platforms": [platform]}
    return sweep.rows(config.load(BASE, override), BASE)


def quant(dtype: str, hybrid: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    settings = {"quantized_dtype": dtype, **more.pop("config", {})}
    return {"mask": -100, "calibrate": True, "config": settings, "hybrid": hybrid or {}, **more}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_set_plans(name: str) -> None:
    assert {row.quant for row in rows(SHIPPED[name])} == {"q"}


@pytest.mark.parametrize("dtype", ["w8a8", "w4a16", "w16a16i_dfp"])
def test_a_hybrid_with_float16_plans(dtype: str) -> None:
    assert rows(quant(dtype, {"*": "float16"}))


AUTO = {"auto_hybrid": True}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a dtype that is none": (
        quant("w8a8", {"*attn/*": "int4"}),
        'quants.q.hybrid.*attn/*: got "int4", known: float16, int16',
    ),
    "a limit that is none": (
        quant("w8a8", {"Add:*|Mul:>abc": "float16"}),
        "quants.q.hybrid: got the limit '>abc' in 'Add:*|Mul:>abc', allowed: a number, as in '>32'",
    ),
    "a list of patterns": (quant("w8a8") | {"hybrid": ["*attn*"]}, 'quants.q.hybrid: got ["*attn*"], allowed: object'),
    "int16 under w4a16": (
        quant("w4a16", {"a": "float16", "b": "int16"}),
        "quants.q.hybrid: got int16 for b, allowed under w4a16: float16",
    ),
    "hybrid without quantization": (
        {"mask": -1, "hybrid": {"*": "float16"}},
        "quants.q.hybrid: got quantized_dtype fp16, allowed: w8a8, w4a16, w16a16i_dfp",
    ),
    "headroom for activations that are float": (
        quant("w4a16", headroom=4),
        "quants.q.headroom: got quantized_dtype w4a16, allowed: w8a8 or w16a16i_dfp (elsewhere activations are float)",
    ),
    "headroom that narrows": (quant("w8a8", headroom=0.5), "quants.q.headroom: got 0.5, allowed: at least 1"),
    "headroom beside the toolkit's own choice": (
        quant("w8a8", headroom=2, build={"auto_hybrid": True}),
        "quants.q: got headroom and build.auto_hybrid, allowed: one of them",
    ),
    "hybrid without calibration": (
        quant("w8a8", {"*": "float16"}, calibrate=False),
        "quants.q.config.quantized_dtype: quantizes, lacks calibrate: true",
    ),
    "calibration without a dtype": (
        {"mask": -1, "calibrate": True},
        "quants.q.calibrate: calibrates, lacks config.quantized_dtype",
    ),
    "patterns and automatic": (
        quant("w8a8", {"*": "float16"}, build=AUTO),
        "quants.q: got hybrid and build.auto_hybrid, allowed: one of them",
    ),
    "automatic where it does nothing": (
        quant("w4a16", build=AUTO),
        "quants.q.build.auto_hybrid: got quantized_dtype w4a16, allowed: w8a8 (",
    ),
    "a threshold alone": (
        quant("w8a8", config={"auto_hybrid_cos_thresh": 0.9}),
        "quants.q.config.auto_hybrid_cos_thresh: does nothing alone, lacks build.auto_hybrid: true",
    ),
    "an argument that the toolkit has not": (
        quant("w8a8", config={"disable_rule": ["x"]}),
        "quants.q.config: got the unknown argument disable_rule, known: auto_hybrid_cos_thresh, ",
    ),
    "an argument that is another call's": (
        quant("w8a8", config=AUTO),
        "quants.q.config: got the unknown argument auto_hybrid, known: ",
    ),
    "an argument of the stage's own": (
        quant("w8a8", build={"dataset": "x"}),
        "quants.q.build: got the unknown argument dataset, known: auto_hybrid, rknn_batch_size",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str) -> None:
    entry, expected = BAD[name]
    with pytest.raises(config.ConfigError) as error:
        rows(entry)
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)
