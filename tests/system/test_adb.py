"""Rows through the real adb client: no device, and a double of the server that drops, fills its disk and lies."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boardrow
import numpy as np
import pytest
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.remote.drivers import adb
from kvgate.remote.session import Limits, Lost, Session
from kvgate.stages import run
from system import adb_double, sshd
from system.adb_double import ADB, VERSION, Double

pytestmark = [pytest.mark.system, pytest.mark.skipif(not ADB, reason="adb is not installed")]


@pytest.fixture
def row(tmp_path: Path) -> Callable[..., Job]:
    def make(double: Double, ballast: int = 0, **board: Any) -> Job:
        entry = double.board(**{"work": str(tmp_path / "work"), "python": sys.executable} | board)
        return boardrow.row(tmp_path / "results", entry, ballast)

    return make


def blocked(job: Job, match: str, again: bool) -> record.Blocked:
    with pytest.raises(record.Blocked, match=match) as caught:
        run.run(job)
    why = caught.value
    assert "\n" not in why.reason and why.facts.get("again", False) is again, why.reason
    assert not list(job.folder.glob("observations*")) and not (job.folder / ".arriving").exists()
    return why


def test_the_client_is_the_one_that_the_double_speaks_to():
    text = subprocess.run(["adb", "version"], capture_output=True, text=True).stdout
    assert f"version 1.0.{VERSION}" in text


def test_a_row_end_to_end(row, tmp_path):
    with Double() as double:
        job = row(double, ballast=3 << 20)
        body = run.run(job)
        assert run.run(job)["files"] == body["files"]
        assert record.read(job.folder / "board/session.json")["sent_bytes"] == 0
    assert not [x for x in double.asked if "kill" in x]
    here = boardrow.row(tmp_path / "here", boardrow.board(tmp_path / "there"), ballast=3 << 20)
    run.run(here)
    for name in body["files"]:
        with np.load(job.folder / name) as there, np.load(here.folder / name) as arrays:
            assert all(np.array_equal(there[x], arrays[x]) for x in arrays)


@pytest.mark.parametrize("name", ["a b", "$(touch pwned)", "'\"`touch pwned`;touch pwned"])
def test_odd_names_arrive_as_they_are(row, tmp_path, name):
    with Double() as double:
        run.run(row(double, work=str(tmp_path / "odd" / name)))
    assert (tmp_path / "odd" / name / "files").is_dir() and not Path("pwned").exists()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"state": "offline"}, "no connection: the device is offline"),
        ({"state": "unauthorized"}, "has not allowed this computer"),
        ({"features": "cmd,stat_v2"}, "the board's adbd is too old"),
        ({"serial": "another"}, "no such device .*device 'double-0001' not found"),
    ],
)
def test_a_device_that_is_not_ready(row, what, said):
    with Double(**what) as double:
        blocked(row(double, address="double-0001"), said, again=True)


@pytest.mark.parametrize("drop", [3, 30, 3000, 20_000])
def test_a_dropped_connection_is_not_an_end(row, drop):
    """adb exits with 0 then: in the marker, in the greeting, in an answer and in the observations."""
    with Double(drop=drop) as double:
        blocked(row(double), r"the connection was dropped, or the agent was killed \(adb: exit 0", again=True)


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_lies_about_exit_codes_change_nothing(row, code):
    with Double(exit=code) as double:
        assert run.run(row(double))["phase"] == "done"
        why = blocked(row(double, python="python9"), "no connection: .*python9.*not found", again=True)
        assert why.findings[0]["kind"] == "connect"
    with Double() as double:
        assert blocked(row(double, python="python9"), "no Python", again=False).findings[0]["kind"] == "python"


def test_full_disk(row, tmp_path):
    with sshd.small_disk(tmp_path / "small") as disk, Double() as double:
        why = blocked(row(double, ballast=12 << 20, work=str(disk / "kvgate")), "needs .* MiB free", again=True)
        assert why.findings[0]["kind"] == "no_space"


def test_a_dropped_transfer_goes_on(row, tmp_path):
    """The link ends as soon as the agent has answered `have`; what it took in by then does not travel again."""
    with Double() as double:
        job = row(double, ballast=4 << 20)
        asked = run.request(job)
        big = max(asked.files.values(), key=lambda x: x.stat().st_size)
        sha = record.sha256(big)
        agent = run.agent_zip.build("onnxruntime", "cpu_managed")
        with Session(job.config["board"], agent, 30, Limits()) as s:
            s.have({sha: big.stat().st_size})
            with big.open("rb") as file:
                s.link.send({"type": "put", "sha256": sha, "size": big.stat().st_size, "offset": 0}, file.read(1 << 20))
            s.have({sha: big.stat().st_size})
            s.link.kill()
        run.run(job)
        assert 3 << 20 <= record.read(job.folder / "board/session.json")["sent_bytes"] < 4 << 20


def test_a_server_that_falls_silent_meets_the_limit(tmp_path):
    """adb itself waits for ever."""
    script = tmp_path / "silent"
    script.write_text("#!/bin/sh\nexec sleep 20\n")
    script.chmod(0o755)
    with Double() as double:
        board = double.board(work=str(tmp_path), python=str(script))
        session = Session(board, b"", 30, Limits(connect=1, end=1))
        with pytest.raises(Lost, match="waited in vain for the start of Python") as why, session:
            pass
        assert why.value.kind == "timeout"


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """A port for a daemon of the test's own, which is ended: it is on no port that anybody else uses."""
    port = sshd.free_port()
    monkeypatch.setenv("HOME", str(tmp_path))  # its key is no one's
    yield port
    subprocess.run(["adb", "-P", str(port), "kill-server"], capture_output=True, timeout=20)


def test_no_device(row, private):
    """The real client starts the real server on the private port; it has no such device."""
    with Double() as double:
        job = row(double, adb_port=private)
    before = adb._server(5037)
    blocked(job, "no connection: no such device .*device 'double-0001' not found", again=True)
    assert adb._server(private) == VERSION  # it stays, as adb's servers do
    assert adb._server(5037) == before


def test_another_version_on_the_port_is_left_alone(row, monkeypatch):
    monkeypatch.setattr(adb_double, "VERSION", 40)
    with Double() as double:
        why = blocked(row(double), "got version 40, which adb 41 would end; set adb_port", again=False)
        assert why.findings[0]["kind"] == "driver"
        assert double.asked == ["host:version"]  # no host:kill


def test_without_adb(row, monkeypatch, tmp_path):
    with Double() as double:
        job = row(double)
        monkeypatch.setenv("PATH", str(tmp_path))
        blocked(job, "adb: got no such program on PATH", again=False)
