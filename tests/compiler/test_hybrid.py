"""Hybrid quantization, by patterns and automatic: the shipped sets on tiny decoders, with the real toolkit."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from graphs import Model, relative
from kvgate.compiler import hybrid
from kvgate.compiler.hybrid import Tensor
from kvgate.compiler.request import Failure
from kvgate.jobs import record
from onnx import helper

QUANTS = yaml.safe_load((Path(__file__).parents[2] / "config/quants.yaml").read_text())
CAPACITY = 16
TENSORS = {
    "/layers.0/attn/q_mm": Tensor("Conv"),
    "/layers.0/Add-rs": Tensor("Add", 40.0, frozenset({"/layers.0/attn/Add_1-rs"})),
    "/layers.0/attn/Add_1-rs": Tensor("Conv", 12.0, frozenset({"/layers.0/attn/q_mm"})),
    "/norm": Tensor("exNorm", 3.0, frozenset({"/layers.0/Add-rs"})),
}


Built = tuple[dict[str, Any], float]  # record, error


def built(folder: Path, family: str, quant: dict[str, Any], module: str = "cpu_managed") -> Built:
    """The build's record, and the median over the steps of the K or V that is worst.

    Not the worst step: random tokens leave the MLP's calibrated ranges now and then, whatever is float16 elsewhere.
    """
    model = Model(folder, family) if (folder / "models" / family).exists() else Model.of(folder, family)
    trace = model.text(CAPACITY)
    texts = [model.text(CAPACITY, seed) for seed in (2, 3)]
    body = model.build(model.export(module, capacity=CAPACITY), trace, 8, quant, texts)
    return body, max(median(body["observed"], kind, trace.states) for kind in ("key", "value"))


def median(found: dict[str, np.ndarray], kind: str, true: dict[str, np.ndarray]) -> float:
    at = found["isolated/positions"]
    assert len(at) == 8
    return max(
        float(np.median([relative(x, t[p]) for x, p in zip(found[f"isolated/{name}"], at, strict=True)]))
        for name, t in true.items()
        if name.endswith(kind)
    )


def cache(body: dict[str, Any]) -> set[str]:
    """The dtypes of all cache inputs and outputs."""
    tensors = body["boundary"]["inputs"] + body["boundary"]["outputs"]
    return {t["dtype"] for t in tensors if t["name"].startswith(("key.", "value."))}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("Mull:>20", "operator 'Mull' in 'Mull:>20'"),
        ("attn/*|Conv:>99", "pattern 'attn/*|Conv:>99', which fits none of 4 tensors"),
    ],
)
def test_a_limit_hides_no_mistake(pattern: str, said: str) -> None:
    with pytest.raises(Failure, match=re.escape(f"hybrid: got {said}")):
        hybrid.choose({pattern: "float16"}, TENSORS)


def test_an_operator_that_this_graph_has_not_is_no_mistake() -> None:
    for pattern in ("Mul:>20", "exGelu:>20", "ex*:>9"):
        assert hybrid.choose({pattern: "float16"}, TENSORS) == {}


def test_a_pattern_is_of_names_or_of_operators_and_names() -> None:
    assert hybrid.choose({"*attn/*": "float16"}, TENSORS) == dict.fromkeys(list(TENSORS)[:3:2], "float16")
    assert hybrid.choose({"Add:*": "float16"}, TENSORS) == {"/layers.0/Add-rs": "float16"}  # not the bias of a product
    either = hybrid.choose({"exSDPAttention:*|exNorm:*": "float16", "*q_mm": "int16"}, TENSORS)
    assert either == {"/layers.0/attn/q_mm": "int16", "/norm": "float16"}


def test_a_matrix_names_its_product_whatever_the_fusions_called_it() -> None:
    graph = decoder_graph()
    products = hybrid._products(graph)
    assert products["/attn/MatMul"] == "attn.qkv" and "/attn/scores" not in products
    fused = [("Conv", "/attn/MatMul#3", "/attn/Add-rs_gather"), ("Add", "/attn/MatMul#3_add", "/Add-rs")]
    graph = helper.make_graph([helper.make_node(o, ["a", "b"], [out], name=n) for o, n, out in fused], "g", [], [])
    settings = {name: {"min": [], "max": []} for _, _, name in fused}
    tensors = hybrid._tensors(graph, settings, products)
    assert hybrid.choose({"@attn.qkv": "float16"}, tensors) == {"/attn/Add-rs_gather": "float16"}
    with pytest.raises(Failure, match=r"hybrid: got pattern '@attn\.out', which fits none of 2 tensors, e\.g\. "):
        hybrid.choose({"@attn.out": "float16"}, tensors)


def decoder_graph() -> Any:
    nodes = [("/attn/MatMul", "model.attn.qkv"), ("/attn/scores", "keys")]
    made = [helper.make_node("MatMul", ["x", weight], [name], name=name) for name, weight in nodes]
    weight = helper.make_tensor("model.attn.qkv", onnx.TensorProto.FLOAT, [1, 1], [0.0])
    return helper.make_graph(made, "g", [], [], [weight])


def test_patterns_that_disagree_are_one_line() -> None:
    with pytest.raises(Failure, match=r"hybrid: got float16 and int16 for /layers\.0/attn/q_mm, allowed: "):
        hybrid.choose({"Conv:*": "float16", "*q_mm": "int16"}, TENSORS)


def test_a_limit_is_of_values_and_takes_what_reads_them() -> None:
    over = hybrid.choose({">32": "float16"}, TENSORS)
    assert over == {"/layers.0/Add-rs": "float16", "/norm": "float16"}
    assert hybrid.choose({"Conv:>10": "float16"}, TENSORS).keys() == {"/layers.0/attn/Add_1-rs", "/layers.0/Add-rs"}
    assert hybrid.choose({">100": "float16"}, TENSORS) == {}  # no mistake


@pytest.mark.parametrize("pattern", ["add:*", "Add", "Softmax:*|*Sdpa:*", "*attention/*"])
def test_a_pattern_that_fits_nothing_is_one_line_with_names_that_there_are(pattern: str) -> None:
    with pytest.raises(Failure) as error:
        hybrid.choose({"Add:*": "float16", pattern: "float16"}, TENSORS)
    assert str(error.value).startswith(f"hybrid: got pattern '{pattern}', which fits none of 4 tensors, e.g. ['Conv:/")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["w8a8_outliers", "w16a16i_outliers"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # a soft cap stops the fusion of attention
def test_the_shipped_outlier_sets(name: str, family: str, tmp_path: Path) -> None:
    _, error = built(tmp_path, family, QUANTS["w8a8" if name.startswith("w8") else "w16a16i_dfp"])
    mixed, less = built(tmp_path, family, QUANTS[name])
    assert set(mixed["hybrid"].values()) == {"float16"} and any("logits" in n for n in mixed["hybrid"])
    if name.startswith("w8") and family == "llama":
        assert less < 0.7 * error, (less, error)
    else:  # random weights have no outliers to begin with: no worse, but for float16's own rounding
        assert less < max(1.1 * error, 0.002), (less, error)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "gpt2"])
def test_the_shipped_hybrid_set(family: str, tmp_path: Path) -> None:
    """It fits every family's names; attention and cache are float16 without an operator on the CPU, and the error
    falls to less than half (measured: 0.16 to 0.33 of w8a8's)."""
    plain, error = built(tmp_path, family, QUANTS["w8a8"])
    mixed, less = built(tmp_path, family, QUANTS["w8a8_hybrid"])
    assert less < 0.5 * error, (less, error)
    assert cache(plain) == {"int8"} and cache(mixed) == {"float16"}
    assert plain["hybrid"] == {} and set(mixed["hybrid"].values()) == {"float16"}
    chosen = [name for name in mixed["hybrid"] if name.endswith("_sdpa")]
    assert len(chosen) == 2 and "embedding" in mixed["hybrid"] and any("logits" in n for n in mixed["hybrid"])
    assert mixed["cpu_operators"] == {}
    assert mixed["weight_bytes"] < 2 * plain["weight_bytes"]  # the head is half of so small a model


@pytest.mark.slow
def test_a_cache_that_is_fed_back_is_float16_on_both_sides(tmp_path: Path) -> None:
    body, error = built(tmp_path, "llama", QUANTS["w8a8_hybrid"], "fixed_max_blend")
    assert cache(body) == {"float16"} and body["cpu_operators"] == {}
    patterns = {k: v for k, v in QUANTS["w8a8_hybrid"]["hybrid"].items() if k != "*.out_int8"}
    without, more = built(tmp_path, "llama", QUANTS["w8a8_hybrid"] | {"hybrid": patterns}, "fixed_max_blend")
    assert cache(without) == {"int8"} and more > 1.1 * error


@pytest.mark.slow
def test_headroom_widens_every_integer_range(tmp_path: Path) -> None:
    def ranges(headroom: float) -> dict[str, float]:
        quant = QUANTS["w16a16i_dfp"] | {"headroom": headroom}
        body, _ = built(tmp_path / str(headroom), "llama", quant)
        return {t["name"]: t["high"] for t in body["boundary"]["inputs"] if t["dtype"] == "int16"}

    seen, wide = ranges(1), ranges(4)
    assert seen and wide == pytest.approx({name: 4 * high for name, high in seen.items()}, rel=1e-3)


def test_the_toolkits_own_choice_goes_by_its_thresholds(tmp_path: Path) -> None:
    def at(cosine: float) -> Built:
        config = QUANTS["w8a8_auto"]["config"] | {"auto_hybrid_cos_thresh": cosine}
        return built(tmp_path, "llama", QUANTS["w8a8_auto"] | {"config": config})

    plain, error = built(tmp_path, "llama", QUANTS["w8a8"])
    none, same = at(0.5)
    assert none["hybrid"] == {} and same == error and none["cycles"] == plain["cycles"]
    shipped, less = built(tmp_path, "llama", QUANTS["w8a8_auto"])
    everything, least = at(0.99999)
    assert 10 < len(shipped["hybrid"]) <= len(everything["hybrid"])
    assert least < 0.01 < less < error
    assert plain["cycles"] < shipped["cycles"] <= everything["cycles"] and shipped["cpu_operators"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["w4a16", "w16a16i_dfp"])
def test_no_choice_where_planning_refuses_it(quant: str, tmp_path: Path) -> None:
    """At thresholds that nothing quantized can hold."""
    config = QUANTS[quant]["config"] | {"auto_hybrid_cos_thresh": 0.9999999, "auto_hybrid_euc_thresh": 1e-5}
    body, _ = built(tmp_path, "llama", QUANTS[quant] | {"config": config, "build": {"auto_hybrid": True}})
    assert body["hybrid"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(("quant", "dtype"), [("w4a16", "int16"), ("w4a16", "int8")])
def test_what_planning_refuses_the_toolkit_refuses(quant: str, dtype: str, tmp_path: Path) -> None:
    with pytest.raises(record.Blocked, match=f"'{dtype}' not supported in custom_quantize_layers"):
        built(tmp_path, "llama", QUANTS[quant] | {"hybrid": {"exNorm:*": dtype}})
