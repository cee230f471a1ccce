"""run: a row on this machine through the whole agent, and rows that cannot be: each blocked with one line."""

import io
import json
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import boardrow
import numpy as np
import pytest
import tinygraph
from kvgate import contract as c
from kvgate.contract import Contract
from kvgate.engines.onnxruntime import Engine
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.observe import Trace, observe
from kvgate.remote import untrusted
from kvgate.stages import run
from kvgate.strategies.cpu_managed.host import Host


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ran")
    job = boardrow.row(folder / "results", boardrow.board(folder / "work"), steps=20)
    return job, run.run(job)


def blocked(job: Job, match: str) -> record.Blocked:
    with pytest.raises(record.Blocked, match=match) as caught:
        run.run(job)
    assert "\n" not in caught.value.reason and not list(job.folder.glob("observations*"))
    assert not (job.folder / ".arriving").exists() and caught.value.findings[0]["kind"]
    json.dumps([caught.value.findings, caught.value.facts], allow_nan=False)
    return caught.value


def test_the_observations_are_those_of_this_process(ran):
    """The same graph, host half and programs here: equal to the last bit, so nothing was lost on the way."""
    job, body = ran
    folder = job.inputs["export"].parent
    contract = Contract.from_json((folder / "contract.json").read_text())
    host, engine = Host(contract, tinygraph.tables(), -1e4), Engine(folder / "model.onnx", contract)
    for name, program in boardrow.PROGRAMS.items():
        trace = Trace.load(str(job.inputs[f"trace.{name}"].with_name("trace.npz")))
        here = observe(engine, host, trace, program["histories"], 5)
        with np.load(job.folder / f"observations/{name}.npz") as there:
            assert sorted(there.files) == sorted(here)
            assert all(np.array_equal(there[x], here[x]) for x in here)
    for name, sha in body["files"].items():
        assert record.sha256(job.folder / name) == sha


def test_the_record(ran):
    job, body = ran
    assert (body["board"], body["engine"], body["phase"], body["exit"]) == (
        "onnxruntime-here",
        "onnxruntime",
        "done",
        0,
    )
    assert body["ledger"]["steps"] == 20 and body["ledger"]["total_us"] > body["ledger"]["inference_us"] > 0
    assert body["environment"]["before"]["kernel"] and body["versions"]["numpy"] == np.__version__
    assert set(body["files"]) == {"observations/sky.npz", "observations/text.npz"}
    record.write(job.record, body | {"status": "ok"})
    assert str(job.results) not in job.record.read_text()
    side = record.read(job.folder / "board/session.json")
    assert side["sent_bytes"] > 10_000 and set(side["seconds"]) == {"start", "files", "run"}


def test_a_second_run_brings_nothing(ran):
    job, body = ran
    again = run.run(job)
    assert again["files"] == body["files"]
    assert record.read(job.folder / "board/session.json")["sent_bytes"] == 0


def test_the_dates_of_files_do_not_matter(tmp_path):
    """A board without a clock starts in 1970: what is there is known by its checksum."""
    job = boardrow.row(tmp_path / "results", boardrow.board(tmp_path / "work"))
    run.run(job)
    for path in (tmp_path / "work/files").iterdir():
        os.utime(path, (0, 0) if path.stat().st_size % 2 else (4e9, 4e9))
    run.run(job)
    assert record.read(job.folder / "board/session.json")["sent_bytes"] == 0


def test_a_changed_file_on_the_board_is_replaced(tmp_path):
    job = boardrow.row(tmp_path / "results", boardrow.board(tmp_path / "work"))
    body = run.run(job)
    sha = job.read("export")["files"]["model.onnx"]
    kept = tmp_path / "work/files" / sha
    kept.chmod(0o600)
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    assert run.run(job)["files"] == body["files"] and record.sha256(kept) == sha


def test_another_chip_is_refused_before_anything(tmp_path):
    job = boardrow.row(tmp_path, boardrow.board(tmp_path / "work", platform="rk3588"))
    why = blocked(job, "board onnxruntime-here: got a rk3588, the artifact is for host")
    assert why.findings[0]["kind"] == "platform" and not (tmp_path / "work").exists()


def test_no_python_is_one_line(tmp_path):
    why = blocked(
        boardrow.row(tmp_path, boardrow.board(tmp_path / "w", python="/no/python3")), "/no/python3: No such file"
    )
    assert "again" not in why.facts


def test_a_board_without_the_package_is_refused_before_anything_travels(tmp_path):
    job = boardrow.row(tmp_path, boardrow.board(tmp_path / "work", engine="lite"))
    build = tmp_path / "build.json"
    (tmp_path / "model.rknn").write_bytes(b"RKNN")
    record.write(tmp_path / "contract.json", {"custom_string": "x"})
    record.write(build, {"files": {n: record.sha256(tmp_path / n) for n in ("model.rknn", "contract.json")}})
    why = blocked(
        Job("run", job.wildcards, job.config, job.inputs | {"build": build}, tmp_path), "has no engine lite: .+"
    )
    assert why.findings[0]["kind"] == "engine_missing" and not list((tmp_path / "work/files").iterdir())


def test_a_graph_that_is_another_than_its_record_is_said_so(tmp_path):
    job = boardrow.row(tmp_path, boardrow.board(tmp_path / "work"))
    with (job.inputs["export"].parent / "model.onnx").open("ab") as file:
        file.write(b"more")
    assert blocked(job, r"model\.onnx is not what export wrote; run again").findings[0]["kind"] == "changed"


def test_a_contract_of_another_version_is_refused_by_the_board(tmp_path):
    job = boardrow.row(tmp_path, boardrow.board(tmp_path / "work"))
    asked = run.request(job)
    asked.job["contract_digest"] = "0" * 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "request", lambda job: asked)
        why = blocked(job, "contract: got digest .*, allowed: 0000")
    assert why.findings[0]["kind"] == "contract" and why.facts["phase"] == "check" and "again" not in why.facts


def test_more_memory_than_there_is(tmp_path):
    job = boardrow.row(tmp_path, boardrow.board(tmp_path / "work"))
    asked = run.request(job)
    asked.job["memory_bytes"] = 1 << 50
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "request", lambda job: asked)
        why = blocked(job, r"memory: needs 1073741824 MiB, \d+ MiB available")
    assert why.findings[0]["kind"] == "memory"


def test_a_lost_board_is_asked_again(tmp_path):
    script = tmp_path / "python3"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('the board fell over')\n")
    script.chmod(0o755)
    why = blocked(boardrow.row(tmp_path, boardrow.board(tmp_path / "work", python=str(script))), "the board fell over")
    assert why.facts["again"] is True and why.findings[0]["kind"] == "connect"


def test_the_deadline_ends_it(tmp_path):
    job = boardrow.row(tmp_path, boardrow.board(tmp_path / "work"), run_seconds=2)
    why = blocked(
        replace(job, config=job.config | {"timing": {"warmup": 0, "steps": 10**7}}),
        "deadline: the agent's 2 s are over",
    )
    assert why.findings[0]["phase"] == "timing"


def test_every_core_mask_has_a_number():
    names = ["auto", "0", "1", "2", "0_1", "0_1_2", "all"]
    assert [run.CORES[x] for x in names] == [0, 1, 2, 4, 3, 7, 0xFFFF]


# Observations that came from a stranger.


@pytest.fixture
def seen(ran, tmp_path):
    """What one program returned, and a function that holds changed bytes of it to what was asked for."""
    job, _ = ran
    contract = tinygraph.contract()
    with np.load(job.folder / "observations/sky.npz") as file:
        arrays = dict(file)

    def hold(data: bytes | dict[str, np.ndarray]) -> None:
        path = tmp_path / "sky.npz"
        if isinstance(data, dict):
            buffer = io.BytesIO()
            np.savez(buffer, **data)  # type: ignore[arg-type]
            data = buffer.getvalue()
        path.write_bytes(data)
        untrusted.observations(path, contract, {"isolated": range(5), "forced": range(16), "free": range(18)})

    return arrays, hold


def test_honest_observations_pass(seen):
    arrays, hold = seen
    hold(arrays)
    hold({**arrays, "forced/logits": np.full_like(arrays["forced/logits"], np.nan)})  # judged later, not refused


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("forced/logits", np.zeros((3, 5)), r"got forced/logits \[3, 5\]"),
        ("forced/logits", np.array(["x"]), "got forced/logits"),
        ("forced/tokens", np.zeros(16), "got forced/tokens"),
        ("forced/tokens", np.int64(3), "got nothing of the history forced"),
        ("forced/tokens", np.zeros(15, np.int64), "got 15 steps of the history forced, allowed: 16"),
        ("free/tokens", np.zeros(19, np.int64), "got 19 steps of the history free, allowed: 18"),
        ("forced/positions", np.zeros(3, np.int64), r"got \[3, 16\] steps in the arrays of forced"),
        ("free/positions", np.zeros(900, np.int64), "steps in the arrays of free"),
        ("isolated/tokens", np.zeros(4, np.int64), "got 4 steps of the history isolated, allowed: 5"),
        ("forced/layers.99.key", np.zeros((17, 2, 16)), "got forced/layers.99.key"),
        ("forced/more", np.zeros(17), "got forced/more"),
        ("other/tokens", np.zeros(17, np.int64), "got other/tokens"),
        ("free/diverged", np.zeros(3, np.int64), "got free/diverged"),
        ("forced/tokens", np.array([{"a": 1}] * 16, object), "with object"),
        ("forced/tokens", np.zeros(17, [("a", "i4")]), "with "),
    ],
)
def test_an_array_that_no_program_returns(seen, name, array, said):
    arrays, hold = seen
    with pytest.raises(untrusted.Bad, match=said) as why:
        hold({**arrays, name: array})
    assert "\n" not in str(why.value)


def test_replaced_states_come_at_the_positions_that_the_reference_has(seen, tmp_path):
    arrays, _ = seen
    whole, state = tinygraph.contract(), c.convolution(2, 8, 2)
    returned = c.Tensor("convolution.2.out", c.STATE, state.shape, states=(state.name,))
    contract = replace(whole, states=(*whole.states, state), outputs=(*whole.outputs, returned))
    forced = {k: v for k, v in arrays.items() if k.startswith("forced/")}
    for count in (3, 4, 2):
        np.savez(tmp_path / "x.npz", **forced, **{f"forced/{state.name}": np.zeros((count, *state.shape), np.float32)})
        if count == 3:
            untrusted.observations(tmp_path / "x.npz", contract, {"forced": range(16)}, [0, 7, 15, 90])
        else:
            with pytest.raises(untrusted.Bad, match=rf"got {count} of forced/layers.2.convolution, allowed: 3"):
                untrusted.observations(tmp_path / "x.npz", contract, {"forced": range(16)}, [0, 7, 15, 90])


def test_a_compressed_file_is_not_unpacked(seen):
    arrays, hold = seen
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    with pytest.raises(untrusted.Bad, match=r"as numpy\.savez stores them"):
        hold(buffer.getvalue())


def test_a_history_that_is_missing(seen):
    arrays, hold = seen
    with pytest.raises(untrusted.Bad, match="got nothing of the history isolated"):
        hold({k: v for k, v in arrays.items() if not k.startswith("isolated")})


def npz(name: str, data: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr(name, data)
    return buffer.getvalue()


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a zip"),
        (b"PK\x03\x04 garbage", "not a zip"),
        (npz("forced/tokens.npy", bytes(50_000_000), zipfile.ZIP_DEFLATED), "as numpy.savez stores them"),
        (npz("../../escape", b"x"), "allowed: arrays"),
        (npz("forced/tokens.npy", b"\x80\x04pickle."), "magic|another format"),
        (
            npz("a.npy", header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}\n")),
            r"\[1000000000000\] in \d\d bytes",
        ),
        (npz("a.npy", header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}\n") + bytes(4)), "with float32"),
        (npz("a.npy", header("__import__('os').system('touch escape')\n")), "malformed|header"),
        (npz("a.npy", header("(" * 5000 + "\n")), "header|nested|EOF"),
    ],
)
def test_a_file_that_is_no_observations(seen, data, said):
    with pytest.raises(untrusted.Bad, match=said):
        seen[1](data)
    assert not Path("escape").exists()
