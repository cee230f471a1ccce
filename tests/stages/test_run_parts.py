"""A row of several artifacts through the whole agent, in ONNX Runtime: what is observed, judged, timed and refused."""

import types
from dataclasses import replace
from pathlib import Path

import boardrow
import numpy as np
import pytest
import tinyrow
from graphs import Graph, Model
from kvgate.board.chain import Chain
from kvgate.board.child import Child
from kvgate.board.marker import Marker
from kvgate.contract import Contract
from kvgate.engines.onnxruntime import Engine
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.judging import gate
from kvgate.observe import Trace, observe
from kvgate.remote.session import observed
from kvgate.stages import check, judge, run, verify
from synthetic import THRESHOLDS

TOKENS = 8
HERE = {"model": "tiny", "weights": "plain", "platform": "host", "quant": "fp32"}


class Parts:
    """A row's graphs: decode whole and in pieces, and prefill; each stage as the workflow would run it."""

    def __init__(self, root: Path) -> None:
        self.rows = tinyrow.Rows(root)
        model = Model(self.rows.results, "tiny")
        self.whole = model.export("cpu_managed", capacity=tinyrow.CAPACITY)
        self.cut = model.export("cpu_managed", capacity=tinyrow.CAPACITY, layers=1)
        self.prefill = model.prefill("cpu_managed", capacity=tinyrow.CAPACITY, tokens=TOKENS)
        self.work = root / "work"
        self.checked = self.rows.job("check", {}, []).record
        inputs = {"decode": self.whole.folder / "graph.json"}
        self.checked_prefill = self._done(check, "prefill", "onnxruntime", self.prefill, inputs).record

    def run(self, name: str, decode: Graph) -> Job:
        """The job of the row `name` on a board that is this machine."""
        inputs = {"export.prefill": self.prefill.folder / "graph.json"}
        return self._job("run", name, "onnxruntime-here", decode, inputs)

    def ran(self, name: str, decode: Graph) -> Job:
        job = self.run(name, decode)
        record.write(job.record, run.run(job) | {"status": "ok"})
        return job

    def metrics(self, name: str, decode: Graph, ran: Job) -> Job:
        """What a board's run is compared to."""
        inputs = {"export.prefill": self.prefill.folder / "graph.json", "observed": ran.record}
        return self._done(verify, name, "onnxruntime-here", decode, inputs)

    def metrics_here(self) -> Job:
        """The same of the row of ONNX Runtime on this PC."""
        inputs = {"export.prefill": self.prefill.folder / "graph.json"}
        inputs |= {"observed": self.checked, "observed.prefill": self.checked_prefill}
        return self._done(verify, "here", "onnxruntime", self.whole, inputs)

    def judged(self, ran: Job, metrics: Job) -> dict:
        inputs = {"export": ran.inputs["export"], "check": self.checked, "verify": metrics.record, "run": ran.record}
        inputs["check.prefill"] = self.checked_prefill
        return judge.run(Job("judge", metrics.wildcards, {"thresholds": THRESHOLDS}, inputs, self.rows.results))

    def trace(self, program: str) -> Trace:
        return Trace.load(str(self.rows.job("trace", {}, [], program=program).folder / "trace.npz"))

    def _job(self, stage: str, name: str, backend: str, graph: Graph, inputs: dict[str, Path]) -> Job:
        config = {
            "board": boardrow.board(self.work),
            "limits": {"run_seconds": 900, "step_seconds": 120},
            "programs": self.rows.programs,
            "isolated": 4,
            "timing": {"warmup": 1, "steps": 4},
            "mask": -1e4,
        }
        inputs = {"export": graph.folder / "graph.json"} | inputs
        inputs |= {f"trace.{x}": self.rows.job("trace", {}, [], program=x).record for x in self.rows.programs}
        names = HERE | {"strategy": name, "backend": backend, "part": graph.contract.part}
        job = Job(stage, names, config, inputs, self.rows.results)
        job.folder.mkdir(parents=True, exist_ok=True)
        return job

    def _done(self, stage, name: str, backend: str, graph: Graph, inputs: dict[str, Path]) -> Job:
        job = self._job(stage.__name__.rpartition(".")[2], name, backend, graph, inputs)
        record.write(job.record, stage.run(job) | {"status": "ok"})
        return job


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Parts:
    return Parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def chunked(parts) -> Job:
    return parts.ran("chunked", parts.whole)


@pytest.fixture(scope="module")
def pieces(parts) -> Job:
    return parts.ran("pieces", parts.cut)


def test_a_prefill_part_on_a_board_has_the_metrics_of_onnx_runtime_here(parts, chunked):
    here = parts.metrics_here()
    there = parts.metrics("chunked", parts.whole, chunked)
    one, two = (record.read(x.record)["programs"] for x in (here, there))
    assert set(one) == {"program", "full", "prefill/program", "prefill/full"} and one == two
    assert two["prefill/full"]["histories"]["forced"]["steps"] == tinyrow.CAPACITY
    for name in one:
        with np.load(here.folder / name / "metrics.npz") as a, np.load(there.folder / name / "metrics.npz") as b:
            assert all(np.array_equal(a[x], b[x]) for x in a.files)


def test_the_verdict_is_over_both_parts(parts, chunked):
    metrics = parts.metrics("chunked", parts.whole, chunked)
    verdict = parts.judged(chunked, metrics)
    assert verdict["verdict"] == "pass", verdict["reason"]
    assert {"program", "prefill/program", "prefill/full"} <= {x["program"] for x in verdict["gates"]}
    # A prefill part that is wrong on the board alone makes the row red, and is named.
    path = chunked.folder / "observations/prefill/full.npz"
    whole, body = path.read_bytes(), record.read(chunked.record)
    with np.load(path) as file:
        wrong = dict(file)
    wrong["forced/layers.1.value"] = wrong["forced/layers.1.value"][::-1]
    np.savez(path, **wrong)
    record.write(
        chunked.record, body | {"files": body["files"] | {"observations/prefill/full.npz": record.sha256(path)}}
    )
    verdict = parts.judged(chunked, parts.metrics("wrong", parts.whole, chunked))
    path.write_bytes(whole)
    record.write(chunked.record, body)
    assert verdict["verdict"] == "fail" and verdict["first"]["program"] == "prefill/full"
    assert {x["program"] for x in verdict["gates"] if x["verdict"] == "fail"} == {"prefill/full"}


class Counted:
    def __init__(self, engine) -> None:
        self.engine, self.steps = engine, 0

    def step(self, feeds):
        self.steps += 1
        return self.engine.step(feeds)


@pytest.mark.parametrize(
    ("prompt", "chunks", "ones"), [(20, 3, 1), (18, 2, 2), (17, 2, 1), (10, 1, 2), (3, 1, 1), (2, 0, 2), (1, 0, 1)]
)
def test_the_first_token_is_that_of_a_prompt_in_chunks(parts, tmp_path, prompt, chunks, ones):
    tokens = parts.trace("full").tokens[:prompt].tolist()
    marker, silent = Marker(tmp_path / "marker", create=True), types.SimpleNamespace(errors=list)
    child = types.SimpleNamespace(marker=marker, text=silent, engine=Counted(parts.whole.engine))
    child._heed = lambda: Child._heed(child)
    many, host = Counted(parts.prefill.engine), parts.whole.host()
    taken = Child._first_token(child, tokens, host, many, host.chunked(parts.prefill.contract))
    assert (many.steps, child.engine.steps) == (chunks, ones)
    assert host.length == prompt and taken > 0 and marker.get().text == f"first token {prompt}/{prompt}"


def test_the_first_token_is_in_the_row(parts, chunked):
    ledger = record.read(chunked.record)["ledger"]
    assert ledger["first_token_us"] > 0 and ledger["steps"] == 4
    figures = parts.judged(chunked, parts.metrics("chunked", parts.whole, chunked))["figures"]
    assert figures["first_token_ms"] == ledger["first_token_us"] / 1e3


def test_one_folder_and_one_job_without_the_graphs_that_do_not_run(parts, chunked, pieces):
    asked = run.request(parts.run("pieces", parts.cut)).job
    assert [x["part"] for x in asked["pieces"]] == ["layers.0-0", "layers.1-1", "head"]
    assert list(asked["parts"]) == ["prefill"] and asked["custom_string"] == ""
    files = asked["files"]
    assert "model.onnx" not in files and {f"{x}/model.onnx" for x in ("layers.0-0", "head", "prefill")} <= set(files)
    assert len({files[f"{x}/weights.bin"] for x in ("layers.0-0", "layers.1-1", "head", "prefill")}) == 1  # sent once
    assert observed(asked) == ["program", "full", "prefill/program", "prefill/full"]
    names = {f"observations/{x}.npz" for x in observed(asked)}
    assert set(record.read(chunked.record)["files"]) == set(record.read(pieces.record)["files"]) == names
    # An old row's job is as it was: nothing beside it.
    alone = parts.run("alone", parts.whole)
    del alone.inputs["export.prefill"]
    asked = run.request(alone).job
    assert (asked["pieces"], asked["parts"]) == ([], {}) and "model.onnx" in asked["files"]


def test_pieces_on_a_board_are_the_chain_of_them_here(parts, pieces):
    """To the last bit; and the row passes as the whole does, its free run to the end."""
    folder, contract = parts.cut.folder, parts.cut.contract
    found = []
    for part in parts.cut.record["pieces"]:
        graph, told = graph_files.piece_names(part)
        own = Contract.from_json((folder / told).read_text())
        found.append((Engine(folder / graph, own), own))
    for name, program in parts.rows.programs.items():
        here = observe(Chain(found), parts.cut.host(), parts.trace(name), program["histories"], 4)
        with np.load(pieces.folder / f"observations/{name}.npz") as there:
            assert sorted(there.files) == sorted(here)
            assert all(np.array_equal(there[x], here[x]) for x in here)
    metrics = parts.metrics("pieces", parts.cut, pieces)
    verdict = parts.judged(pieces, metrics)
    assert verdict["verdict"] == "pass", verdict["reason"]
    whole = record.read(parts.metrics_here().record)
    cut = record.read(metrics.record)
    assert cut["programs"]["prefill/full"] == whole["programs"]["prefill/full"]
    assert cut["programs"]["program"]["free"] == whole["programs"]["program"]["free"]
    assert contract.part == "decode" and gate.worst([x["verdict"] for x in verdict["gates"]]) == "pass"


# What is refused, with one line and nothing half-run


def refused(parts, change) -> record.Blocked:
    """What the board says of the job in pieces after `change` of its request."""
    job = parts.run("refused", parts.cut)
    asked = change(run.request(job))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(record.Blocked) as caught:
        patch.setattr(run, "request", lambda job: asked)
        run.run(job)
    assert "\n" not in caught.value.reason and not list(job.folder.glob("observations*"))
    assert caught.value.findings[0]["kind"] == "contract" and "again" not in caught.value.facts
    return caught.value


def other(asked: run.Request, **names: str) -> run.Request:
    """With other files under these names, whose slashes and dots are `__` and `_`."""
    return replace(asked, job=asked.job | {"files": {k: v for k, v in (asked.job["files"] | names).items() if v}})


def test_pieces_of_equal_shape_that_are_swapped(parts):
    def swapped(asked, file):
        one, two = f"layers.0-0/{file}", f"layers.1-1/{file}"
        return other(asked, **{one: asked.job["files"][two], two: asked.job["files"][one]})

    why = refused(parts, lambda x: swapped(x, "model.onnx"))
    said = "allowed: tensor 'key.0' (state layers.0.key) among them in init layers.0-0"
    assert why.reason.startswith("graph's inputs: got [") and why.reason.endswith(said)
    why = refused(parts, lambda x: swapped(x, "contract.json"))
    assert why.reason == "layers.0-0/contract.json: got part 'layers.1-1', allowed: 'layers.0-0'"
    assert why.facts["phase"] == "check"


@pytest.mark.parametrize("name", ["prefill", "head"])
def test_a_part_that_is_missing(parts, name):
    why = refused(parts, lambda x: other(x, **{f"{name}/contract.json": ""}))
    assert why.reason == f"{name}/contract.json: No such file or directory"


def test_a_graph_with_another_cache_is_named_by_its_state(parts):
    longer = Model(parts.rows.results, "tiny").prefill("cpu_managed", capacity=tinyrow.CAPACITY + 1, tokens=TOKENS)
    path = longer.folder / "model.onnx"
    sha = record.sha256(path)

    def changed(asked):
        return replace(other(asked, **{"prefill/model.onnx": sha}), files=asked.files | {sha: path})

    why = refused(parts, changed)
    assert why.reason.startswith("tensor 'key.0' (state layers.0.key): got ")
    assert why.reason.endswith("in init prefill")
