"""The child inside the real agent: what it observes is what the host would, and what goes wrong has phase and step."""

import io
import json

import numpy as np
import pytest
import rig
import tinygraph
from kvgate import contract as c
from kvgate.board.child import Coming
from kvgate.observe import Trace, observe
from kvgate.remote import agent_zip
from kvgate.strategies.cpu_managed.host import Host


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """One agent for all jobs, with the double of an engine."""
    with rig.agent(tmp_path_factory.mktemp("board") / "work", rig.double()) as remote:
        remote.hello()
        yield remote


def run(remote, script, **fields):
    return remote.run(rig.job(script, **fields), rig.files())


def test_a_run_to_the_end(remote):
    status = run(remote, {"runtime": "2.5.7"})
    assert status["ok"] and status["reason"] == "" and status["phase"] == "done" and status["findings"] == []
    assert status["core_mask"] == 1 and status["versions"]["runtime"] == "2.5.7"
    ledger = status["ledger"]
    assert (ledger["warmup"], ledger["steps"]) == (2, 6)
    parts = sum(ledger[name] for name in ("inputs_us", "inference_us", "cache_us"))
    assert 0.5 * parts < ledger["total_us"] < 2 * parts
    assert ledger["first_token_us"] > 0.5 * ledger["total_p10_us"]
    assert 10 << 20 < ledger["peak_rss_bytes"] < 400 << 20
    assert ledger["npu_us"] is None and ledger["why"] == "engine onnxruntime has no layer table"


# Steps of the double: 1 is the first inference, 2 and 3 are isolated, 4 to 8 forced, then free, then timing.
@pytest.mark.parametrize(
    ("script", "kind", "phase", "step", "text"),
    [
        ({"open": ["segfault"]}, "segfault", "init", None, "segmentation fault in init"),
        ({"1": ["segfault"]}, "segfault", "first inference", None, "segmentation fault in first inference"),
        ({"3": ["segfault"]}, "segfault", "chat isolated", 2, "segmentation fault in chat isolated, step 2"),
        ({"4": ["kill"]}, "signal", "chat forced", 1, "the child was ended by SIGKILL in chat forced, step 1"),
        ({"5": ["exit"]}, "exit", "chat forced", 2, "the child ended with code 7 in chat forced, step 2"),
        ({"6": ["hang"]}, "hang", "chat forced", 3, "no sign of life for 1 s in chat forced, step 3"),
        ({"1": ["hang"]}, "hang", "first inference", None, "no sign of life for 1 s in first inference"),
        ({"7": ["memory"]}, "memory", "chat forced", 4, "MemoryError in chat forced, step 4"),
        (
            {"5": ["E RKNN: [12:00] failed to submit!, op id: 3"]},
            "failed_to_submit",
            "chat forced",
            2,
            "E RKNN: [12:00] failed to submit!, op id: 3 in chat forced, step 2",
        ),
        (
            {"1": ["out failed to submit, on stdout"]},
            "failed_to_submit",
            "first inference",
            None,
            "failed to submit, on stdout in first inference",
        ),
        (
            {"6": ["E RKNN: job timeout"]},
            "ignored_run_error",
            "chat forced",
            3,
            "arrays came back, but the runtime said: E RKNN: job timeout in chat forced, step 3",
        ),
        ({"open": ["failed to submit!"]}, "failed_to_submit", "init", None, "failed to submit! in init"),
        ({"open": ["error mask 5\n was not taken"]}, "core_mask", "init", None, "mask 5 was not taken in init"),
    ],
)
def test_what_goes_wrong(remote, script, kind, phase, step, text):
    status = run(remote, script, seconds={"load": 20, "step": 1})
    finding = status["findings"][0]
    assert not status["ok"] and (finding["kind"], status["phase"], finding.get("step")) == (kind, phase, step)
    assert status["reason"] == finding["text"] == text
    assert len(status["findings"]) == 1 and status["ledger"] is None


def test_timing_is_watched_too(remote):
    """Steps of the double: the first inference, 5 forced, then the timing's."""
    status = run(remote, {"9": ["segfault"]}, programs={"chat": {"histories": ["forced"]}})
    assert (status["phase"], status["findings"][0]["step"]) == ("timing", 3)
    assert list(status["files"]) == list(remote.files) == ["observations/chat.npz"]  # what was done, is kept


RESIDENT = (
    rig.DOUBLE
    + """
    def host(self, kind, tables, mask):
        self.made = kind(self.contract, tables, mask)
        self.made.observes = True
        return self.made
    def last_us(self):
        return {"run_us": 3.0}
    def layers(self):
        if "broken" in self.script: raise ValueError("no table")
        return {"npu_us": 2.0, "cpu_us": 1.0, "source": "a double", "operators": [str(self.made.observes)]}
"""
)


def test_what_an_engine_may_have(tmp_path):
    """A host half of its own, which need not observe while it is timed; the runtime's own time; a layer table."""
    with rig.agent(tmp_path / "work", rig.double(RESIDENT)) as remote:
        remote.hello()
        ledger = run(remote, {})["ledger"]
        assert (ledger["run_us"], ledger["npu_us"], ledger["cpu_us"], ledger["source"]) == (3.0, 2.0, 1.0, "a double")
        assert ledger["operators"] == ["False"]
        assert ledger["overhead_us"] == round(ledger["inference_us"] - 3.0, 1)
        for ledger, why in (
            (run(remote, {"broken": []})["ledger"], "ValueError: no table"),
            (run(remote, {}, perf=False)["ledger"], "not asked for"),
        ):
            assert (ledger["npu_us"], ledger["source"], ledger["why"]) == (None, None, why)


def test_warnings_are_no_errors(remote):
    status = run(remote, {"open": ["W RKNN: old model"], "3": ["W RKNN: slow", "Errors: none"], "4": ["out I hello"]})
    assert status["ok"] and status["findings"] == [] and "W RKNN: slow" in status["stderr_tail"]


def test_errors_while_it_opened_are_told_and_do_not_block(remote):
    status = run(remote, {"open": ["E RKNN: cannot lock memory"]})
    assert status["ok"]
    assert status["findings"] == [{"kind": "error_line", "text": "E RKNN: cannot lock memory in init", "phase": "init"}]


def test_a_death_at_the_close_loses_nothing(remote):
    status = run(remote, {"close": ["segfault"]})
    assert status["ok"] and status["ledger"] and [x["kind"] for x in status["findings"]] == ["segfault"]


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"host.npz": b"no zip"}, "contract", "ValueError: "),
        ({"trace/chat.npz": b""}, "exit", "EOFError: "),
    ],
)
def test_broken_files(remote, change, kind, text):
    status = remote.run(rig.job(), rig.files() | change)
    assert not status["ok"] and status["findings"][0]["kind"] == kind and status["reason"].startswith(text)


def test_a_mask_that_is_none(remote):
    assert "mask value: got 1.0, allowed: finite and negative" in run(remote, {}, mask=1.0)["reason"]


def test_what_prints_breaks_no_frame(remote):
    assert run(remote, {str(n): ["out KVG1\0\0\0\0 garbage"] for n in range(1, 9)})["ok"]


def test_progress(remote):
    remote.run(rig.job({"4": ["hang"]}, seconds={"load": 20, "step": 1.5}), rig.files())
    assert remote.progress[-1] == {"type": "progress", "phase": "chat forced", "text": "chat forced 1/1"}


def test_probe_feeds(remote):
    """The self tests' jobs: no program, no host half."""
    feeds = {t.name: np.zeros((3, *t.shape), t.dtype) for t in rig.CONTRACT.inputs}
    buffer = io.BytesIO()
    np.savez(buffer, **feeds)
    job = {k: v for k, v in rig.job().items() if k not in ("programs", "timing", "mask", "isolated")}
    files = {"contract.json": rig.CONTRACT.to_json().encode(), "feeds.npz": buffer.getvalue()}
    status = remote.run(job, files)
    assert status["ok"] and list(status["files"]) == list(remote.files) == ["outputs.npz"]
    with np.load(io.BytesIO(remote.files["outputs.npz"])) as outputs:
        assert {n: a.shape for n, a in outputs.items()} == {t.name: (3, *t.shape) for t in rig.CONTRACT.outputs}
    status = remote.run(job | {"custom_string": json.dumps({"2": ["segfault"]})}, files)
    assert (status["findings"][0]["phase"], status["findings"][0]["step"]) == ("probe", 2)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A real graph with two programs, and what the host itself observes of it."""
    import onnx

    folder, boundary = tmp_path_factory.mktemp("graph"), tinygraph.contract()
    path = folder / "model.onnx"
    onnx.save(tinygraph.decoder(boundary).model(boundary), str(path))
    files = {"model.onnx": path.read_bytes(), "contract.json": boundary.to_json().encode()}
    np.savez(folder / "host.npz", **tinygraph.tables())  # type: ignore[arg-type]
    files["host.npz"] = (folder / "host.npz").read_bytes()
    expected = {}
    for name, prompt in (("chat", 4), ("text", 12)):
        ids = np.random.default_rng(prompt).integers(0, tinygraph.VOCABULARY, 12)
        tinygraph.trace(path, boundary, ids, prompt).save(str(folder / "trace.npz"))
        files[f"trace/{name}.npz"] = (folder / "trace.npz").read_bytes()
        expected[name] = mine(path, boundary, Trace.load(str(folder / "trace.npz")))
    return boundary, files, expected


def mine(path, boundary: c.Contract, trace: Trace) -> dict[str, np.ndarray]:
    host = Host(boundary, tinygraph.tables(), -1e4)
    engine = tinygraph.engine.Engine(path, boundary)
    return observe(engine, host, trace, ["isolated", "forced", "free"], 3)


def test_observations_are_the_host_s_to_the_bit(graph, tmp_path):
    boundary, files, expected = graph
    programs = {name: {"histories": ["isolated", "forced", "free"]} for name in expected}
    job = rig.job(contract_digest=boundary.digest, programs=programs, isolated=3)
    with rig.agent(tmp_path / "work", agent_zip.build("onnxruntime", "cpu_managed")) as remote:
        assert "version" in remote.hello()["engines"]["onnxruntime"]
        status = remote.run(job, files)
        assert status["ok"], status
        assert sorted(remote.files) == ["observations/chat.npz", "observations/text.npz"]
        for name, arrays in expected.items():
            with np.load(io.BytesIO(remote.files[f"observations/{name}.npz"])) as found:
                assert set(found) == set(arrays)
                for key, array in arrays.items():
                    np.testing.assert_array_equal(found[key], array)
        assert status["ledger"]["bytes_out"] == 4 * sum(int(np.prod(t.shape)) for t in boundary.outputs)

        # A graph that is another than the contract says: the runtime's word, in a line.
        broken = remote.run(job, files | {"model.onnx": b"garbage"})
        assert broken["phase"] == "init" and broken["reason"].startswith("onnxruntime: ")


# Where the next step is


@pytest.mark.parametrize(
    ("histories", "said", "texts"),
    [
        (
            ["isolated", "forced", "free"],
            ["isolated 1/2", "isolated 2/2", "forced 1/2", "forced 2/2", "free 5/9"],
            ["isolated 1/1", "isolated 2/2", "forced 1/1", "forced 2/2", "free 1/1", "free 6/9"],
        ),
        (["free"], ["forced 1/1"], ["forced 1/1", "free 1/1"]),
    ],
)
def test_coming(histories, said, texts):
    coming = Coming("a b", histories)
    found = [coming.text]
    for text in said:
        coming.passed(text)
        found.append(coming.text)
    assert found == [f"a b {x}" for x in texts]
