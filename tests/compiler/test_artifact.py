"""Reading a .rknn: a synthetic one, byte by byte, so that every guard can be seen to hold."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import tinygraph
from kvgate.compiler import artifact, requirements, risks
from kvgate.compiler.artifact import Tensor

ADDRESS = 0x5555


def table(slots: int, leftovers: dict[tuple[int, int], int]) -> bytes:
    """A FlatBuffer vtable and, behind it, its table of 8-byte slots."""
    size = 4 + 2 * slots
    vtable = struct.pack("<HH", size, 4 + 8 * slots) + b"".join(struct.pack("<H", 4 + 8 * k) for k in range(slots))
    words = [[7, 7] for _ in range(slots)]
    for (slot, word), value in leftovers.items():
        words[slot][word] = value
    return vtable + struct.pack("<i", size) + b"".join(struct.pack("<II", *pair) for pair in words)


def rknn(
    inputs: dict[str, tuple[str, str, list[int]]],
    outputs: dict[str, tuple[str, str, list[int]]],
    tables: bytes = b"",
    platform: str = "rk3576",
    version: str = "2.5.0",
    ranges: dict | None = None,
    custom: str = '{"kvgate":"ab"}',
) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<I", len(value.encode())) + value.encode() + b"\0" * (4 - len(value.encode()) % 4)

    sides = [json.dumps({n: {"dtype": d, "layout": y} for n, (d, y, _) in s.items()}) for s in (outputs, inputs)]
    header = b"".join(
        map(text, (*sides, custom, "ONNX", platform, f"{version}(compiler version: {version} (abc@now))"))
    )
    header += text(str({"attrs": {}, "quant_tab": ranges or {}})) + text("RKNPU f2")
    names = [*inputs.items(), *outputs.items()]
    tail = {
        "connection": [],
        "graph": [
            {"left": side, "left_tensor_id": n, "right_tensor_id": n + (side == "output") * len(inputs)}
            for side, tensors in (("output", outputs), ("input", inputs))
            for n in reversed(range(len(tensors)))
        ],
        "norm_tensor": [{"tensor_id": n, "url": name, "size": t[2]} for n, (name, t) in enumerate(names)],
        "target_platform": [platform],
        "version": version,
    }
    return b"RKNN" + b"\0" * 60 + header + tables + json.dumps(tail, separators=(",", ":")).encode()


IN = {"a": ("float16", "UNDEFINED", [1, 8]), "k": ("float16", "NHWC", [2, 4, 1, 8])}
OUT = {"y": ("float16", "NCHW", [1, 8]), "k.out": ("float16", "NCHW", [2, 4, 1, 1])}


def read(tmp_path: Path, data: bytes) -> artifact.Artifact:
    path = tmp_path / "m.rknn"
    path.write_bytes(data)
    return artifact.read(path)


def test_boundary_in_true_order(tmp_path: Path) -> None:
    found = read(tmp_path, rknn(IN, OUT))
    assert [t.name for t in found.inputs] == ["a", "k"] and [t.name for t in found.outputs] == ["y", "k.out"]
    assert found.inputs[1] == Tensor("k", (2, 4, 1, 8), "float16", "NHWC")
    assert (found.custom, found.platform, found.version) == ('{"kvgate":"ab"}', "rk3576", "2.5.0")
    assert found.compiler == "2.5.0 (abc@now)"


def test_scales_of_int8(tmp_path: Path) -> None:
    quantized = {"a": ("int8", "UNDEFINED", [1, 8])}
    ranges = {"a": {"qtype": "asym", "min": [-1.0], "max": [4.1]}, "y": {"qtype": "dfp", "min": [0.5], "max": [2.0]}}
    found = read(tmp_path, rknn(quantized, {"y": ("int16", "NCHW", [1, 8])}, ranges=ranges))
    tensor = found.inputs[0]
    assert tensor.scale == pytest.approx(5.1 / 255) and tensor.zero == -78
    assert (tensor.low, tensor.high) == (-1.0, 4.1)
    # 0 is exact, and the ends of the range are the ends of int8.
    assert (-128 - tensor.zero) * tensor.scale == pytest.approx(-1.0)
    assert (127 - tensor.zero) * tensor.scale == pytest.approx(4.1)
    assert found.outputs[0].scale is None and found.outputs[0].high == 2.0


@pytest.mark.parametrize("data", [b"", b"RKNN", b"ELF " + rknn(IN, OUT)[4:], rknn(IN, OUT)[:200]])
def test_what_is_no_artifact(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError):
        read(tmp_path, data)


def heap(high: int, low: int) -> dict[tuple[int, int], int]:
    return {(11, 0): high, (12, 0): low}


def test_content_digest_ignores_leftovers_only(tmp_path: Path) -> None:
    builds = [
        read(tmp_path, rknn(IN, OUT, table(13, heap(ADDRESS + n, 0x1000 * n)) * 2)) for n in range(3)
    ]  # fmt: skip
    assert len({b.sha256 for b in builds}) == 3 and len({b.content_digest for b in builds}) == 1
    assert builds[0].content_digest != builds[0].sha256
    other = read(tmp_path, rknn(IN, OUT, table(13, heap(ADDRESS, 0) | {(10, 0): 8}) * 2))
    assert other.content_digest != builds[0].content_digest  # a word beside them is content


@pytest.mark.parametrize(
    "tables",
    [
        table(13, heap(0x7FFF, 1)),  # no heap address
        table(13, heap(ADDRESS, 1)) + table(13, heap(ADDRESS + 1, 1)),  # not one address in all
        table(13, heap(ADDRESS, 1)) + table(13, heap(ADDRESS, 2)),
    ],
)
def test_words_that_are_not_as_known_are_not_compared(tmp_path: Path, tables: bytes) -> None:
    assert read(tmp_path, rknn(IN, OUT, tables)).content_digest.startswith("not comparable: leftover words")


@pytest.mark.parametrize(("platform", "version"), [("rk3568", "2.5.0"), ("rk3576", "2.5.1")])
def test_unknown_platform_or_version_is_not_compared(tmp_path: Path, platform: str, version: str) -> None:
    found = read(tmp_path, rknn(IN, OUT, platform=platform, version=version))
    assert found.content_digest.startswith("not comparable: platform") and len(found.sha256) == 64


def test_other_tables_are_content(tmp_path: Path) -> None:
    """Neither a table of another size, nor one whose offsets are not 8 apart, nor one before the body is touched."""
    for tables in (table(7, {(2, 0): 1}), table(13, heap(ADDRESS, 1)).replace(b"\x5c\x00", b"\x5d\x00", 1)):
        found = read(tmp_path, rknn(IN, OUT, tables))
        assert found.content_digest == found.sha256
    data = rknn(IN, OUT)
    moved = data[:4] + table(13, heap(ADDRESS, 1)) + data[4:]
    found = read(tmp_path, moved)
    assert found.content_digest == found.sha256
    on_rk3588 = read(tmp_path, rknn(IN, OUT, table(7, {(2, 0): 1}), platform="rk3588"))
    assert on_rk3588.content_digest != on_rk3588.sha256


# Gates


def built(**changes: tuple) -> artifact.Artifact:
    def side(tensors: tuple, names: tuple) -> tuple[Tensor, ...]:
        made = []
        for t in tensors:
            layout = "NCHW" if names == "out" else "NHWC" if len(t.shape) == 4 else "UNDEFINED"
            made.append(Tensor(t.name, t.shape, "float16", layout))
        return tuple(made)

    boundary = tinygraph.contract()
    whole = artifact.Artifact(
        side(boundary.inputs, "in"), side(boundary.outputs, "out"), "", "rk3576", "2.5.0", "", "", "", 1
    )  # fmt: skip
    return replace(whole, **changes)


def test_gates_pass_what_is_right() -> None:
    assert requirements.artifact(built(), tinygraph.contract(), "fp16") == []


def test_gates_name_what_is_missing_and_what_is_out_of_order() -> None:
    boundary, whole = tinygraph.contract(), built()
    found = requirements.artifact(built(inputs=whole.inputs[1:]), boundary, "fp16")
    assert found[0]["kind"] == "missing" and "'embedding': not in the artifact, nothing uses it" in found[0]["text"]
    found = requirements.artifact(built(outputs=whole.outputs[:-1]), boundary, "fp16")
    assert found[0]["tensor"] == "value.1.out" and "equal to another output" in found[0]["text"]
    swapped = (*whole.inputs[:2], whole.inputs[3], whole.inputs[2], *whole.inputs[4:])
    assert requirements.artifact(built(inputs=swapped), boundary, "fp16")[0]["kind"] == "order"  # K and V share a shape


@pytest.mark.parametrize(
    ("change", "quant", "kind"),
    [
        ({"dtype": "int8"}, "fp16", "dtype"),
        ({"dtype": "float32"}, "w8a8", "dtype"),
        ({"layout": "NCHW"}, "fp16", "layout"),
        ({"shape": (2, 1, 16, 16)}, "fp16", "shape"),
    ],
)
def test_gates_name_dtype_layout_and_shape(change: dict, quant: str, kind: str) -> None:
    whole = built()
    bad = (*whole.inputs[:2], replace(whole.inputs[2], **change), *whole.inputs[3:])
    found = requirements.artifact(built(inputs=bad), tinygraph.contract(), quant)
    assert [(x["kind"], x["tensor"]) for x in found] == [(kind, "key.0")]
    if kind == "dtype" and change["dtype"] == "int8":
        assert requirements.artifact(built(inputs=bad), tinygraph.contract(), "w8a8") == []


def test_risks_of_the_tiny_graph() -> None:
    boundary = tinygraph.contract()
    model = tinygraph.decoder(boundary).model(boundary)
    found = risks.find(model, boundary, {"exSDPAttention@NPU": 2}, 1 << 20)
    assert [x.split()[0] for x in found] == ["F1", "F3", "F4", "F9", "F10"]
    assert "(4x)" in found[3]
    model.graph.node[0].op_type = "ScatterND"
    model.graph.node[0].input[:] = ["embedding", "slot", "x"]
    model.graph.node[1].op_type = "Gather"
    model.graph.node[1].input[:] = ["embedding", "to_slot"]
    found = risks.find(model, boundary, {}, 5 << 30)
    assert {"F7", "F8", "F26"} <= {x.split()[0] for x in found} and "F10" not in {x.split()[0] for x in found}
    model.graph.node[0].input[1] = "to_slot"  # a constant index was right
    assert "F7" not in {x.split()[0] for x in risks.find(model, boundary, {}, 0)}
