"""Real excerpts of the toolkit's log, as data."""

from pathlib import Path

import pytest
from kvgate.compiler import log

DATA = Path(__file__).parent / "data"


def text(name: str) -> str:
    return (DATA / name).read_text()


def test_table_of_a_fused_graph() -> None:
    summary = log.table(text("rk3576_fp16.log")).summary()
    assert summary["rows"] == 40
    assert summary["operators"]["exSDPAttention@NPU"] == 2
    assert summary["cpu_operators"] == {} and summary["cpu_names"] == []  # inputs and outputs are no operators
    assert summary["cycles"] == 7 * 292 - 292 + 2 * 301 + 575
    assert summary["traffic_bytes"] == 28 * 1024
    assert summary["weight_bytes"] == round(52.9375 * 1024)
    assert summary["internal_bytes"] == round(15.4375 * 1024)


def test_table_without_a_column() -> None:
    """rk3566 has no SparseRatio, and puts work on the CPU; its outputs are rows on the NPU."""
    summary = log.table(text("rk3566_fp16.log")).summary()
    assert summary["rows"] == 48
    assert summary["cpu_operators"] == {"Reshape": 1, "Transpose": 2, "exSoftmax13": 2}
    assert summary["cpu_names"] == ["mask.0_rs#1", "vt0_rs#1", "p0", "vt1_rs#1", "p1"]
    assert summary["cycles"] == 4145 and summary["traffic_bytes"] == 30 * 1024


@pytest.mark.parametrize("column", ["RW(KB)", "Cycles(DDR/NPU/Total)"])
def test_a_missing_figure_is_none_not_zero(column: str) -> None:
    lines = text("rk3566_fp16.log").splitlines()
    head = next(x for x in lines if "OpType" in x)
    start = head.index(column)
    end = head.index("FullName") if column == "RW(KB)" else head.index("RW(KB)")
    table = "\n".join(x[:start] + x[end:] if " RKNN: " in x and len(x) > end else x for x in lines)
    summary = log.table(table).summary()
    missing, kept = ("traffic_bytes", "cycles") if column == "RW(KB)" else ("cycles", "traffic_bytes")
    assert summary[missing] is None and summary[kept] is not None
    assert summary["rows"] == 48


def test_a_row_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fit the columns"):
        log.table(text("rk3576_fp16.log").replace("292/64/292", "many", 1))
    with pytest.raises(ValueError, match="not in the log"):
        log.table("nothing here")


def test_the_table_keeps_no_time() -> None:
    stamped = text("rk3576_fp16.log")
    later = stamped.replace("[18:4", "[19:5")
    assert stamped != later and log.table(stamped) == log.table(later)


def test_findings() -> None:
    found = {x["kind"]: x for x in log.findings(text("warnings.log"))}
    assert "Wb" in found["random_weights"]["text"]
    assert found["fp16_range"]["count"] == 2 and "y-rs" in found["fp16_range"]["text"]
    assert "['z']" in found["constant_output"]["text"]
    assert "corrected to -10000" in found["constant_changed"]["text"]
    assert found["dtype_changed"]["count"] == 11 and "'float32' to 'int8'" in found["dtype_changed"]["text"]
    assert found["error"]["text"] == "config: The quantized_dtype = 'w4a16' not support in 'rk3588'!"
    assert {x["kind"] for x in log.findings(text("rk3566_fp16.log"))} == {"unknown_target", "warning"}
    assert log.findings(text("rk3576_fp16.log")) == []


def test_an_unknown_target_is_counted_and_is_no_error() -> None:
    found = log.findings(text("rk3566_fp16.log") * 2)
    assert next(x for x in found if x["kind"] == "unknown_target")["count"] == 2
    assert log.last_error(text("rk3566_fp16.log")) == ""


def test_a_warning_behind_a_progress_bar_is_seen() -> None:
    bar = (
        "I Loading :   0%|      | 0/1 [00:00<?, ?it/s]\x1b[1;33mW\x1b[0m \x1b[1;33mbuild: something new happened\x1b[0m"
    )
    assert log.findings(bar)[0]["text"] == "build: something new happened"


def test_records_hold_no_absolute_path(tmp_path: Path) -> None:
    assert log.bare(f"E open '{tmp_path}/x.npy' failed 1/2") == "E open 'x.npy' failed 1/2"
    assert log.bare(f"no file {tmp_path}/x.npy") == "no file x.npy"
    assert log.bare("cycles 1/2/3 of a/b") == "cycles 1/2/3 of a/b"
    assert log.bare("rule x at /model/layers.0/Add") == "rule x at /model/layers.0/Add"  # a node, not a file


def test_the_rule_that_a_failed_build_blames() -> None:
    assert log.rule(text("rule.log")) == "rule squeeze_nd_add at /model/model/layers.0/self_attn/Add"
    assert log.rule(text("warnings.log")) == ""
    assert log.findings(text("rule.log")) == []


def test_hybrid_tensors_and_their_dtypes() -> None:
    said = "I RKNN: [01:30:13.802] Meet hybrid type, dtype: {}, tensor: {}"
    lines = [said.format("float16", "/layers.0/mlp/down_proj/MatMul#2"), "I Meet nothing", said.format("int16", "a b")]
    assert log.hybrid("\n".join(lines)) == {"/layers.0/mlp/down_proj/MatMul#2": "float16", "a b": "int16"}
    assert log.hybrid(text("rk3576_fp16.log")) == {}
