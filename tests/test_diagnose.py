"""diagnose: the layer, the tensor and the picture of a row that was broken on purpose."""

import cv2
import numpy as np
import pytest
import synthetic
from kvgate import record
from kvgate.job import Job
from kvgate.stages import diagnose

OF = synthetic.trace()


def diagnosed(root, change=lambda seen: None, build=None):
    results = synthetic.Results(root)
    boundary = {"inputs": [{"name": "key.0", "dtype": "int8", "low": -1.0, "high": 1.0}], "outputs": []}
    results.write("build", synthetic.BUILD | {"boundary": boundary} | (build or {}))
    seen = synthetic.observation(OF)
    change(seen)
    results.verify("capital", OF, seen)
    results.judge()
    np.savez(results.path("export").with_name("host.npz"), embedding=np.zeros((1, 1)))
    inputs = {stage: results.path(stage) for stage in ("judge", "verify", "export", "build")}
    inputs["trace.capital"] = results.path("trace", program="capital")
    config = {"programs": ["capital"], "thresholds": synthetic.THRESHOLDS}
    job = Job("diagnose", results.row, config, inputs, root)
    return job, diagnose.run(job)


def spoil(seen):
    for history in ("isolated", "forced"):
        seen[f"{history}/value.1"] = synthetic.off(seen[f"{history}/value.1"], 0.2)


def test_the_first_layer_that_is_off_by_itself(tmp_path):
    _, body = diagnosed(tmp_path, spoil)
    assert body["verdict"] == "fail"
    assert body["first_layer"] == {"layer": 1, "tensor": "value", "median": pytest.approx(0.2, rel=1e-3)}
    assert body["layers"][0]["isolated_value_worst"] == 0.0
    assert "First layer off by itself: 1 value, median 20.00 %" in body["sentence"]


def test_a_right_row_has_no_such_layer(tmp_path):
    _, body = diagnosed(tmp_path)
    assert body["verdict"] == "pass" and body["first_layer"] is None and body["remedy"] == ""


def test_the_tensors_ranges(tmp_path):
    _, body = diagnosed(tmp_path)
    tensor = next(t for t in body["tensors"] if t["name"] == "key.0")
    assert (tensor["dtype"], tensor["calibrated"]) == ("int8", [-1.0, 1.0])
    assert tensor["reference"][1] == pytest.approx(float(OF.keys[0].max()), rel=1e-3)


def test_the_picture_shows_the_layer(tmp_path):
    job, body = diagnosed(tmp_path, spoil)
    picture = cv2.imread(str(job.folder / "heatmap.png"))
    steps = len(picture[0]) // 8
    assert picture.shape[0] == 8 * 2 * synthetic.LAYERS and steps == 4 + synthetic.TOKENS - 1
    bright = picture[::8, ::8].astype(int).sum(2)
    assert (bright[3] > bright[2]).all()  # value of layer 1 above its key, in every step
    page = (job.folder / "diagnosis.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page
    assert body["files"]["heatmap.png"] == record.sha256(job.folder / "heatmap.png")


def test_a_blocked_row_is_explained_by_what_blocked_it(tmp_path):
    _, body = diagnosed(tmp_path, build={"status": "blocked", "reason": "no memory", "findings": []})
    assert "blocked: no memory" in body["sentence"] and list(body["files"]) == ["diagnosis.html"]


def test_what_is_foreign_is_escaped(tmp_path):
    job, _ = diagnosed(tmp_path, build={"status": "blocked", "reason": "<script>", "findings": []})
    assert "<script>" not in (job.folder / "diagnosis.html").read_text()
