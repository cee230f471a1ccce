"""The self tests' graphs: right in ONNX Runtime, red for every way in which boards were seen to be wrong."""

import numpy as np
import onnxruntime
import pytest
from kvgate.compiler import artifact
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.remote import selftests
from kvgate.stages import probe


def outputs(of):
    session = onnxruntime.InferenceSession(of.model().SerializeToString())
    names = [t.name for t in of.contract.outputs]
    steps = [session.run(names, {k: v[n] for k, v in of.feeds.items()}) for n in range(selftests.STEPS)]
    return {name: np.stack(column) for name, column in zip(names, zip(*steps, strict=True), strict=True)}


ROUNDTRIP, ATTENTION = selftests.probes()


@pytest.mark.parametrize("of", selftests.probes(), ids=lambda p: p.name)
def test_onnx_runtime_is_right(of):
    assert selftests.differences(of, outputs(of)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda o: o.update({"cube.out": o["cube.out"].transpose(0, 1, 3, 4, 2)}), "cube.out NHWC read as NCHW"),
        (
            lambda o: o.update({"cache.out": o["twin.out"], "twin.out": o["cache.out"]}),
            "cache.out is what twin.out should be",
        ),
        (lambda o: o.update({"ids.out": o["ids.out"] * 0}), "ids.out is all zero"),
        (lambda o: o.update({"row.out": o["row.out"][:, :, :5]}), "row.out: got (3, 1, 5), allowed: (3, 1, 33)"),
        (lambda o: o.pop("rank3.out"), "rank3.out: got nothing, allowed: (3, 3, 5, 7)"),
        (lambda o: o["row.out"].__setitem__(1, o["row.out"][0]), "row.out is off by"),  # a buffer not taken again
        (lambda o: o["row.out"].__setitem__((2, 0, 1), np.nan), "row.out is off by"),
    ],
)
def test_a_wrong_tensor_is_named(change, said):
    found = outputs(ROUNDTRIP)
    change(found)
    assert any(said in line for line in selftests.differences(ROUNDTRIP, found))


def test_an_attention_of_zeros_is_seen():
    assert selftests.differences(ATTENTION, {"out": np.zeros((3, 1, 8, 64, 64))}) == ["attention: out is all zero"]


@pytest.mark.slow
def test_the_toolkit_compiles_both_and_fuses_the_attention(tmp_path):
    job = Job("probe", {"platform": "rk3576"}, {"timeout": 300}, {}, tmp_path)
    job.folder.mkdir(parents=True)
    body = probe.run(job)
    for of in selftests.probes():
        built = artifact.read(job.folder / of.name / "model.rknn")
        assert [t.name for t in built.inputs] == [t.name for t in of.contract.inputs]
        assert built.custom == record.read(job.folder / of.name / "artifact.json")["custom_string"]
    assert "exSDPAttention" in (job.folder / "attention/toolkit.log").read_text(errors="replace")
    assert all(record.sha256(job.folder / name) == sha for name, sha in body["files"].items())
