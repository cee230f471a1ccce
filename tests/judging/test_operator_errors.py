"""The kinds of an operator's error on made-up figures: each rule, and what just misses it."""

from pathlib import Path
from typing import Any

import pytest
from kvgate.judging import operator_errors

README = Path(__file__).parents[2] / "README.md"
NAMES = [rule.__name__.replace("_", " ") for rule in operator_errors.RULES]


def row(tensor: str, operator: str = "Conv", **more: Any) -> dict[str, Any]:
    body = {"operator": operator, "tensor": tensor, "inputs": [], "isolated_l2": 0.01, "accumulated_l2": 0.01}
    body |= {"dtype": "int8", "low": -1.0, "high": 1.0, "scale": 2 / 255, "golden": [-1.0, 1.0], "overflow": 0}
    return body | {"sorted_l2": 0.01, "channels": 3.0, "outside": 0.0, "clipped_l2": 0.0} | more


def off(*rows: dict[str, Any], **more: Any) -> operator_errors.Off:
    """The last row is the one that is off."""
    return operator_errors.Off(rows[-1], {x["tensor"]: x for x in rows}, ["mask.0"], **more)


def kind(*rows: dict[str, Any], **more: Any) -> str:
    found = operator_errors.explain(off(*rows, **more))
    return found.kind if found else ""


def untold(text: str) -> list[str]:
    """The kinds that a text on the diagnosis does not name; only its paragraphs on the diagnosis count."""
    told = " ".join(" ".join(x for x in text.split("\n\n") if "diagnosis.json" in x).split())
    return [name for name in NAMES if name not in told]


# Of each rule figures that show its kind, the operator that is off last.
BROKEN = row("y", inputs=["x"], isolated_l2=0.3)
SHOWN: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "overflow": ([row("y", "Mul", dtype=None, overflow=3, isolated_l2=None, scale=None)], {}),
    "layout": ([row("y", "Concat", isolated_l2=1.2, accumulated_l2=1.2, sorted_l2=0.01, dtype=None)], {}),
    "mask": ([row("mask.0_int8", scale=39.2), BROKEN | {"inputs": ["mask.0_int8"]}], {"mask": -1e4}),
    "coverage": ([row("y", clipped_l2=0.09, outside=0.031, isolated_l2=0.1)], {}),
    "joint scale": ([row("x", golden=[-8.0, 8.0]), BROKEN], {}),
    "wide range": ([row("x", low=-1229.0, high=1229.0, golden=[-12.5, 11.4], scale=9.6), BROKEN], {}),
    "outlier channel": ([row("x", "Add", channels=40.0), BROKEN], {}),
    "weights": ([row("x", dtype=None, isolated_l2=1e-4), BROKEN | {"dtype": None}], {"dtype": "w4a16"}),
}


@pytest.mark.parametrize("rule", operator_errors.RULES, ids=NAMES)
def test_a_kind_is_called_as_its_rule(rule):
    """The README names the rules; what a diagnosis prints is the kind. Only this rule sees it in these figures."""
    name = rule.__name__.replace("_", " ")
    rows, more = SHOWN[name]
    shown = off(*rows, **more)
    assert {other.__name__: found.kind for other in operator_errors.RULES if (found := other(shown))} == {
        rule.__name__: name
    }


def test_the_readme_names_every_kind():
    text = README.read_text()
    assert untold(text) == []
    assert untold(text.replace("overflow", "")) == ["overflow"]


def test_the_first_over_the_limit():
    rows = [row("a", "Input", isolated_l2=1.0), row("b"), row("c", isolated_l2=0.06), row("d", isolated_l2=0.9)]
    assert operator_errors.first(rows, 0.05)["tensor"] == "c" and operator_errors.first(rows, 0.1)["tensor"] == "d"
    assert operator_errors.first(rows[:2], 0.05) is None
    assert operator_errors.first([row("b"), row("nan", isolated_l2=None)], 0.05)["tensor"] == "nan"
    undumped = {k: v for k, v in row("x", isolated_l2=None).items() if k != "golden"}
    assert operator_errors.first([undumped], 0.05) is None  # no figure is no error


def test_nothing_shown_is_no_kind():
    assert kind(row("x", isolated_l2=0.1)) == ""


MASKS = (row("mask.0_int8", "exDataConvert", scale=39.2), row("mask.0_rs", "Reshape", inputs=["mask.0_int8"]))


@pytest.mark.parametrize(
    ("mask", "inputs", "dtype", "expected"),
    [
        (-1e4, ["mask.0_int8"], "int8", "mask"),
        (-1e4, ["sum"], "int8", "mask"),  # through the sum that adds it
        (-100, ["mask.0_int8"], "int8", ""),
        (-1e4, ["keys"], "int8", ""),
        (-1e4, ["mask.0_int8"], "float16", ""),
    ],
)
def test_mask(mask, inputs, dtype, expected):
    rows = (*MASKS, row("keys"), row("sum", "Add", inputs=["keys", "mask.0_rs"]))
    broken = row("p", "exSDPAttention", inputs=inputs, dtype=dtype, isolated_l2=0.6)
    assert kind(*rows, broken, mask=mask) == expected
    if expected:
        found = operator_errors.explain(off(*rows, broken, mask=mask))
        assert "-100" in found.remedy.text and "int8 tensor, in steps of" in found.text


def test_a_mask_before_a_product_is_not_this_operators():
    rows = (*MASKS, row("p", "exSDPAttention", inputs=["mask.0_int8"]), row("out", inputs=["p"], isolated_l2=0.2))
    assert kind(row("y", "Add"), *rows, mask=-1e4) == ""


def test_coverage():
    cut = {"clipped_l2": 0.09, "outside": 0.031, "isolated_l2": 0.1}
    found = operator_errors.explain(off(row("x", **cut)))
    assert found.kind == "coverage" and "3.1 % of its values" in found.text and "calibration" in found.remedy.text
    assert kind(row("x", **cut | {"isolated_l2": 0.2})) == ""  # most of the error has another cause


def test_joint_scale():
    whole = row("qkv", golden=[-8.0, 8.0])
    part = row("v", "Split", inputs=["qkv"], isolated_l2=0.1)
    found = operator_errors.explain(off(whole, part))
    assert found.kind == "joint scale" and "8 times as large in qkv" in found.text and "qkv" in found.remedy.text
    assert kind(row("qkv", golden=[-2.0, 2.0]), part) == ""
    assert kind(whole, part | {"scale": 0.5}) == ""  # it has a scale of its own


def test_outlier_channel():
    source = row("residual", "Add", channels=40.0)
    broken = row("y", inputs=["residual"], isolated_l2=0.3)
    found = operator_errors.explain(off(source, broken))
    assert (found.kind, found.tensor) == ("outlier channel", "residual") and "rotate" in found.remedy.text
    assert kind(row("residual", "Add", channels=12.0), broken) == ""
    assert kind(source | {"dtype": "float16"}, broken) == ""
    product = operator_errors.explain(off(row("residual", "Mul", channels=40.0), broken))
    assert product.kind == "outlier channel" and "outliers" in product.remedy.text  # no rotation reaches it


def test_a_range_wider_than_this_steps_values_need():
    norm = row("norm", "exNorm", inputs=["sum"], isolated_l2=0.5)
    source = row("sum", "Add", low=-1229.0, high=1229.0, golden=[-12.5, 11.4], scale=9.6)
    found = operator_errors.explain(off(source, norm))
    assert (found.kind, found.tensor) == ("wide range", "sum") and found.text.endswith(
        "is 98.3 times its values here: wider than this step's values need"
    )
    assert "w8a8_outliers" in found.remedy.text
    assert kind(source | {"low": -60.0, "high": 60.0}, norm) == ""
    assert kind(source | {"dtype": "float16"}, norm) == ""


def test_headroom_is_no_wide_range():
    """int16's ranges are made wider on purpose: by four, of what was seen."""
    norm = row("norm", isolated_l2=0.1, low=-12.0, high=12.0)
    assert kind(norm, headroom=1.0) == "wide range" and kind(norm, headroom=4.0) == ""


def test_a_wide_range_is_none_of_a_tensor_in_float16():
    """As kvgate.compiler.snapshot gives one that hybrid quantization left so: with a range and without a scale."""
    left = row("sum", "Add", dtype="float16", low=-1229.0, high=1229.0, golden=[-12.5, 11.4], scale=None, channels=40.0)
    assert kind(left, row("norm", "exNorm", inputs=["sum"], isolated_l2=0.5)) == ""


def test_the_operators_that_have_figures():
    undumped = {k: v for k, v in row("x").items() if k != "golden"}
    assert [x["tensor"] for x in operator_errors.work([row("a", "Input"), undumped, row("b")])] == ["b"]


def test_overflow():
    broken = row("square", "Mul", dtype=None, overflow=3, isolated_l2=None, scale=None)
    assert kind(broken) == "overflow"
    assert kind(broken | {"dtype": "int8"}) == ""  # float32 values beyond float16 do not matter to integers


def test_layout():
    moved = {"isolated_l2": 1.2, "accumulated_l2": 1.2, "sorted_l2": 0.01, "dtype": None}
    assert kind(row("y", "Concat", **moved)) == "layout"
    assert kind(row("y", "Concat", **moved | {"sorted_l2": 0.5})) == ""
    assert kind(row("x", accumulated_l2=0.4), row("y", "Concat", **moved, inputs=["x"])) == ""  # it came moved


def test_weights():
    rows = row("x", "exNorm", dtype=None, isolated_l2=1e-4), row("y", dtype=None, inputs=["x"], isolated_l2=0.12)
    found = operator_errors.explain(off(*rows, dtype="w4a16"))
    assert found.kind == "weights" and "int4" in found.text
    assert kind(*rows, dtype="fp16") == ""
    assert kind(rows[0] | {"isolated_l2": 0.1}, rows[1], dtype="w4a16") == ""
