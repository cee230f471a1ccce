"""The agent over pipes: its protocol, its own end, and the zip that it is."""

import ast
import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import time
import zipfile
from pathlib import Path

import oldest
import pytest
import rig
from kvgate.board import agent, environment, wire
from kvgate.remote import agent_zip

HANG = {"4": ["hang"]}
LIMITS = {"load": 60, "step": 60}


@pytest.fixture
def work(tmp_path):
    return tmp_path / "work"


@pytest.fixture
def remote(work):
    with rig.agent(work, rig.double()) as remote:
        yield remote


def child_of(remote: rig.Remote) -> int:
    """The process id of the agent's child, once it hangs in the fourth step."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        head = remote.receive()
        if head["type"] == "progress" and head["text"] == "chat forced 1/1":
            path = Path(f"/proc/{remote.process.pid}/task/{remote.process.pid}/children")
            return int(path.read_text().split()[0])
    raise AssertionError("no child")


# Frames


def test_hello(remote, work):
    head = remote.hello()
    assert head["type"] == "hello" and head["version"] == 2 and head["pid"] == remote.process.pid
    assert head["free_bytes"] > 0 and head["memory_bytes"] > 0 and head["machine"] == os.uname().machine
    assert head["environment"]["kernel"] and head["environment"]["why"]
    assert list(head["engines"]) == ["onnxruntime"]  # what is inside this zip
    assert work.stat().st_mode & 0o777 == 0o700
    remote.send("bye")
    assert remote.process.wait(10) == 0


@pytest.mark.parametrize(
    ("frame", "kind", "text"),
    [
        ({"type": "hello", "version": 1, "deadline": 9}, "protocol", "hello: ValueError: version: got 1, allowed: 2"),
        ({"type": "hello", "version": 2}, "protocol", "hello: KeyError: 'deadline'"),
        ({"type": "format"}, "protocol", "type: got 'format'"),
        ({"type": "have", "files": {"../x": 1}}, "io", "sha256: got '../x', allowed: 64 hex digits"),
        ({"type": "have", "files": 7}, "protocol", "have: AttributeError"),
        ({"type": "put", "sha256": "0" * 64, "size": "x", "offset": 0}, "protocol", "put: ValueError"),
        ({"type": "put", "sha256": "0" * 64, "size": 1, "offset": 7}, "io", "offset: got 7 + 0 bytes"),
        ({"type": "run"}, "protocol", "run: KeyError: 'job'"),
        ({"type": "run", "job": {"files": {"x": "0" * 64}}}, "io", "x: got no file 000"),
        ({"type": "run", "job": {"files": {"../x": "0" * 64}}}, "io", "file name: got '../x'"),
        ({"type": "run", "job": {"files": {}}}, "protocol", "run: KeyError: 'engine'"),
    ],
)
def test_a_frame_that_is_not_understood_ends_nothing(remote, work, frame, kind, text):
    remote.hello()
    answer = remote.ask(frame.pop("type"), **frame)
    assert answer["type"] == "error" and answer["kind"] == kind and answer["text"].startswith(text)
    assert remote.hello()["type"] == "hello" and not list(work.glob("jobs/*"))


def test_garbage_ends_the_agent(remote):
    remote.hello()
    remote.process.stdin.write(b"GET / HTTP/1.1\r\n")
    remote.process.stdin.flush()
    assert remote.receive()["kind"] == "protocol"
    assert remote.process.wait(10) == 5


def test_files_travel_once(remote, work):
    data = os.urandom(3000)
    sha = hashlib.sha256(data).hexdigest()
    remote.hello()
    remote.send("put", data[:1000], sha256=sha, size=3000, offset=0)
    assert remote.ask("have", files={sha: 3000}) == {"type": "have", "present": [], "partial": {sha: 1000}}
    assert remote.ask("put", data[1000:], sha256=sha, size=3000, offset=1000)["ok"]
    assert remote.ask("have", files={sha: 3000})["present"] == [sha]
    answer = remote.ask("put", b"other", sha256=sha, size=5, offset=0)
    assert answer["kind"] == "checksum" and answer["sha256"] == sha


def test_the_rest_of_a_file_that_failed_is_dropped(remote):
    remote.hello()
    sha = "0" * 64
    answer = remote.ask("put", b"x", sha256=sha, size=1 << 60, offset=0)
    assert answer["kind"] == "no_space" and "needs 1099511627776.0 MiB" in answer["text"]
    for offset in range(1, 4):
        remote.send("put", b"x", sha256=sha, size=1 << 60, offset=offset)
    assert remote.hello()["type"] == "hello"


def test_no_permission(work, monkeypatch):
    """A WORK that is a file."""
    work.write_text("")
    with rig.agent(work, rig.double()) as remote:
        assert remote.receive()["type"] == "error"
        assert remote.process.wait(10) == 4


def test_usage(tmp_path):
    (tmp_path / "a.pyz").write_bytes(rig.double())
    found = subprocess.run([shutil.which("python3") or "", tmp_path / "a.pyz"], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (2, "", "usage: agent.pyz WORK\n")


# The agent's end


def test_a_closed_channel(remote, work):
    remote.hello()
    remote.start(rig.job(HANG, seconds=LIMITS), rig.files())
    child = child_of(remote)
    remote.process.stdin.close()
    assert remote.process.wait(10) == 3 and rig.ends(child, 0.5)
    assert not list(work.glob("jobs/*"))


def test_the_deadline(remote, work):
    """The last message says how far the child was; nobody has to ask."""
    remote.hello(deadline=60)
    for name, data in rig.files().items():
        assert name and remote.put(data)
    remote.hello(deadline=2.5)
    remote.start(rig.job(HANG, seconds=LIMITS), rig.files())
    child = child_of(remote)
    status = remote.done()
    assert not status["ok"] and status["signal"] == "SIGKILL"
    assert status["reason"] == "deadline: the agent's 2.5 s are over in chat forced, step 1"
    assert status["findings"][0]["kind"] == "deadline" and status["environment"]["after"]
    assert remote.process.wait(10) == 4 and rig.ends(child, 0.5)
    assert not list(work.glob("jobs/*"))


def test_the_deadline_without_a_job(remote):
    remote.hello(deadline=0.3)
    assert remote.receive() == {"type": "error", "kind": "ended", "text": "deadline: the agent's 0.3 s are over"}
    assert remote.process.wait(10) == 4


def test_the_deadline_while_nobody_reads(remote):
    """A dead link: the pipe is full and stays so."""
    remote.hello(deadline=1)
    with contextlib.suppress(wire.Closed):
        for _ in range(2000):
            remote.send("hello", version=3, text="x" * 100)
    assert remote.process.wait(15) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal(remote, number):
    remote.hello()
    remote.start(rig.job(HANG, seconds=LIMITS), rig.files())
    child = child_of(remote)
    remote.process.send_signal(number)
    assert remote.done()["reason"] == f"the agent was ended by {number.name} in chat forced, step 1"
    assert remote.process.wait(10) == 4 and rig.ends(child, 0.5)


def test_a_killed_agent_leaves_no_child_and_the_next_one_cleans_up(work):
    with rig.agent(work, rig.double()) as first:
        first.hello()
        first.start(rig.job(HANG, seconds=LIMITS), rig.files())
        child = child_of(first)
        first.process.kill()
        assert rig.ends(child)
    assert list(work.glob("jobs/*"))
    with rig.agent(work, rig.double()) as second:
        second.hello()
        assert not list(work.glob("jobs/*"))
        assert second.run(rig.job(), rig.files())["ok"]


def test_of_two_agents_the_newer_one_stays(work):
    """The older one's client is gone without its knowing, as after a dead link."""
    with rig.agent(work, rig.double()) as old:
        old.hello()
        old.start(rig.job(HANG, seconds=LIMITS), rig.files())
        child = child_of(old)
        with rig.agent(work, rig.double()) as new:
            assert new.hello()["type"] == "hello"
            assert rig.ends(child, 0.5)
            assert old.done()["reason"].startswith("the agent was ended by SIGTERM in chat forced")
            assert new.run(rig.job(), rig.files())["ok"]


def test_two_work_folders_are_two_agents(tmp_path):
    with rig.agent(tmp_path / "a", rig.double()) as one, rig.agent(tmp_path / "b", rig.double()) as other:
        one.hello(), other.hello()
        assert one.hello()["type"] == "hello"


def test_a_lock_that_names_a_stranger_kills_nobody(tmp_path):
    with subprocess.Popen(["sleep", "100"]) as stranger, (tmp_path / "lock").open("w+") as file:
        file.write(str(stranger.pid))
        assert not agent._ask_to_end(file, tmp_path) or stranger.poll() is None
        time.sleep(0.1)
        assert stranger.poll() is None
        stranger.kill()


def test_clocks_of_a_killed_agent_are_given_back_at_the_start(work, tmp_path):
    """Over pipes, on a double of a board."""
    root = rig.tree(tmp_path / "root")
    before = rig.governors(root)
    work.mkdir()
    environment.Clocks(work / "clocks.json", root).pin()
    mine, theirs = os.pipe(), os.pipe()
    outlet = os.fdopen(theirs[1], "wb")
    with os.fdopen(mine[1], "wb") as stdin, os.fdopen(theirs[0], "rb") as stdout:
        wire.send(stdin, {"type": "bye"})
        old = {x: signal.getsignal(x) for x in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
        try:
            assert agent.Agent(work, agent.Inlet(mine[0]), outlet, [], root).serve() == 0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in old.items():
                signal.signal(number, handler)
        outlet.close()
        assert stdout.read() == b""
    os.close(mine[0])
    assert rig.governors(root) == before and not (work / "clocks.json").exists()


# Its cost


def test_10_000_steps_leave_the_agent_as_it_was(remote):
    """Its memory stays, and so does the child's; agent and child together take far less than 2 % of a 50 ms step."""

    def memory() -> int:
        status = Path(f"/proc/{remote.process.pid}/status").read_text()
        return int(next(x.split()[1] for x in status.splitlines() if x.startswith("VmRSS:")))

    remote.hello(120)
    noisy = {"every": ["W RKNN: a warning in every step, as the lite package gives them"]}
    short = remote.run(rig.job(noisy, timing={"warmup": 0, "steps": 1000}), rig.files())
    before, begin = memory(), time.monotonic()
    long = remote.run(rig.job(noisy, timing={"warmup": 0, "steps": 10_000}), rig.files())
    seconds = time.monotonic() - begin
    assert long["ok"] and long["ledger"]["steps"] == 10_000
    assert memory() - before < 512  # KiB
    assert long["ledger"]["peak_rss_bytes"] - short["ledger"]["peak_rss_bytes"] < 8 << 20
    assert seconds / 10_000 < 0.02 * 0.050


# The zip


def test_the_zip_is_the_same_for_the_same_sources():
    first = agent_zip.build("onnxruntime", "dynamic_concat")
    agent_zip.build.cache_clear()
    assert agent_zip.build("onnxruntime", "dynamic_concat") == first
    assert agent_zip.build("lite", "dynamic_concat") != first


@pytest.mark.parametrize("engine", list(environment.ENGINES))
def test_the_zip_has_what_runs_there_and_nothing_else(engine):
    with zipfile.ZipFile(io.BytesIO(agent_zip.build(engine, "dynamic_concat"))) as file:
        names = set(file.namelist())
        sources = {name: file.read(name).decode() for name in names}
    engines = {x.replace(".", "/") + ".py" for x in environment.ENGINES.values()}
    assert names & engines == {environment.ENGINES[engine].replace(".", "/") + ".py"}
    # dynamic_concat's host half is made from cpu_managed's
    assert {"kvgate/strategies/dynamic_concat/host.py", "kvgate/strategies/cpu_managed/host.py"} <= names
    assert not [x for x in names if "compiler" in x or "stages" in x or "graph" in x]
    assert {"__main__.py", "kvgate/__init__.py", "kvgate/strategies/dynamic_concat/__init__.py"} <= names
    for name, text in sources.items():
        assert newer_than_3_9(text) == [], name


def test_the_zip_without_a_strategy():
    with zipfile.ZipFile(io.BytesIO(agent_zip.build("lite", ""))) as file:
        assert [x for x in file.namelist() if x.endswith("/host.py")] == ["kvgate/strategies/host.py"]


@pytest.mark.parametrize(
    ("engine", "strategy", "text"),
    [
        ("gpu", "cpu_managed", "engine: got 'gpu', known: lite, native, onnxruntime"),
        ("lite", "none", r"module: got 'kvgate\.strategies\.none\.host', which is not in the package"),
    ],
)
def test_no_such_zip(engine, strategy, text):
    with pytest.raises(ValueError, match=text):
        agent_zip.build(engine, strategy)


def newer_than_3_9(text: str) -> list[str]:
    """What Python 3.9 would refuse, at parsing or when it runs: annotations are never evaluated in these files."""
    try:
        tree = ast.parse(text, feature_version=(3, 9))
    except SyntaxError as error:
        return [str(error)]
    hints: set[ast.AST] = set()
    future = any(isinstance(x, ast.ImportFrom) and x.module == "__future__" for x in tree.body)
    for node in ast.walk(tree):
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            hints |= set(ast.walk(hint)) if hint and future else set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and node not in hints:
            sides = [x for x in (node.left, node.right) if isinstance(x, (ast.Constant, ast.Name))]
            if any(getattr(x, "id", "") in dir(__builtins__) or getattr(x, "value", "") is None for x in sides):
                found.append(f"line {node.lineno}: X | Y")
        if isinstance(node, ast.Call):
            name, keywords = getattr(node.func, "id", getattr(node.func, "attr", "")), [x.arg for x in node.keywords]
            later = {"zip": ["strict"], "dataclass": ["slots", "kw_only"], "Popen": ["process_group"]}.get(name, [])
            found += [f"line {node.lineno}: {name}({x}=)" for x in keywords if x in later]
            if name in ("file_digest", "hardlink_to", "walk_packages", "pairwise", "bit_count"):
                found.append(f"line {node.lineno}: {name}")
    return found


def test_newer_python_is_seen():
    future = "from __future__ import annotations\n"
    assert newer_than_3_9(future + "def f(x: int | None): ...\nX = {} | {}\n") == []
    assert newer_than_3_9("def f(x: int | None): ...") == ["line 1: X | Y"]
    assert newer_than_3_9(future + "X = int | None") == ["line 2: X | Y"]
    assert newer_than_3_9("zip(a, strict=True)") == ["line 1: zip(strict=)"]
    assert newer_than_3_9("hashlib.file_digest(x)") == ["line 1: file_digest"]
    assert newer_than_3_9("match x:\n case 1: pass") != []


def test_a_real_python_3_9_takes_it(tmp_path):
    python = oldest.found()
    if python is None:
        pytest.skip("no Python 3.9 here; the same with Debian's: make test-system")
    oldest.takes(python, tmp_path)


def test_json_of_a_status_has_no_surprises(remote):
    remote.hello()
    json.dumps(remote.run(rig.job(), rig.files()), allow_nan=False)
