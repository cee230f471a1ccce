"""Which results are not what would be made now, from the records alone."""

import copy
import json
import os
import time
from pathlib import Path

import pytest
import yaml
from kvgate.jobs import record
from kvgate.planning import audit
from kvgate.planning.plan import Plan

BASE = Path(__file__).parents[2]
TINY = yaml.safe_load((BASE / "tests/workflow/tiny.yaml").read_text())


@pytest.fixture(scope="module")
def tiny() -> Plan:
    return Plan(BASE, TINY)


@pytest.fixture
def results(tiny, tmp_path):
    """As if all of the tiny sweep were made."""
    for node in tiny.nodes():
        inputs = {label: record.sha256(tmp_path / below.record) for label, below in node.inputs.items()}
        record.write(tmp_path / node.record, {"status": "ok", "key": json.loads(node.key), "inputs": inputs})
    return tmp_path


def stages(found):
    return {Path(path).stem for path in found}


def test_nothing_is_outdated_where_nothing_changed(tiny, results):
    assert audit.outdated(tiny, results) == {}


def test_a_tightened_threshold_makes_every_verdict_outdated_and_nothing_above(results):
    tight = copy.deepcopy(TINY) | {"thresholds": {"kv_l2": {"pass": 0.001, "warn": 0.002}}}
    found = audit.outdated(Plan(BASE, tight), results)
    assert stages(found) == {"verdict", "acceptance"} and len(found) == 5
    assert {why for path, why in found.items() if path.endswith("verdict.json")} == {"config thresholds"}


def test_what_follows_from_a_missing_or_edited_result_is_outdated_too(tiny, results):
    """Its own key and inputs are as ever: only what stands above it is not."""
    check = tiny.of_stage("check")[0]
    record.write(results / check.record, record.read(results / check.record) | {"edited": True})
    found = audit.outdated(tiny, results)
    assert stages(found) == {"build", "metrics", "verdict", "acceptance"}
    build = next(x for x in tiny.of_stage("build") if x.record in found)
    verdict = next(x for x in tiny.of_stage("judge") if x.inputs["build"] is build)
    assert found[verdict.record] == "made from another check"
    (results / build.record).unlink()
    assert audit.outdated(tiny, results)[build.record] == "not made yet"


def test_a_diagnosis_of_the_future_is_dated_after_its_row(tiny, results):
    row = tiny.rows[0].wildcards()
    wanted = tiny.node("diagnose", row)
    for node in (wanted.inputs["accuracy"], wanted):
        record.write(results / node.record, {"status": "ok", "key": json.loads(node.key), "inputs": {}})
        os.utime(results / node.record, (time.time() + 1e6,) * 2)
    assert audit.redate(tiny, results, ()) == len(tiny.nodes()) + 2
    dates = [(results / x).stat().st_mtime for x in (tiny.node("judge", row).record, wanted.inputs["accuracy"].record)]
    dates.append((results / wanted.record).stat().st_mtime)
    assert dates == sorted(set(dates)) and dates[-1] <= time.time()


def test_results_of_the_future_are_dated_in_order_and_others_left_alone(tiny, results):
    dates = [1e9 + 60 * n for n, _ in enumerate(tiny.nodes())]

    def dated():
        return [(results / node.record).stat().st_mtime for node in tiny.nodes()]

    for node, date in zip(tiny.nodes(), dates, strict=True):
        os.utime(results / node.record, (date, date))
    assert audit.redate(tiny, results, ()) == 0 and dated() == dates
    now = time.time()
    stale = tiny.nodes()[3]
    for node in tiny.nodes()[1:4]:
        os.utime(results / node.record, (now + 1e6, now + 1e6))
    assert audit.redate(tiny, results, {stale.record}) == len(dates) - 1
    left = dated()
    assert left.pop(3) == pytest.approx(now + 1e6)  # is made again anyway
    assert left == sorted(set(left)) and now - 60 < left[0] and left[-1] <= time.time()
