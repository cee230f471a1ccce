"""One job: what is refused, how a child's end is explained, and what is put back whatever happens."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import rig
from kvgate.board import environment, files, jobs, wire

CUSTOM = '{"kvgate":"00"}'
# A child in a line: what it does before its result, in the job's folder.
CHILD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
os.chdir(sys.argv[1])
sys.path.insert(0, os.environ["KVGATE_TEST_PATH"])
from kvgate.board.marker import Marker
marker, root = Marker(Path("marker")), Path(os.environ["KVGATE_TEST_ROOT"])
def result(**fields):
    Path("result.json").write_text(json.dumps({"ok": True, "phase": "done", "reason": "", "findings": [], **fields}))
exec(os.environ["KVGATE_TEST_DOES"])
"""


class Silent:
    """A host that says nothing."""

    def __init__(self) -> None:
        self.descriptor, self.other = os.pipe()

    def fileno(self) -> int:
        return self.descriptor

    def read(self, size: int) -> bytes:
        return os.read(self.descriptor, size)


class Board:
    """A double of a board, and a job for it that would run."""

    def __init__(self, folder: Path) -> None:
        self.root = rig.tree(folder / "root")
        self.store = files.Store(folder / "files")
        self.clocks = environment.Clocks(folder / "clocks.json", self.root)
        self.folder, self.host = folder, Silent()
        identity = {"graph": rig.CONTRACT.digest, "platform": "rk3576", "toolkit": "2.5.0"}
        self.files = {
            "contract.json": rig.CONTRACT.to_json(),
            "artifact.json": json.dumps({"identity": identity, "custom_string": CUSTOM}),
            "model.rknn": f"RKNN {CUSTOM} the rest",
        }
        self.job = rig.job(engine="lite", custom_string=CUSTOM, seconds={"load": 20, "step": 20})

    def run(self, does: str = "result()") -> dict:
        os.environ |= {
            "KVGATE_TEST_PATH": str(Path(jobs.__file__).parents[2]),
            "KVGATE_TEST_ROOT": str(self.root),
            "KVGATE_TEST_DOES": does,
        }
        command = [sys.executable, "-c", CHILD]
        work = jobs.Work(self.folder / "jobs", self.store, self.clocks, command, self.root)
        self.job["files"] = {name: self._put(text.encode()) for name, text in self.files.items()}
        self.progress: list[tuple[str, str]] = []
        with work.folder_of(self.job) as folder:
            self.job_folder = folder
            status: dict = work.run(self.job, folder, self.host, lambda *said: self.progress.append(said))
        return json.loads(json.dumps(status))

    def _put(self, data: bytes) -> str:
        import hashlib

        sha = hashlib.sha256(data).hexdigest()
        self.store.put(sha, len(data), 0, data)
        return sha

    def edit(self, name: str, **fields: object) -> None:
        """Change an artifact's identity or another part of a JSON file."""
        body = json.loads(self.files[name])
        part = body["identity"] if "identity" in body and fields.keys() <= body["identity"].keys() else body
        part.update(fields)
        self.files[name] = json.dumps(body)


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path)


def kinds(status: dict) -> list[str]:
    return [x["kind"] for x in status["findings"]]


def test_a_job_that_runs(board):
    board.job["clocks"] = "pin"
    (board.root / "usr/lib/librknnrt.so").write_text("librknnrt version: 2.5.0 (x)")
    status = board.run(
        "opened = {'versions': {'runtime': '2.5.1', 'driver': '0.9.9'}, 'core_mask': 3}\n"
        "Path('opened.json').write_text(json.dumps(opened))\n"
        "Path('observations').mkdir(); Path('observations/chat.npz').write_bytes(b'x')\n"
        "result(ledger={'total_us': 1.0})"
    )
    assert status["ok"] and status["phase"] == "done" and status["findings"] == [] and status["exit"] == 0
    assert status["versions"] == {
        "runtime": "2.5.1",
        "driver": "0.9.9",
        "toolkit": "2.5.0",
        "toolkit_lite": None,
        "numpy": status["versions"]["numpy"],
        "python": status["versions"]["python"],
    }
    assert status["core_mask"] == 3 and status["ledger"] == {"total_us": 1.0}
    assert list(status["files"]) == ["observations/chat.npz"]
    before, after = status["environment"]["before"], status["environment"]["after"]
    assert before["board"] and after["temperatures"] == before["temperatures"]
    assert not board.job_folder.exists()


# Refusals: before a child is started (this one would say so)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda b: b.job.update(engine="gpu"), "engine_missing", "engine: got 'gpu', not in this agent"),
        (lambda b: b.job.update(contract_digest="0"), "contract", "contract: got digest"),
        (lambda b: b.files.update({"contract.json": "{}"}), "contract", "contract.json: contract version: got None"),
        (lambda b: b.files.update({"contract.json": "["}), "contract", "contract.json: "),
        (lambda b: b.files.pop("contract.json"), "contract", "contract.json: "),
        (lambda b: b.edit("contract.json", more=1), "contract", "contract.json: "),
        (lambda b: b.job.update(platform="rk3588"), "platform", "board: got rockchip,rk3576-evb1-v10, rockchip,rk3576"),
        (
            lambda b: (b.root / "proc/device-tree/compatible").unlink(),
            "platform",
            "board: got " + "{root}/proc/device-tree/compatible: No such file or directory, allowed: rockchip,rk3576",
        ),
        (lambda b: b.edit("artifact.json", graph="0"), "contract", "artifact's graph: got '0'"),
        (lambda b: b.edit("artifact.json", platform="rk3588"), "platform", "artifact's platform: got 'rk3588'"),
        (lambda b: b.edit("artifact.json", custom_string="x"), "contract", "artifact's custom string: got 'x'"),
        (lambda b: b.files.update({"model.rknn": "RKNN"}), "contract", "model.rknn: has no custom string"),
        (lambda b: b.files.update({"model.rknn": ""}), "contract", "model.rknn: has no custom string"),
        (lambda b: b.files.pop("artifact.json"), "contract", "artifact.json: FileNotFoundError"),
        (lambda b: b.files.update({"artifact.json": "[]"}), "contract", "artifact.json: TypeError"),
        (
            lambda b: b.job.update(memory_bytes=7000 << 20),
            "memory",
            "memory: needs 7000 MiB, 5859 MiB available",
        ),
    ],
)
def test_refused_before_anything_is_loaded(board, change, kind, text):
    change(board)
    board.job["clocks"] = "pin"
    before = rig.governors(board.root)
    status = board.run("raise SystemExit('started')")
    assert not status["ok"] and status["phase"] == "check" and status["exit"] is None
    assert status["reason"].startswith(text.replace("{root}", str(board.root)))
    assert status["findings"][0] == {"kind": kind, "text": status["reason"], "phase": "check"}
    assert rig.governors(board.root) == before and status["environment"]["before"]["kernel"] == "6.1.75"


def test_a_strategy_that_this_agent_does_not_have(board):
    import standin
    from kvgate import contract as c

    for name in ("of_tomorrow", "../x", ""):
        contract = standin.contract(name, c.Cache(4))
        board.files["contract.json"], board.job["contract_digest"] = contract.to_json(), contract.digest
        board.edit("artifact.json", graph=contract.digest)
        assert board.run()["reason"] == f"strategy: got {name!r}, not in this agent"


def test_onnxruntime_needs_no_board(board):
    (board.root / "proc/device-tree/compatible").unlink()
    board.job["engine"] = "onnxruntime"
    del board.files["artifact.json"], board.files["model.rknn"]
    assert board.run()["ok"]


@pytest.mark.parametrize("name", ["../x", "/x", ".x", "marker", "result.json"])
def test_a_hostile_file_name(board, name):
    board.files[name] = "x"
    with pytest.raises(files.FileError, match="file name"):
        board.run()
    assert list((board.folder / "jobs").iterdir()) == []


# How a child ends


@pytest.mark.parametrize(
    ("does", "kind", "text", "step"),
    [
        ("marker.set('init'); os.kill(os.getpid(), signal.SIGSEGV)", "segfault", "segmentation fault in init", None),
        (
            "marker.set('chat forced 5/9'); os.kill(os.getpid(), signal.SIGSEGV)",
            "segfault",
            "segmentation fault in chat forced, step 5",
            5,
        ),
        ("os.kill(os.getpid(), signal.SIGABRT)", "signal", "the child was ended by SIGABRT in start", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal", "the child was ended by SIGKILL in start", None),
        (
            "root.joinpath('proc/vmstat').write_text('oom_kill 5'); os.kill(os.getpid(), signal.SIGKILL)",
            "oom_killed",
            "killed by the kernel for lack of memory in start",
            None,
        ),
        ("marker.set('load'); os._exit(3)", "exit", "the child ended with code 3 in load", None),
        ("os._exit(0)", "exit", "the child ended without a result in start", None),
        ("Path('result.json').write_text('{')", "exit", "the child ended without a result in start", None),
    ],
)
def test_an_end_without_a_result(board, does, kind, text, step):
    status = board.run(does)
    finding = status["findings"][0]
    assert not status["ok"] and (finding["kind"], status["reason"], finding.get("step")) == (kind, text, step)
    assert status["phase"] == finding["phase"] and finding["text"] == text


@pytest.mark.parametrize(("place", "limits"), [("load", (0.4, 60)), ("chat free 2/9", (60, 0.4))])
def test_a_hang(board, place, limits):
    board.job["seconds"] = dict(zip(("load", "step"), limits, strict=True))
    begin = time.monotonic()
    status = board.run(f"marker.set('{place}'); time.sleep(100)")
    assert time.monotonic() - begin < 10
    assert status["reason"].startswith("no sign of life for 0.4 s in ") and status["signal"] == "SIGKILL"
    assert kinds(status)[0] == "hang" and board.progress[-1][1] in (place, "start")


def test_slow_is_not_hung(board):
    board.job["seconds"] = {"load": 20, "step": 1.0}
    assert board.run("for n in range(8):\n marker.set('x 1/8'); time.sleep(0.2)\nresult()")["ok"]


def test_a_death_after_the_result_loses_nothing(board):
    status = board.run("result(); marker.set('close'); os.kill(os.getpid(), signal.SIGSEGV)")
    assert status["ok"] and status["signal"] == "SIGSEGV"
    assert status["findings"][0] == {"kind": "segfault", "text": "segmentation fault in close", "phase": "close"}


def test_what_was_said_and_found_before_a_death_is_told(board):
    opened = "Path('opened.json').write_text(json.dumps({'findings': [{'kind': 'core_mask', 'text': 'x'}]}));"
    status = board.run(opened + "os.write(2, b'E RKNN: failed to submit!, op id: 3\\n'); os.kill(os.getpid(), 11)")
    assert kinds(status)[:3] == ["segfault", "failed_to_submit", "core_mask"]
    assert status["stderr_tail"] == "E RKNN: failed to submit!, op id: 3\n"


def test_versions_that_do_not_match_are_told_also_of_a_dead_child(board):
    (board.root / "sys/kernel/debug/rknpu/version").write_text("v0.8.2")
    status = board.run("os.kill(os.getpid(), signal.SIGSEGV)")
    assert [x["text"] for x in status["findings"] if x["kind"] == "version_mismatch"] == [
        "runtime: got version 2.3.2, the artifact's toolkit: 2.5.0",
        "driver: got version 0.8.2, allowed: 0.9.8 and newer",
    ]


def test_what_the_child_started_is_ended_with_it(board):
    status = board.run("print(subprocess.Popen(['sleep', '100']).pid, file=sys.stderr, flush=True); result()")
    assert status["ok"]
    assert rig.ends(int(status["stderr_tail"]))


# What is put back


@pytest.mark.parametrize("end", ["result()", "os.kill(os.getpid(), signal.SIGSEGV)", "time.sleep(100)"])
def test_clocks_are_pinned_for_the_child_and_put_back(board, end):
    board.job |= {"clocks": "pin", "seconds": {"load": 1, "step": 1}}
    before = rig.governors(board.root)
    status = board.run(f"print(root.joinpath('sys/class/devfreq/dmc/governor').read_text(), file=sys.stderr); {end}")
    assert status["stderr_tail"].strip() == "performance"
    assert status["environment"]["before"]["clock_state"].startswith("npu=performance@1000 ")
    assert status["environment"]["after"]["clock_state"].startswith("npu=performance@1000 ")
    assert rig.governors(board.root) == before and "clocks" not in kinds(status)


def test_clocks_are_only_recorded_unless_asked_for(board):
    status = board.run("print(root.joinpath('sys/class/devfreq/dmc/governor').read_text(), file=sys.stderr); result()")
    assert status["stderr_tail"].strip() == "dmc_ondemand"


def test_without_permission_the_row_runs_and_says_so(board, monkeypatch):
    write = Path.write_text

    def closed(path: Path, text: str, **how: str) -> int:
        if path.name.endswith("governor"):
            raise PermissionError(13, "Permission denied")
        return write(path, text, **how)

    monkeypatch.setattr(Path, "write_text", closed)
    board.job["clocks"] = "pin"
    status = board.run()
    assert status["ok"] and kinds(status).count("clocks") == 3


def test_clocks_that_could_not_be_put_back_are_told(board, monkeypatch):
    monkeypatch.setattr(board.clocks, "restore", lambda: ["npu: stays pinned"])
    assert {"kind": "clocks", "text": "npu: stays pinned"} in board.run()["findings"]


def test_a_host_that_is_gone(board):
    """The child is dead and the clocks are back before anyone hears of it."""
    board.job["clocks"] = "pin"
    before = rig.governors(board.root)
    os.close(board.host.other)
    with pytest.raises(wire.Closed):
        board.run("root.joinpath('pid').write_text(str(os.getpid())); time.sleep(100)")
    assert rig.governors(board.root) == before and not board.job_folder.exists()
    pid = board.root / "pid"
    assert not pid.exists() or rig.ends(int(pid.read_text()))
