"""Files that are not what their stage wrote: flipped, cut, swapped, edited, stale, in every stage; a poisoned store.

No value is wrong yet when these are planted, and some would never show as one. The first stage that opens such a file
names it, and nothing is compiled, judged or shipped from it.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgate.jobs import record, store
from kvgate.planning import audit, progress
from kvgate.report import bundle
from planting import CHIP, INT8, Sweep, config, shipped

# Stage and file, and the stages that open it.
OPENED = (
    ("fetch", "model.safetensors", ("trace", "prepare")),
    ("fetch", "config.json", ("trace", "prepare", "export")),
    ("fetch", "tokenizer.json", ("trace",)),
    ("fetch", "chat_template.jinja", ("trace",)),
    ("fetch", "generation_config.json", ("trace",)),
    ("trace", "trace.npz", ("check", "build", "verify")),
    ("prepare", "weights.bin", ("export",)),
    ("prepare", "tables.npz", ("export",)),
    ("export", "model.onnx", ("check", "build")),
    ("export", "weights.bin", ("check", "build")),
    ("export", "host.npz", ("check", "build", "verify")),
    ("export", "contract.json", ("check", "build", "verify", "judge")),
    ("build", "observations/fill.npz", ("verify",)),
    ("build", "observations/talk.npz", ("verify",)),
    ("build", "contract.json", ("judge",)),
    ("verify", "fill/metrics.npz", ("judge",)),
    ("verify", "talk/metrics.npz", ("judge",)),
)
SHIPPED = (
    ("fetch", "tokenizer.json"),
    ("export", "host.npz"),
    ("export", "contract.json"),
    ("build", "model.rknn"),
    ("build", "contract.json"),
)
RECORDS = ("fetch", "trace", "prepare", "export", "check", "build", "verify", "judge")


def flipped(path: Path) -> None:
    """One bit, in place, through every link that the file has; size and date stay."""
    at, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def named(sweep: Sweep, stage: str, file: str) -> str:
    """How a person is told of a file."""
    return f"{sweep.path(stage, file).relative_to(sweep.results)} is not what {stage} wrote"


def refused(sweep: Sweep, opener: str, said: str) -> None:
    body = sweep.body(opener)
    assert body["status"] == "blocked" or body.get("verdict") == "blocked", body
    assert said in body["reason"]
    verdict = sweep.body("judge")
    assert verdict["verdict"] == "blocked" and "is not what" in verdict["reason"]
    assert not shipped(sweep)


def damages() -> list[Any]:
    """A flipped bit before each opener of a file; cut and emptied before the first one."""
    found = [(stage, file, opener, flipped) for stage, file, openers in OPENED for opener in openers]
    found += [(stage, file, openers[0], damage) for stage, file, openers in OPENED for damage in (cut, emptied)]
    return [pytest.param(*x, id=f"{x[1]} {x[3].__name__} before {x[2]}") for x in found]


@pytest.mark.parametrize(("stage", "file", "opener", "damage"), damages())
def test_who_opens_a_damaged_file_names_it(chip, compiled, stage, file, opener, damage):
    shutil.rmtree(chip.results / "store")  # else a build opens less
    damage(chip.path(stage, file))
    chip.run(opener)
    assert chip.failed == {} and compiled == []
    refused(chip, opener, named(chip, stage, file))


@pytest.mark.parametrize(("program", "other"), [("fill", "warm_a"), ("talk", "fill")])
def test_a_trace_of_another_text_is_not_taken(chip, program, other):
    """Whole and well formed, and of the wrong program."""
    shutil.copy(chip.path("trace", "trace.npz", program=other), chip.path("trace", "trace.npz", program=program))
    chip.run("check")
    refused(chip, "check", named(chip.of(program=program), "trace", "trace.npz"))


@pytest.mark.parametrize("file", ["model.onnx", "contract.json"])
def test_a_file_of_another_strategys_graph_is_not_taken(host, file):
    shutil.copy(host.path("export", file, strategy="blend"), host.path("export", file))
    host.run("check", strategy="managed")
    refused(host, "check", named(host, "export", file))


def test_observations_of_two_programs_swapped(chip):
    fill, talk = (chip.path("build", f"observations/{x}.npz") for x in ("fill", "talk"))
    fill.rename(fill.with_name("kept")), talk.rename(fill), fill.with_name("kept").rename(talk)
    chip.run("verify")
    refused(chip, "verify", named(chip, "build", "observations/fill.npz"))


def test_observations_of_a_host_row_are_held_to_the_check(host):
    flipped(host.path("check", "observations/fill.npz"))
    host.run("verify", strategy="managed")
    refused(host, "verify", named(host, "check", "observations/fill.npz"))


def test_rows_of_the_hosts_tables_shifted(chip, compiled):
    """host.npz is well formed and of the right size; only its rows are one off, and the artifact is right."""
    path = chip.path("export", "host.npz")
    with np.load(path) as file:
        tables = {k: np.roll(v, 1, axis=0) for k, v in file.items()}
    np.savez(path, **tables)
    shutil.rmtree(chip.results / "bundles")  # else the tables in it are taken over
    chip.run("tabulate")
    assert named(chip, "export", "host.npz") in "".join(chip.body("tabulate")["refused"].values())
    assert not shipped(chip)


@pytest.mark.parametrize("opener", ["check", "build", "judge"])
def test_a_contract_of_another_window(chip, compiled, opener):
    path = chip.path("export", "contract.json")
    body = json.loads(path.read_text())
    body["windows"] = [None, None]
    path.write_text(json.dumps(body))
    chip.run(opener)
    assert compiled == []
    refused(chip, opener, named(chip, "export", "contract.json"))


def test_a_calibration_text_that_changed_calibrates_nothing(chip, compiled):
    flipped(chip.path("trace", "trace.npz", program="warm_b"))
    int8 = chip.planned(INT8).of(program="warm_b").run("build")
    assert compiled == []
    refused(int8, "build", named(int8, "trace", "trace.npz"))


@pytest.mark.parametrize(("stage", "file"), SHIPPED)
def test_a_file_that_changed_is_not_shipped(chip, stage, file):
    flipped(chip.path(stage, file))
    shutil.rmtree(chip.results / "bundles")  # else what was made of it is taken over
    chip.run("tabulate")
    assert chip.failed == {}
    assert named(chip, stage, file) in "".join(chip.body("tabulate").get("refused", {}).values())
    assert not shipped(chip)


# Records


def edited(path: Path) -> None:
    """Another number or word in it, and still JSON."""
    text = path.read_text()
    changed = text.replace('"status": "ok"', '"status": "ok "', 1)
    assert changed != text
    path.write_text(changed)


@pytest.mark.parametrize("stage", RECORDS)
def test_an_edited_record_is_found_by_the_audit(chip, stage):
    edited(chip.path(stage))
    found = {x.node.record: x.kind for x in audit.audit(chip.plan, chip.results)}
    assert found[str(chip.path(stage).relative_to(chip.results))] == "damaged"


@pytest.mark.parametrize(("stage", "since"), [("export", "check"), ("check", "build"), ("verify", "judge")])
def test_who_reads_an_edited_record_names_it(chip, compiled, stage, since):
    edited(chip.path(stage))
    chip.run(since)
    assert compiled == []
    refused(chip, since, named(chip, stage, chip.path(stage).name))


def test_a_metric_edited_to_zero(chip):
    path = chip.path("verify")
    text = path.read_text()
    path.write_text(text.replace('"disturbed": {', '"disturbed":  {', 1))
    chip.run("judge")
    refused(chip, "judge", named(chip, "verify", "metrics.json"))


def failing(sweep: Sweep) -> None:
    """The row fails, for a key that is off."""
    path = sweep.path("build", "observations/fill.npz")
    with np.load(path) as file:
        seen = dict(file)
    seen["isolated/layers.1.key"] = seen["isolated/layers.1.key"] * 2
    np.savez(path, **seen)
    sweep.seal("build")
    sweep.run("verify")
    assert sweep.body("judge")["verdict"] == "fail"


def test_a_verdict_edited_to_pass_is_not_believed(chip, capfd):
    failing(chip)
    path = chip.path("judge")
    path.write_text(path.read_text().replace('"verdict": "fail"', '"verdict": "pass"'))
    chip.run("tabulate")
    assert not shipped(chip)
    assert chip.command("gate") == 1 and "verdict.json was edited" in capfd.readouterr().out


def test_a_verdict_that_its_gates_contradict_is_not_believed(chip, capfd):
    """Written as the stage would, so nothing but the gates in it tells."""
    failing(chip)
    chip.rewrite("judge", lambda body: body.update(verdict="pass", reason="all 13 gates hold", first=None))
    chip.run("tabulate")
    assert not shipped(chip)
    assert chip.command("gate") == 1 and "its gates say fail" in capfd.readouterr().out


# Stale


def test_a_record_made_of_another_one_is_stale(chip):
    """The trace was made again by hand; what was judged by the old one is not current."""
    chip.rewrite("trace", lambda body: body.update(perplexity=1.0))
    stale = {x.stage for x, _ in progress.stale(chip.plan, chip.results).values()}
    assert {"check", "build", "verify", "judge", "tabulate"} <= stale


def test_a_gate_on_verdicts_of_looser_thresholds_is_red(chip, capfd):
    strict = chip.planned(CHIP | {"thresholds": {"kv_l2": {"pass": 1e-6, "warn": 1e-6}}})
    assert chip.body("judge")["verdict"] == "pass"
    assert strict.command("gate") == 1
    said = capfd.readouterr().out
    assert "fp16" in said and "stale" in said


def test_a_checkpoint_edited_in_place_is_noticed(tmp_path, host_rows):
    """Same size and date, above 1 MiB, and not where a sample of blocks would look."""
    folder = tmp_path / "mine"
    shutil.copytree(host_rows.path("fetch").parent, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + bytes(4 << 20))
    source = {"kind": "folder", "path": str(folder)}
    mine = config(
        {"strategies": ["managed"], "platforms": ["host"], "quants": ["fp32"]}, models={"tiny": {"source": source}}
    )
    before = Sweep(tmp_path, mine).key("fetch")
    at = weights.stat()
    with weights.open("r+b") as file:
        file.seek(200_000)
        file.write(b"\x55")
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert Sweep(tmp_path, mine).key("fetch") != before


# The store


def entry(sweep: Sweep) -> Path:
    (found,) = (x for x in (sweep.results / "store").glob("??/*") if x.is_dir())
    return found


@pytest.mark.parametrize("file", ["model.rknn", "contract.json", "observations/fill.npz", "table.txt", "toolkit.log"])
def test_a_poisoned_store_is_not_taken_from(chip, compiled, file):
    """The damage came through a link: a result, or its bundle, was edited in place."""
    flipped(entry(chip) / file)
    chip.run("build")
    assert len(compiled) == 1 and chip.body("judge")["reason"] == "compiled"
    assert not shipped(chip)


def test_an_entry_of_another_row_under_this_rows_key(chip, compiled, monkeypatch):
    moved(chip, compiled, monkeypatch, lambda place, key: None)


def test_an_entry_of_another_row_that_says_this_rows_key(chip, compiled, monkeypatch):
    """Forged with care: only the artifact's own custom string tells."""

    def forged(place: Path, key: str) -> None:
        path = place / "manifest.json"
        record.write(path, record.read(path) | {"key": key})

    moved(chip, compiled, monkeypatch, forged)


def moved(chip: Sweep, compiled: list[Any], patch: Any, forge: Callable[[Path, str], None]) -> None:
    keys = []
    get = store.get
    patch.setattr(store, "get", lambda results, key, folder: keys.append(key) or get(results, key, folder))
    int8 = chip.planned(INT8).run("build")
    assert len(compiled) == 1
    place = chip.results / "store" / keys[0][:2] / keys[0]
    shutil.copytree(entry(chip), place)
    forge(place, keys[0])
    int8.run("build")
    assert len(compiled) == 2 and not place.exists()
    assert int8.body("judge")["verdict"] == "blocked" and not shipped(int8)


def test_an_edited_bundle_is_made_again(chip):
    made = chip.body("tabulate")["bundles"]
    (folder,) = shipped(chip)
    assert bundle.broken(chip.results, made) == []
    for name in ("host.npz", "tokenizer.json", "model.rknn", "generate.py", "graph_contract.json"):
        path = folder / name
        kept = path.read_bytes()
        flipped(path)
        assert bundle.broken(chip.results, made) == list(made), name
        path.write_bytes(kept)
