"""diagnose: the layer, the tensor and the picture of a row that was broken on purpose."""

import cv2
import pytest
import synthetic
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.judging import explanations
from kvgate.stages import diagnose

OF = synthetic.trace()


def operator(tensor):
    body = {"operator": "Conv", "tensor": tensor, "module": "layers.1/mlp/up_proj", "layer": 1, "cpu": False}
    body |= {"inputs": [], "isolated_l2": 0.01, "isolated_cosine": 0.9999, "accumulated_l2": 0.02, "dtype": "int8"}
    body |= {"accumulated_cosine": 0.9998, "low": -1.0, "high": 1.0, "scale": 2 / 255, "golden": [-1.0, 1.0]}
    return body | {
        "channels": 3.0,
        "overflow": 0,
        "sorted_l2": 0.0,
        "clipped_l2": 0.0,
        "outside": 0.0,
        "saturated": 0.0,
    }


def accuracy(*operators, **more):
    body = {"status": "ok", "fed": "", "artifact": "equal", "ranges": "", "operators": list(operators)}
    body |= {"state": {"program": "capital", "position": 4}, "golden": {"kv_l2": 1e-7, "logits_l2": 1e-7}}
    return body | {"simulator": {"kv_l2": 0.2, "logits_l2": 0.1}} | more


UNDUMPED = {"kv_l2": None, "logits_l2": None, "why": "output logits: not dumped"}


def diagnosed(root, change=lambda seen: None, build=None, analysed=None):
    results = synthetic.Results(root)
    boundary = {"inputs": [{"name": "key.0", "dtype": "int8", "low": -1.0, "high": 1.0}], "outputs": []}
    results.built(synthetic.BUILD | {"boundary": boundary} | (build or {}))
    seen = synthetic.observation(OF)
    change(seen)
    results.verify("capital", OF, seen)
    results.judge()
    inputs = {stage: results.path(stage) for stage in ("judge", "verify", "export", "build")}
    inputs["trace.capital"] = results.path("trace", program="capital")
    if analysed:
        results.write("accuracy", analysed)
        inputs["accuracy"] = results.path("accuracy")
    config = {"programs": ["capital"], "thresholds": synthetic.THRESHOLDS}
    job = Job("diagnose", results.row, config, inputs, root)
    return job, diagnose.run(job)


def spoil(seen):
    for history in ("isolated", "forced"):
        seen[f"{history}/layers.1.value"] = synthetic.off(seen[f"{history}/layers.1.value"], 0.2)


def test_the_first_layer_that_is_off_by_itself(tmp_path):
    _, body = diagnosed(tmp_path, spoil)
    assert body["verdict"] == "fail"
    assert body["first_layer"] == {
        "state": "layers.1.value",
        "layer": 1,
        "tensor": "value",
        "median": pytest.approx(0.2, rel=1e-3),
    }
    assert body["layers"][0]["isolated_value_worst"] == 0.0
    assert "First layer off by itself: 1 value, median 20.00 %" in body["sentence"]


def test_a_right_row_has_no_such_layer(tmp_path):
    _, body = diagnosed(tmp_path)
    assert body["verdict"] == "pass" and body["first_layer"] is None and body["remedy"] == ""


def test_the_tensors_ranges(tmp_path):
    _, body = diagnosed(tmp_path)
    tensor = next(t for t in body["tensors"] if t["name"] == "key.0")
    assert (tensor["dtype"], tensor["calibrated"]) == ("int8", [-1.0, 1.0])
    assert tensor["reference"][1] == pytest.approx(float(OF.states["layers.0.key"].max()), rel=1e-3)


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


def test_the_first_operator_that_is_off_by_itself(tmp_path):
    cut = operator("up") | {"isolated_l2": 0.1036, "isolated_cosine": 0.9951, "clipped_l2": 0.1, "outside": 0.02}
    later = operator("down") | {"isolated_l2": 0.5, "sorted_l2": 0.5}
    few = [operator(f"fine{n}") | {"isolated_l2": 0.001 * n} for n in range(30)]
    fed = operator("x") | {"operator": "Input", "isolated_l2": 0.0}
    job, body = diagnosed(tmp_path, spoil, analysed=accuracy(fed, *few, cut | {"inputs": ["x", "lost"]}, later))
    assert body["first_operator"]["tensor"] == "up" and [x["tensor"] for x in body["first_inputs"]] == ["x"]
    assert body["first_kind"]["kind"] == "coverage" and body["worst_kind"] is None and body["off"] == 2
    assert "; the worst of 2: layers.1/mlp/up_proj Conv (down), isolated 50.00 %" in body["sentence"]
    names = [x["tensor"] for x in body["operators"]]
    assert len(names) == 20 and names[-2:] == ["up", "down"] and names[0] == "fine12"  # the worst, in order
    told = "First operator off by itself: layers.1/mlp/up_proj Conv (up), isolated 10.36 %, isolated cosine 0.9951"
    assert told in body["sentence"] and "outside the calibrated range" in body["sentence"]
    assert body["sentence"].endswith(f"What to try: {explanations.MORE_TEXTS.text}")
    page = (job.folder / "diagnosis.html").read_text()
    assert "First operator off by itself (over 0.05)" in page and page.count("<td>fine") == 18
    assert "Worst operator off by itself (over 0.05)" in page


def test_no_operator_is_off(tmp_path):
    _, body = diagnosed(tmp_path, spoil, analysed=accuracy(operator("up")))
    assert body["first_operator"] is None and "No operator is off by itself by more than 5.00 %" in body["sentence"]


@pytest.mark.parametrize(
    ("analysed", "note"),
    [
        (accuracy(operator("x"), fed="key.0: got another array than was fed"), "as it was fed: key.0"),
        (accuracy(operator("x"), artifact="got content digest a, the row's is b"), "not the row's artifact"),
        (accuracy(operator("x"), golden={"kv_l2": 1.4, "logits_l2": None}), "is not the reference: kv_l2 1.4"),
        (accuracy(operator("x"), golden={"kv_l2": 1e-7, "logits_l2": None}), "the reference: logits_l2 not finite"),
        (accuracy(operator("x"), golden=UNDUMPED), "is not the reference: output logits: not dumped"),
        ({"status": "blocked", "reason": "accuracy analysis: no memory", "findings": []}, "no memory"),
    ],
)
def test_an_analysis_of_something_else_says_nothing(tmp_path, analysed, note):
    job, body = diagnosed(tmp_path, spoil, analysed=analysed)
    assert note in body["accuracy"]["note"] and "first_operator" not in body
    assert "operator" not in body["sentence"] and "Operators: " in (job.folder / "diagnosis.html").read_text()
