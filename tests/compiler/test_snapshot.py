"""The toolkit's dump on made-up files: its table, its names, and the figures of a tensor."""

from pathlib import Path

import numpy as np
import pytest
from kvgate.compiler import snapshot
from kvgate.jobs import record

TABLE = """# simulator_error: ...
layer_name                                 simulator_error
                                     entire              single
                                  cos      euc        cos      euc
---------------------------------------------------------------------
[Input] key.0                     1.00000 | 0.00000   1.00000 | 0.00000
[Conv] /model/model/layers.1/mlp/up_proj/MatMul#2   0.99800 | 0.50000   \x1b[1;33m0.99831\x1b[0m | 0.30000
[exDataConvert] key.0_int8        nan | inf           nan | nan
[Reshape] logits_mm_tp#1_rs       1.00000 | 1.2e-05   1.00000 | 0.00001
"""


def made(folder: Path, tensors: dict[str, tuple[np.ndarray, np.ndarray]]) -> snapshot.Snapshot:
    place = folder / "snapshot"
    names = {name: name.replace("/", "_").replace(".", "_") for name in tensors}
    for n, run in enumerate(("golden", "simulator")):
        (place / run / "npy").mkdir(parents=True)
        for name, pair in tensors.items():
            np.save(place / run / "npy" / f"{names[name]}.npy", pair[n])
    (place / "error_analysis.txt").write_text(TABLE)
    head = "layer_name   file_name\n----------\n"
    (place / "map_name_to_file.txt").write_text(head + "".join(f"{n}     {f}.txt   \n" for n, f in names.items()))
    return snapshot.Snapshot(folder, "model.onnx")


def test_the_table():
    found = snapshot.lines(TABLE)
    assert [x.operator for x in found] == ["Input", "Conv", "exDataConvert", "Reshape"]
    assert found[1].accumulated == (0.998, 0.5) and found[1].isolated == (0.99831, 0.3)
    assert np.isnan(found[2].accumulated[0]) and found[3].accumulated[1] == 1.2e-5
    with pytest.raises(ValueError, match="no line of an operator"):
        snapshot.lines("layer_name | something else\n")


def test_a_file_that_cannot_be_read_blocks(tmp_path: Path):
    """By its name alone, in one line; an error of ours in what is made of it is not the toolkit's."""
    dump = made(tmp_path, {"x": (np.ones(2), np.ones(2))})
    (tmp_path / "model.quantization.cfg").write_text("a: [1\nb: {")
    (tmp_path / "model.model").write_bytes(b"no protobuf")
    (tmp_path / "snapshot/golden/npy/x.npy").write_bytes(b"")
    (tmp_path / "snapshot/error_analysis.txt").unlink()
    for name, read in {
        "model.quantization.cfg: ": lambda: dump.ranges,
        "model.model: ": lambda: dump.nodes,
        "x.npy: ": lambda: dump.tensor("x", "golden"),
        "error_analysis.txt: No such file or directory": lambda: dump.lines,
    }.items():
        with pytest.raises(record.Blocked, match=f"^accuracy analysis: {name}") as caught:
            read()
        assert "\n" not in caught.value.reason and str(tmp_path) not in caught.value.reason
    with pytest.raises(TypeError):
        snapshot.parsed(tmp_path, lambda path: path + 1)


def test_operators(tmp_path: Path):
    conv = "/model/model/layers.1/mlp/up_proj/MatMul#2"
    golden = np.array([3.0, 4.0], np.float32)  # norm 5
    dump = made(tmp_path, {conv: (golden, golden + np.float32(0.5) * 2**-0.5)})
    owners = {"logits": "/model/lm_head/MatMul", "log": "/model/wrong/MatMul"}
    rows = dump.operators([f"{conv}_ConvMul"], owners, {"key.0": 0, "key.0.out": 0})
    by_tensor = {x["tensor"]: x for x in rows}
    up = by_tensor[conv]
    assert (up["module"], up["layer"], up["cpu"]) == ("layers.1/mlp/up_proj", 1, True)
    assert up["accumulated_l2"] == pytest.approx(0.1, rel=1e-3) and up["isolated_l2"] == pytest.approx(0.06)
    assert up["isolated_cosine"] == 0.9983 and up["scale"] is None and up["inputs"] is None
    assert by_tensor["key.0_int8"]["layer"] == 0 and by_tensor["key.0_int8"]["isolated_cosine"] is None
    head = by_tensor["logits_mm_tp#1_rs"]
    assert (head["module"], head["layer"], head["cpu"]) == ("lm_head", None, False)
    assert "golden" not in head  # not dumped: no figure


@pytest.mark.parametrize(
    ("name", "module", "layer"),
    [
        ("/model/model/layers.12/self_attn/MatMul_1_output_0_mm", "layers.12/self_attn", 12),
        ("/model/lm_head/MatMul", "lm_head", None),
        ("/transformer/h.3/attn/Add", "transformer/h.3/attn", 3),
        ("key.0", "", None),
    ],
)
def test_modules(name, module, layer):
    assert snapshot.path_of(name) == module and snapshot.layer_of(module) == layer


def test_the_compilers_names_of_operators():
    assert snapshot._plain("/m/MatMul#2_ConvAdd") == "/m/MatMul"
    assert snapshot._plain("/m/MatMul_3_2sdpa") == "/m/MatMul_3" and snapshot._plain("node_cat_1") == "node_cat_1"


def test_only_the_cpus_own_operators_are_marked(tmp_path: Path):
    dump = made(tmp_path, {})

    def marked(*cpu: str) -> list[str]:
        return [x["tensor"] for x in dump.operators(cpu, {"logits": "node_linear"}, {}) if x["cpu"]]

    assert marked("node_linear") == ["logits_mm_tp#1_rs"] == marked("node_linear#2_rs")
    assert marked("node_linear_1", "node_cos") == []


def test_a_tiny_tensor_is_not_off_by_the_texts_decimals(tmp_path: Path):
    golden = np.array([3e-4], np.float32)
    row = made(tmp_path, {"logits_mm_tp#1_rs": (golden, golden)}).operators([], {}, {})[-1]
    assert row["isolated_l2"] == pytest.approx(5e-6 / 3e-4, rel=1e-3)


SPAN = {"dtype": "int8", "low": -1.28, "high": 1.27, "scale": 0.01, "zero": 0}


def test_saturation_and_range():
    golden = np.array([0.5, 2.0, -0.2, 0.1], np.float32)
    got = np.array([0.5, 1.27, -0.2, 0.1], np.float32)
    found = snapshot.measure(golden, got, SPAN)
    assert found["outside"] == found["saturated"] == 0.25
    assert found["clipped_l2"] == pytest.approx(0.73 / np.linalg.norm(golden), rel=1e-3)
    assert snapshot.measure(golden, got, None)["saturated"] is None


def test_order_and_overflow():
    golden = np.arange(1, 9, dtype=np.float32)
    moved = snapshot.measure(golden, golden[::-1].copy(), None)
    assert moved["sorted_l2"] == 0.0
    huge = snapshot.measure(np.array([7e4, 1], np.float32), np.array([np.inf, 1], np.float32), None)
    assert huge["overflow"] == 2 and huge["sorted_l2"] is None


def test_channels():
    array = np.ones((1, 32, 1, 2), np.float32)
    array[0, 5] = -50
    assert snapshot.measure(array, array, None)["channels"] == 50
    assert snapshot.measure(array[:, :8], array[:, :8], None)["channels"] is None


def test_the_list_of_ranges(tmp_path: Path):
    entry = "{dtype: int8, min: [-1.0], max: [2.0], scale: [0.0118], zero_point: [-43]}"
    outside = "{dtype: float32, min: [-1.0], max: [1.55], scale: [], zero_point: []}"
    text = "custom_quantize_layers: {h: float16, half: int16}\nquantize_parameters:\n"
    text += "".join(f"  {name}: {entry}\n" for name in ("x", "h", "half", "auto", "key.0.out_int8", "key.1.out_int8"))
    text += f"  key.0: {outside}\n  w: {{dtype: int8, min: [-1.0, -2.0], max: [1.0, 2.0]}}\n"
    (tmp_path / "model.quantization.cfg").write_text(text)
    dump = snapshot.Snapshot(tmp_path, "model.onnx")
    assert dump.ranges["x"] == {"dtype": "int8", "low": -1.0, "high": 2.0, "scale": 0.0118, "zero": -43}
    chosen = {"low": -1.0, "high": 2.0, "scale": None, "zero": None}  # int8's integers are not another dtype's
    assert dump.ranges["h"] == {"dtype": "float16"} | chosen and dump.ranges["half"] == {"dtype": "int16"} | chosen
    assert dump.ranges["auto"]["dtype"] == "int8"  # what the toolkit chose is not in its list
    built = snapshot.Snapshot(tmp_path, "model.onnx", {"auto": "float16", "key.0.out": "float16", "key.0": "float16"})
    assert built.ranges["auto"] == {"dtype": "float16"} | chosen and built.ranges["half"] == dump.ranges["half"]
    assert built.ranges["key.0.out_int8"] == {"dtype": "float16"} | chosen
    assert built.ranges["x"] == dump.ranges["x"] and built.ranges["key.1.out_int8"]["dtype"] == "int8"
    assert built._converted("key.0_int8")["dtype"] == "float16" and built._converted("key.0_int8")["scale"] is None
    assert "w" not in dump.ranges  # of channels
    assert dump._converted("key.0_int8")["scale"] == pytest.approx(0.01)
    assert dump._converted("key.0_float16") is None
    wider = snapshot.Snapshot(tmp_path, "model.onnx", headroom=4.0)  # its ends are in the list, its scale is not
    assert wider.ranges["x"] == dump.ranges["x"] | {"scale": pytest.approx(4 * 0.0118)}
    assert wider.ranges["h"] == dump.ranges["h"]
