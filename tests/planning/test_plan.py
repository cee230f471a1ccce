"""The jobs of a sweep: what their keys hold, and how they chain."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from kvgate.jobs import keys
from kvgate.planning import plan
from kvgate.planning.config import ConfigError

BASE = Path(__file__).parents[2]
TINY = yaml.safe_load((BASE / "tests/workflow/tiny.yaml").read_text())
ROW = {"model": "tiny", "weights": "plain", "strategy": "tiny_blend", "platform": "rk3576", "quant": "w8a8"}
STEPS = ("fetch", "trace", "prepare", "export", "check", "build", "verify", "judge", "tabulate")


@pytest.fixture(scope="module")
def tiny() -> plan.Plan:
    return plan.Plan(BASE, TINY)


def test_every_job_comes_after_those_that_it_reads(tiny):
    seen: set[str] = set()
    for node in tiny.nodes():
        assert {below.record for below in node.inputs.values()} <= seen
        seen.add(node.record)
    counts = {stage: len(tiny.of_stage(stage)) for stage in STEPS}
    assert counts == dict(zip(STEPS, (1, 4, 1, 2, 2, 4, 4, 4, 1), strict=True))


def test_a_key_holds_the_keys_of_what_it_reads(tiny):
    """So that a change at the source reaches the table, also where an interrupted run left files of every age."""
    for node in tiny.nodes():
        held = json.loads(node.key)["inputs"]
        assert held == {label: [below.record, below.short] for label, below in node.inputs.items()}


def test_a_key_has_the_parts_that_its_type_names(tiny):
    for node in tiny.nodes():
        parts = keys.parts(keys.pack(node.key))
        assert parts.keys() == keys.Key.__annotations__.keys()
        assert parts["code"].keys() == keys.Code.__annotations__.keys()


def test_rows_keep_the_order_of_the_config():
    """Also where there are more than ten of them: a key's JSON is sorted."""
    planned = plan.Plan(BASE, {})
    labels = json.loads(planned.table().key)["inputs"]
    assert [path for path, _ in labels.values()] == [plan.record_path("judge", row.wildcards()) for row in planned.rows]


def test_only_quantized_builds_read_calibration_texts(tiny):
    wildcards = ROW | {"part": "decode"}
    quantized = tiny.node("build", wildcards).inputs
    assert [x for x in quantized if x.startswith("calibration.")] == [
        "calibration.tiny_calibration_a",
        "calibration.tiny_calibration_b",
    ]
    assert not [x for x in tiny.node("build", wildcards | {"quant": "fp16"}).inputs if x.startswith("calibration.")]


def test_histories_are_no_part_of_a_trace():
    other = copy.deepcopy(TINY)
    other["programs"]["tiny_fill"]["histories"] = ["isolated"]
    changed = {
        n.stage
        for a, n in zip(plan.Plan(BASE, TINY).nodes(), plan.Plan(BASE, other).nodes(), strict=True)
        if a.key != n.key
    }
    assert changed == {"check", "build", "verify", "judge", "tabulate"}


def test_an_edge_that_follows_from_others_is_none(tiny):
    """The workflow's graph stays small, and yet every job is below all that it reads."""
    above = {}
    for node in tiny.nodes():
        above[node.record] = set(node.reads).union(*(above[path] for path in node.reads))
        assert {x.record for x in node.inputs.values()} <= above[node.record], node.stage
    assert {len(node.reads) for node in tiny.of_stage("judge")} == {1}


@pytest.mark.parametrize("column", ROW)
def test_a_target_that_the_config_has_not_is_one_line(tiny, column):
    row = ROW | {"backend": "simulator", column: "nope"}
    with pytest.raises(ConfigError, match=rf"^target: {column}: got 'nope', known: [^\n]*$"):
        tiny.node("judge", row)
    for stage, names in (("trace", {"model": "tiny", "program": "nope"}), ("tabulate", {"sweep": "nope"})):
        with pytest.raises(ConfigError, match=r"^target: (program|sweep): got 'nope', known: "):
            tiny.node(stage, names)
