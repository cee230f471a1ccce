"""No stage uses a file that it has not held to the record of the stage that wrote it.

Each stage is run once with a spy on every file that Python opens; then each of those files is changed, one at a time.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any

import boardrow
import numpy as np
import pytest
import tinygraph
from kvgate.contract import Contract
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.remote import selftests
from kvgate.stages import accuracy, build, check, diagnose, export, judge, prepare, probe, run, selftest, trace, verify
from onnx import external_data_helper
from synthetic import THRESHOLDS
from tinyrow import CHIP, HOST, Rows

CHECKPOINT = {
    "fetch/chat_template.jinja", "fetch/config.json", "fetch/generation_config.json", "fetch/model.safetensors",
    "fetch/tokenizer.json", "fetch/tokenizer_config.json",
}  # fmt: skip
GRAPH = {"export/contract.json", "export/host.npz", "export/model.onnx"}
TRACE = "trace.program/trace.npz"
TRACES = {TRACE, "trace.full/trace.npz"}
METRICS = {"verify/program/metrics.npz", "verify/full/metrics.npz"}
W8A8 = {"mask": -100, "calibrate": True, "config": {"quantized_dtype": "w8a8"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Rows:
    rows = Rows(tmp_path_factory.mktemp("opened"))
    rows.judged(HOST), rows.judged(CHIP)
    return rows


@pytest.fixture
def rows(made, tmp_path) -> Rows:
    """A copy of the results that a test may change."""
    rows = copy(made)
    rows.results = tmp_path / "results"
    shutil.copytree(made.results, rows.results)
    return rows


def chip(rows: Rows, stage: str, config: dict[str, Any], inputs: list[str]) -> Job:
    job = rows.job(stage, config, [x for x in inputs if x != "observed"], **CHIP, form="recipe")
    if "trace.program" in inputs:
        job.inputs["trace.full"] = rows.job("trace", {}, [], program="full").record
    if "observed" in inputs:
        job.inputs["observed"] = rows.job("check", {}, []).record
    return job


def checked(rows: Rows) -> Job:
    job = rows.job("check", {"programs": rows.programs, "isolated": 4, "mask": -1e4}, ["export", "trace.program"])
    job.inputs["trace.full"] = rows.job("trace", {}, [], program="full").record
    return job


def traced(rows: Rows) -> Job:
    program = {"kind": "chat", "text": "text.txt", "tokens": 4}
    (rows.results / "text.txt").write_text("Hi")
    job = rows.job("trace", {"program": program}, ["fetch"])
    return Job("trace", job.wildcards | {"program": "again"}, job.config, job.inputs, rows.results, rows.results)


def prepared(rows: Rows) -> Job:
    job = rows.job("prepare", {"weights": {"steps": []}}, ["fetch"], form="recipe")
    job.inputs["calibration.a"] = rows.job("trace", {}, []).record
    return job


def exported(rows: Rows) -> Job:
    strategy = {"module": "cpu_managed", "capacity": 48, "form": "recipe", "layout": "channels", "rank": 4, "layers": 0}
    config = {"strategy": strategy | {"packing": "apart"}}
    job = rows.job("export", config, ["fetch"])
    job.inputs["prepare"] = rows.job("prepare", {}, [], form="recipe").record
    return job


def diagnosed(rows: Rows) -> Job:
    config = {"thresholds": THRESHOLDS, "programs": list(rows.programs)}
    job = chip(rows, "diagnose", config, ["export", "judge", "verify", "build", "trace.program"])
    record.write(job.inputs["build"], job.read("build") | {"boundary": {"inputs": [], "outputs": []}})
    return job


# Stage, how its job is made, and what it opens besides records
CASES: dict[str, tuple[Any, Callable[[Rows], Job], set[str]]] = {
    "trace": (trace, traced, CHECKPOINT),
    "prepare": (prepare, prepared, CHECKPOINT | {"calibration.a/trace.npz"}),
    "export": (export, exported, CHECKPOINT | {"prepare/weights.bin", "prepare/tables.npz"}),
    "check": (check, checked, GRAPH | TRACES | {"export/weights.bin"}),
    "verify": (
        verify,
        lambda rows: chip(
            rows,
            "verify",
            {"programs": rows.programs, "isolated": 4},
            ["export", "trace.program", "observed", "build"],
        ),
        {"export/contract.json", "export/host.npz"}
        | TRACES
        | {f"observed/observations/{name}.npz" for name in ("program", "full")},
    ),
    "judge": (
        judge,
        lambda rows: chip(rows, "judge", {"thresholds": THRESHOLDS}, ["export", "check", "verify", "build"]),
        {"export/contract.json", "build/contract.json"} | METRICS,
    ),
    "diagnose": (
        diagnose,
        diagnosed,
        {"export/contract.json", "export/host.npz"} | METRICS | TRACES,
    ),
}
_seen: list[Path] | None = None


def _spy(event: str, args: tuple[Any, ...]) -> None:
    if _seen is not None and event == "open" and isinstance(args[0], (str, os.PathLike)):
        _seen.append(Path(args[0]))


sys.addaudithook(_spy)


@contextmanager
def spied() -> Iterator[list[Path]]:
    """What Python opens meanwhile."""
    global _seen
    _seen = found = []
    try:
        yield found
    finally:
        _seen = None


def opened(job: Job) -> set[str]:
    return {"/".join(x) for x in job._opened}


def place(job: Job, name: str) -> Path:
    label, _, rest = name.partition("/")
    return job.inputs[label].parent / rest


def flip(path: Path) -> None:
    """A byte in its middle, in place; the date stays."""
    dates, at = path.stat(), path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def refused(work: Callable[[Job], Any], job: Job, name: str) -> None:
    """The stage blocks, names the file, and asks to be made again, after the file's own stage."""
    try:
        body = work(job)
        assert body.get("verdict") == "blocked", f"{name}: not noticed"
        reason, again = body["reason"], body["again"]
    except record.Blocked as why:
        reason, again = why.reason, why.facts["again"]
    assert f"{name.partition('/')[2]} is not what " in reason and reason.endswith("; run again: it is made again")
    assert again and record.doubted(job.inputs[name.partition("/")[0]])


def each(work: Callable[[Job], Any], make: Callable[[], Job], names: set[str]) -> None:
    """Every file is changed by a byte, cut, and taken away, one at a time."""
    for name in sorted(names):
        path = place(make(), name)
        kept = path.read_bytes()
        for change in (flip, shorten, Path.unlink):
            change(path)
            refused(work, make(), name)
            path.write_bytes(kept)


@pytest.mark.parametrize("stage", CASES)
def test_a_stage_opens_nothing_that_was_changed(rows, stage):
    module, make, names = CASES[stage]
    job = make(rows)
    with spied() as seen:
        module.run(job)
    assert opened(job) == names
    inputs = {place(job, name).resolve() for name in names} | {path.resolve() for path in job.inputs.values()}
    below = {x.resolve() for x in seen if x.resolve().is_relative_to(rows.results.resolve())}
    mine = {x for x in below if x.is_relative_to(job.folder.resolve()) or x.name == "text.txt"}
    assert below - mine <= inputs
    each(module.run, lambda: make(rows), names)
    module.run(make(rows))  # and all is well again


def test_a_file_of_a_checkpoint_that_fetch_did_not_write_is_named(rows):
    (rows.results / "models/tiny/checkpoint/adapter_config.json").write_text("{}")
    with pytest.raises(record.Blocked, match=r"got adapter_config\.json, which fetch did not write; remove it") as why:
        trace.run(traced(rows))
    assert why.value.facts["again"]


def shift(path: Path) -> None:
    with np.load(path) as file:
        arrays = dict(file)
    arrays["embedding"] = np.roll(arrays["embedding"], 1, axis=0)
    with path.open("wb") as file:
        np.savez(file, **arrays)


def cut(path: Path) -> None:
    """One step of each history is left."""
    with np.load(path) as file:
        arrays = {k: v if k.startswith("free") else v[:1] for k, v in file.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def window(path: Path) -> None:
    text = path.read_text()
    assert '"windows":[null]' in text
    path.write_text(text.replace('"windows":[null]', '"windows":[8]'))


@pytest.mark.parametrize(
    ("stage", "name", "change"),
    [
        ("check", "export/host.npz", shift),
        ("verify", "export/host.npz", shift),
        ("check", "export/contract.json", window),
        ("judge", "export/contract.json", window),
        ("verify", "observed/observations/program.npz", cut),
    ],
)
def test_what_reads_well_and_is_another(rows, stage, name, change):
    module, make, _ = CASES[stage]
    change(place(make(rows), name))
    refused(module.run, make(rows), name)


@pytest.mark.parametrize("what", ["contract", "host.npz"])
def test_a_contract_is_held_to_its_digest_and_to_its_tables(rows, what):
    """Also where the record lists the contract as it lies there."""
    job = checked(rows)
    exported = job.read("export")
    changed = {"contract": "0" * 64} if what == "contract" else {"files": exported["files"] | {"host.npz": "0" * 64}}
    record.write(job.inputs["export"], exported | changed)
    with pytest.raises(record.Blocked, match=r"contract\.json is not what export wrote"):
        graph_files.contract(checked(rows))


@pytest.mark.parametrize("label", ["export", "check", "verify", "build"])
def test_an_edited_record_is_refused(rows, label):
    _, make, _ = CASES["judge"]
    path = make(rows).inputs[label]
    path.write_bytes(path.read_bytes().replace(b'"status"', b'"status" '))
    body = judge.run(make(rows))
    assert (body["verdict"], body["again"]) == ("blocked", True) and f"{path.name} is not what {label} w" in body[
        "reason"
    ]


def test_a_file_that_moves_while_it_is_read_blocks(rows):
    job = checked(rows)
    check.run(job)
    job.unmoved()
    place(job, TRACE).touch()
    job.unmoved()  # the same content
    flip(place(job, TRACE))
    with pytest.raises(record.Blocked, match=r"trace\.npz is not what trace wrote"):
        job.unmoved()


# What is compiled, and what a board gets


def test_build(tmp_path):
    job = tinygraph.prepare(tmp_path, W8A8)
    source = build.opened(job)
    build.host_of(job, source)
    texts = {"trace.text/trace.npz", "calibration.a/trace.npz", "calibration.b/trace.npz"}
    assert opened(job) == GRAPH | texts
    each(build.run, lambda: copied(job), (GRAPH | texts) - {"export/host.npz"})
    shift(place(job, "export/host.npz"))
    refused(lambda x: build.asked(x, source, tmp_path), copied(job), "export/host.npz")


def copied(job: Job) -> Job:
    return Job(job.stage, job.wildcards, job.config, job.inputs, job.results, job.base)


def external(model: Any) -> None:
    external_data_helper.convert_model_to_external_data(model, location="weights.bin", size_threshold=1024)


def test_a_flipped_bit_in_the_weights_is_neither_built_nor_stored_nor_brought_back(tmp_path, monkeypatch):
    """Before the compiler reads them, and while it does."""
    job = tinygraph.prepare(tmp_path, {}, external)
    contract = Contract.from_json(place(job, "export/contract.json").read_text())
    tinygraph.exported(job.inputs["export"], contract, "weights.bin")
    weights = place(job, "export/weights.bin")
    os.link(weights, tmp_path / "another graph's")

    def compiles(job: Job, *_: Any) -> None:
        flip(tmp_path / "another graph's")
        for name in build._files(job):
            record.write_bytes(job.folder / name, b"made of it")
        (job.folder / "toolkit.log").touch()

    monkeypatch.setattr(build, "_compile", compiles)
    monkeypatch.setattr(
        build, "_body", lambda job, *_: {"files": {n: record.sha256(job.folder / n) for n in build._files(job)}}
    )
    refused(build.run, copied(job), "export/weights.bin")
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled"))
    refused(build.run, copied(job), "export/weights.bin")
    assert not (tmp_path / "store").exists()


def test_accuracy(tmp_path):
    job = tinygraph.prepare(tmp_path, {})
    verified = tmp_path / "rows/metrics.json"
    (verified.parent / "text").mkdir(parents=True)
    with (verified.parent / "text/metrics.npz").open("wb") as file:
        np.savez(file, **{"isolated/kv": [[[0.1, 0.2]]], "isolated/positions": [3]})
    record.write(
        verified, {"status": "ok", "files": {"text/metrics.npz": record.sha256(verified.parent / "text/metrics.npz")}}
    )

    def make() -> Job:
        return Job(
            "accuracy",
            job.wildcards | {"backend": "simulator"},
            job.config,
            job.inputs | {"verify": verified},
            tmp_path,
        )

    names = GRAPH | {"trace.text/trace.npz", "verify/text/metrics.npz"}
    each(accuracy.run, make, names)


@pytest.mark.parametrize("engine", ["onnxruntime", "lite"])
def test_run(tmp_path, engine):
    entry = boardrow.board(tmp_path / "work", engine=engine)
    job = boardrow.row(tmp_path, entry, ballast=2000)
    names = {"export/contract.json", "export/host.npz", "trace.sky/trace.npz", "trace.text/trace.npz"}
    if engine == "lite":
        built = tmp_path / "built/build.json"
        record.write_bytes(built.with_name("model.rknn"), b"RKNN")
        record.write(built.with_name("contract.json"), {"custom_string": "x"})
        files = {n: record.sha256(built.with_name(n)) for n in ("model.rknn", "contract.json")}
        record.write(built, {"status": "ok", "files": files})
        job.inputs["build"] = built
        names |= {"build/model.rknn", "build/contract.json"}
    else:
        names |= {"export/model.onnx", "export/weights.bin"}
    run.request(job)
    assert opened(job) == names
    each(run.request, lambda: copied(job), names)


def test_selftest(tmp_path):
    above = Job("probe", {"platform": "host"}, {"timeout": 1}, {}, tmp_path)
    above.folder.mkdir(parents=True)
    record.write(above.record, {"status": "ok", **probe.run(above)})
    board, first = boardrow.board(tmp_path / "work"), selftests.probes()[0]
    config = {"board": board, "limits": {"step_seconds": 1}}

    def make() -> Job:
        return Job("selftest", {"backend": "here"}, config, {"probe": above.record}, tmp_path)

    names = {f"probe/{first.name}/{x}" for x in ("contract.json", "feeds.npz", "model.onnx")}
    job = make()
    with suppress(AttributeError):  # there is no board
        selftest._test(job, first, None)  # type: ignore[arg-type]
    assert opened(job) == names
    each(lambda job: selftest._test(job, first, None), make, names)  # type: ignore[arg-type]
