"""The second reading of weight files, against torch's own values."""

import json

import numpy as np
import pytest
import torch
from kvgate.checkpoint import stored
from kvgate.jobs import record
from safetensors.torch import save_file


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool])
def test_every_dtype_is_read_as_torch_reads_it(tmp_path, dtype):
    values = (3 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0))).to(dtype)
    save_file({"x": values}, tmp_path / "model.safetensors")
    read = stored.read(tmp_path)
    assert read.contents == {"x": stored.of_tensor(values)}
    assert read.contents["x"].total == pytest.approx(values.double().sum().item(), rel=1e-6)
    assert read.contents["x"].shape == (5, 7)
    floats = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    assert read.dtypes == {floats[dtype]} & set(floats.values()) if dtype in floats else not read.dtypes


def test_blocks_give_what_the_whole_gives(monkeypatch):
    values = np.arange(100, dtype=np.float32).reshape(4, 25)
    whole = stored.of_array(values)
    monkeypatch.setattr(stored, "_BLOCK", 7)
    assert stored.of_array(values) == stored.of_tensor(torch.from_numpy(values)) == whole
    assert stored.of_array(values[::-1]).crc != whole.crc


def test_pickles_are_read_too(tmp_path):
    torch.save({"x": torch.ones(3, dtype=torch.float16)}, tmp_path / "pytorch_model.bin")
    read = stored.read(tmp_path)
    assert read.contents["x"].total == 3 and read.dtypes == {"F16"}


def refused(folder):
    with pytest.raises(record.Blocked) as caught:
        stored.read(folder)
    assert "\n" not in caught.value.reason
    return caught.value.reason


@pytest.mark.parametrize("left", [0, 5, 50, 90, 95])
def test_a_cut_file_is_named(tmp_path, left):
    path = tmp_path / "model-00001-of-00002.safetensors"
    save_file({"x": torch.ones(8)}, path)
    path.write_bytes(path.read_bytes()[:left])
    assert refused(tmp_path).startswith("model-00001-of-00002.safetensors: got ")


def test_a_tensor_in_two_files(tmp_path):
    for name in "ab":
        save_file({"x": torch.ones(8)}, tmp_path / f"{name}.safetensors")
    assert refused(tmp_path) == "b.safetensors: tensor x: got it twice, allowed: once in all files"


def test_eight_bit_floats_are_refused_by_name(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(8).to(torch.float8_e4m3fn)}, path)
    assert refused(tmp_path).startswith("model.safetensors: tensor x: got F8_E4M3, allowed: F64, F32, F16, BF16")


def test_a_damaged_pickle_is_named(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(json.dumps({}).encode())
    assert refused(tmp_path).startswith("pytorch_model.bin: cannot be read: ")
