"""The host's half of a conversation, against agents that a test writes: all that a stranger may answer.

A board here is `driver: local` with a script in the place of its Python: it gets the words of the boot, and plays.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kvgate.remote.link import BOOT, WORD
from kvgate.remote.session import Limits, Lost, Refused, Session

WORKFLOW = Path(__file__).parents[2] / "workflow"
AGENT = b"the agent"
PRELUDE = f"""#!{sys.executable}
import json, os, signal, struct, sys, time
sys.path.insert(0, {str(WORKFLOW)!r})
from kvgate.board import wire
IN, OUT = sys.stdin.buffer, sys.stdout.buffer
STATUS = dict(ok=True, phase="end", reason="", findings=[], exit=0, signal=None, ledger=dict(total_us=5.0),
              environment={{}}, versions={{}}, files={{}}, stderr_tail="")
def raw(data):
    OUT.write(data)
    OUT.flush()
def say(type, blob=b"", **more):
    wire.send(OUT, dict(type=type, **more), blob)
def get():
    return wire.receive(IN)
def begin(**more):
    raw(b"\\nKVGATE {hashlib.sha256(AGENT).hexdigest()} have\\n")
    get()
    say("hello", **dict(dict(version=2, python="3.9.2", machine="aarch64", pid=1, free_bytes=10**9,
                             memory_bytes=10**9, environment={{}}, engines={{}}), **more))
def file(name, data=b"data", size=None, offset=0):
    say("file", data, name=name, size=len(data) if size is None else size, offset=offset)
def done(**change):
    say("done", status=dict(STATUS, **change))
    IN.read()
"""
DATA = hashlib.sha256(b"data").hexdigest()
FAST = Limits(connect=5, answer=0.5, chunk=2, end=2)
JOB = {"parts": {}, "programs": {"sky": {}}, "seconds": {"step": 0.5}}
SKY = f"file('observations/sky.npz'); done(files={{'observations/sky.npz': '{DATA}'}})"


@pytest.fixture
def session(tmp_path):
    """A session with an agent that does what the text says."""

    def make(text: str, limits: Limits = FAST, deadline: float = 20) -> Session:
        script = tmp_path / "python"
        script.write_text(PRELUDE + text)
        script.chmod(0o755)
        board = {"driver": "local", "address": "", "python": str(script), "work": str(tmp_path / "work")}
        return Session(board, AGENT, deadline, limits)

    return make


def run(session: Session, folder: Path, **more: Any) -> dict[str, Any]:
    with session as s:
        return s.run(JOB, folder, **more)


def test_a_job(session, tmp_path):
    said: list[str] = []
    body = run(
        session(f"begin(); get(); say('progress', phase='load', text=''); {SKY}"), tmp_path, progress=said.append
    )
    assert body["ok"] and body["ledger"] == {"total_us": 5.0} and said == ["load"]
    assert body["files"] == {"observations/sky.npz": DATA}
    assert (tmp_path / "observations/sky.npz").read_bytes() == b"data"


def test_another_part_s_observations_are_part_of_the_answer(session, tmp_path):
    job = JOB | {"parts": {"prefill": {}}}
    with (
        session(f"begin(); get(); {SKY}") as s,
        pytest.raises(Refused, match=r"observations/prefill/sky.npz: got nothing"),
    ):
        s.run(job, tmp_path)
    files = {f"observations/{x}.npz": DATA for x in ("sky", "prefill/sky")}
    both = f"file('observations/sky.npz'); file('observations/prefill/sky.npz'); done(files={files})"
    with session(f"begin(); get(); {both}") as s:
        s.run(job, tmp_path)
    assert (tmp_path / "observations/prefill/sky.npz").read_bytes() == b"data"


def test_a_flood_on_stderr_is_not_kept(session, tmp_path):
    agent = session(f"begin(); get(); [sys.stderr.write('x' * 999 + chr(10)) for _ in range(20_000)]; {SKY}")
    assert run(agent, tmp_path)["ok"] and len(agent.link._stderr) <= 1 << 14


def test_a_login_may_print_before_the_marker(session):
    with session("raw(b'Welcome!\\n' * 3000 + b'no newline'); begin(); IN.read()") as s:
        assert s.hello["machine"] == "aarch64"


@pytest.mark.parametrize("greeting", ["KVGATE have a nice day", "KVGATE need", "KVGATE is this board's name"])
def test_a_greeting_is_not_the_agent_s_word(session, greeting):
    with session(f"raw(b{greeting!r} + b'\\n'); begin(); IN.read()") as s:
        assert s.hello["machine"] == "aarch64"


def test_a_login_that_never_ends_is_left(session):
    with pytest.raises(Lost, match="64 KiB that are no answer"), session("raw(b'x' * 200_000); IN.read()"):
        pass


# What a stranger answers to `run`, and the line that comes of it.
HOSTILE = {
    "file('../../escape.npz')": "file name: got",
    "file('/tmp/escape.npz')": "file name: got",
    "file('observations/../../escape.npz')": "file name: got",
    "file('observations/sky.npz\\n')": "file name: got",
    "file('a;$(touch escape).npz')": "file name: got",
    "file('verdict.py')": "file name: got",
    "file('observations/other.npz')": "observations of no program of this job",
    "file('observations/prefill/sky.npz')": "observations of no program of this job",
    "file('observations/../sky.npz')": "file name: got",
    "file('prefill/sky.npz')": "file name: got",
    "[file(f'more{n}.txt') for n in range(9)]": "more than 8 files that nobody asked for",
    "file('observations/sky.npz', size=-1)": "allowed: whole numbers",
    "file('observations/sky.npz', size=True)": "allowed: whole numbers",
    "file('observations/sky.npz', size=10**12)": "allowed: 1000",
    "file('observations/sky.npz', size=2)": "got 4 bytes at 0 of 2",
    "file('observations/sky.npz', offset=4, size=8)": "a file that has not begun",
    "file('observations/sky.npz', size=8); file('observations/sky.npz', offset=6, size=8)": "allowed: at 4 of 8",
    "file('observations/sky.npz', size=8); file('observations/sky.npz', b'', offset=4, size=8)": "got 0 bytes at 4",
    "file('observations/sky.npz', size=8); done(files={'observations/sky.npz': '0' * 64})": "got cut off",
    "file('observations/sky.npz'); file('observations/sky.npz')": "got it twice",
    "file('observations/sky.npz'); done(files={'observations/sky.npz': '0' * 64})": "got other content",
    "done()": "file observations/sky.npz: got nothing",
    f"{SKY[:-2]}, 'result.json': '{DATA}'}})": "file result.json: got nothing",
    "done(ok=1)": "got ok = 1, allowed: bool",
    "done(ok=False)": "ok = false without a reason",
    "done(findings={})": "got findings = {}, allowed: list",
    "done(findings=[dict(kind='<script>', text='')])": "got finding",
    "done(files={'x': 'y'})": "got checksum 'y'",
    "done(ledger=dict(total_us=float('nan')))": "got nan in JSON",
    "done(ledger=dict(total_us=float('inf')))": "got inf in JSON",
    "done(ledger=dict(total_us=10**4000))": "numbers below 1e18",
    "done(environment=json.loads('{\"a\":' * 20 + '1' + '}' * 20))": "more than 12 levels",
    "say('done', status=[])": "got no status",
    "say('done')": "got no status",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_answer_is_refused_and_writes_nothing(session, tmp_path, text):
    folder = tmp_path / "a" / "in"
    with pytest.raises(Refused) as why:
        run(session(f"begin(); get(); {text}; IN.read()"), folder, room=1000)
    assert why.value.kind == "answer" and HOSTILE[text] in why.value.reason and "\n" not in why.value.reason
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} <= {
        "python", "sky.npz", *(f"more{n}.txt" for n in range(8)),
    }  # fmt: skip
    assert not Path("/tmp/escape.npz").exists() and not Path("escape").exists()


GARBLED = {
    "raw(b'\\x1b[31mSegmentation fault' + b' ' * 100)": r"no frame: got .*Segment",
    "raw(struct.pack('>4sII', b'KVG1', 1 << 31, 0) + b' ' * 100)": "no frame",
    "raw(struct.pack('>4sII', b'KVG1', 2, 1 << 31) + b'{}')": "no frame",
    "raw(struct.pack('>4sII', b'KVG1', 2, 0) + b'[]')": "JSON object with a type",
    "raw(struct.pack('>4sII', b'KVG1', 9, 0) + b'{\"type\":1}')": "no frame|JSON object|ended",
    "t = b'[' * 100_000; raw(struct.pack('>4sII', b'KVG1', len(t), 0) + t)": "no frame",
    "say('present')": "frame: got 'present', allowed: progress, file or done",
    "say('hello\\x1b\\n' * 50)": "frame: got",
}


@pytest.mark.parametrize("text", GARBLED)
def test_garbage_is_no_answer(session, tmp_path, text):
    with pytest.raises(Lost, match=GARBLED[text]) as why:
        run(session(f"begin(); get(); {text}; OUT.close(); IN.read()"), tmp_path)
    assert "\n" not in why.value.reason and "\x1b" not in why.value.reason and len(why.value.reason) < 400


def test_what_is_printed_cannot_move_the_terminal(session, tmp_path):
    said: list[str] = []
    text = f"begin(); get(); say('progress', phase='x', text='\\x1b]0;x\\x07load\\n' + 'y\\r' * 900); {SKY}"
    run(session(text), tmp_path, progress=said.append)
    assert said[0].isprintable() and len(said[0]) == 100


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("sys.exit(1)", "connect", "no connection: the agent: exit 1 without a word"),
        ("sys.stderr.write('a\\nImportError: b\\n'); sys.exit(1)", "connect", "exit 1, ImportError: b"),
        ("begin(); get(); sys.exit(0)", "lost", "before the agent's last message: the agent: exit 0"),
        (
            "begin(); get(); say('progress', phase='sky', text='sky forced 3/9'); os.kill(os.getpid(), signal.SIGSEGV)",
            "lost",
            "lost at sky forced 3/9 before the agent's last message: the agent: killed by SIGSEGV",
        ),
        ("begin(); get(); raw(b'KVG1'); os._exit(0)", "lost", "lost at the start of the job"),
        ("time.sleep(60)", "timeout", "waited in vain for the start of Python on the board within"),
        ("begin(); get(); time.sleep(60)", "timeout", "waited in vain for a sign of the running job within 1 s"),
        ("begin(); get(); raw(b'KVG1'); time.sleep(60)", "timeout", "waited in vain for a sign"),
    ],
)
def test_an_end_without_a_last_message_is_a_loss(session, tmp_path, text, kind, said):
    with pytest.raises(Lost) as why:
        run(session(text, Limits(connect=1, answer=0.5, chunk=2, end=2)), tmp_path)
    assert (why.value.kind, said in why.value.reason) == (kind, True), why.value.reason


def test_a_board_that_chatters_for_ever_meets_the_deadline(session, tmp_path):
    said: list[str] = []
    talk = "begin(); get()\nwhile True: say('progress', phase='x', text='')"
    started = time.monotonic()
    with pytest.raises(Lost, match="waited in vain"):
        run(session(talk, deadline=1), tmp_path, progress=said.append)
    assert time.monotonic() - started < 4 and 2 <= len(said) <= 12


def test_after_the_end_nothing_is_asked(session):
    """Also where the answer is there before any timer could fire."""
    with session("begin(); get(); say('have', present=[], partial={}); time.sleep(60)") as s:
        s.link._end = time.monotonic()
        with pytest.raises(Lost, match="waited in vain for the end"):
            s.have({})


def test_an_agent_that_reads_nothing_meets_the_limit(session, tmp_path):
    (tmp_path / "big").write_bytes(bytes(4 << 20))
    limits = Limits(connect=5, answer=0.5, chunk=0.5, end=2)
    with pytest.raises(Lost, match="room for a frame") as why, session("begin(); time.sleep(60)", limits) as s:
        s.put(tmp_path / "big", "0" * 64)
    assert why.value.kind == "timeout"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("present=['0' * 64], partial={}", "files that nobody asked for"),
        ("present=[[]], partial={}", "files that nobody asked for"),
        ("present=[], partial={A: -1}", "no numbers of bytes"),
        ("present=[], partial={A: 0.5}", "no numbers of bytes"),
        ("present='all', partial={}", "no lists"),
    ],
)
def test_have_is_held_to_the_question(session, answer, said):
    text = f"A = '{'a' * 64}'; begin(); get(); say('have', {answer}); IN.read()"
    with pytest.raises(Refused, match=said), session(text) as s:
        s.have({"a" * 64: 10})


# An agent that takes files as the real one does, with a disk of LIMIT bytes and KEPT bytes of an interrupted one.
TAKES = """
def chunks(want):
    got = bytearray()
    while True:
        head, blob = get()
        if head["type"] != "put":
            return head
        print("chunk", head["offset"], len(blob), file=sys.stderr)
        if len(got) + len(blob) > LIMIT:
            say("error", kind="no_space", text="No space left on device", sha256=head["sha256"])
            continue
        if head["offset"] == 0:
            got = bytearray()
        got += blob
        if head["offset"] + len(blob) == head["size"]:
            say(*ANSWERS.pop(0).split(","), **dict(sha256=head["sha256"], ok=True, kind="checksum", text="wrong"))
begin()
sha = list(get()[0]["files"])[0]
say("have", present=[], partial={sha: KEPT} if KEPT else {})
chunks(sha)
IN.read()
"""


def taking(session: Any, limit: int = 1 << 30, kept: int = 0, answers: str = "put") -> Session:
    return session(f"LIMIT, KEPT, ANSWERS = {limit}, {kept}, {answers.split()!r}\n{TAKES}")


@pytest.fixture
def big(tmp_path):
    path = tmp_path / "model.rknn"
    path.write_bytes(os.urandom(3 << 20))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_only_the_rest_of_an_interrupted_file_travels(session, big):
    with taking(session, kept=2 << 20) as s:
        s.push({big[1]: big[0]})
        assert s.sent == 1 << 20


def test_more_than_all_of_a_file_is_sent_anew(session, big):
    with taking(session, kept=9 << 20) as s:
        s.push({big[1]: big[0]})
        assert s.sent == 3 << 20


def test_a_wrong_beginning_is_sent_whole(session, big):
    with taking(session, kept=2 << 20, answers="error put") as s:
        s.push({big[1]: big[0]})
        assert s.sent == (1 << 20) + (3 << 20)


def test_a_file_that_changed_here_is_said_so(session, big):
    with taking(session, answers="error") as s:
        with pytest.raises(Refused, match=r"model\.rknn: got other content than its record says") as why:
            s.push({"f" * 64: big[0]})
        assert why.value.kind == "changed"


def test_a_full_disk_stops_the_sending(session, tmp_path):
    path = tmp_path / "model.rknn"
    path.write_bytes(bytes(40 << 20))
    with taking(session, limit=1 << 20) as s:
        with pytest.raises(Refused, match="the board refuses: No space left on device") as why:
            s.push({"f" * 64: path})
        assert why.value.kind == "no_space" and s.sent < 40 << 20
        assert why.value.blocked().facts == {"again": True}  # a disk with more room is tried by the next run


@pytest.mark.parametrize(
    ("hello", "said"),
    [("version=1", "got version 1"), ("engines=None", "no engines"), ("free_bytes='x'", "no free_bytes")],
)
def test_an_agent_of_another_version_is_refused(session, hello, said):
    with pytest.raises(Refused, match=said), session(f"begin({hello}); IN.read()"):
        pass


def test_no_python_is_a_refusal(tmp_path):
    board = {"driver": "local", "address": "", "python": "no-such-python", "work": str(tmp_path)}
    with pytest.raises(Refused, match="no-such-python: No such file"), Session(board, AGENT, 5, FAST):
        pass


# The boot, in this machine's Python: an agent that says how it was started.

ECHO = b"import sys, os; os.write(1, ('|'.join(sys.argv[1:]) + '\\n').encode()); sys.stdin.buffer.read()"


def boot(work: str, data: bytes, sha: str = "", python: str = sys.executable, **env: str) -> tuple[int, str]:
    """Exit code and stdout of the boot when `data` is sent whatever it answers."""
    sha = sha or hashlib.sha256(ECHO).hexdigest()
    done = subprocess.run(
        [python, "-c", WORD, work, sha, str(len(ECHO))], input=data, capture_output=True, env=os.environ | env
    )
    return done.returncode, done.stdout.decode()


def test_the_agent_arrives_once(tmp_path):
    home = {"HOME": str(tmp_path)}
    need, have = (f"\nKVGATE {hashlib.sha256(ECHO).hexdigest()} {word}\n" for word in ("need", "have"))
    assert boot("~/a b;$(id)", ECHO, **home) == (0, f"{need}{have}{tmp_path}/a b;$(id)\n")
    assert boot("~/a b;$(id)", b"", **home) == (0, f"{have}{tmp_path}/a b;$(id)\n")
    (path,) = (tmp_path / "a b;$(id)/agent").iterdir()
    assert path.stat().st_mode & 0o77 == 0 == path.parent.stat().st_mode & 0o77
    path.write_bytes(b"print('changed')")
    assert "need" in boot("~/a b;$(id)", ECHO, **home)[1] and path.read_bytes() == ECHO


@pytest.mark.parametrize(
    ("data", "said"), [(ECHO[:-1] + b"x", "cannot checksum"), (ECHO[:9], "cannot closed"), (b"", "cannot closed")]
)
def test_what_is_not_the_agent_is_not_run(tmp_path, data, said):
    code, text = boot(str(tmp_path), data)
    assert code == 3 and said in text and not list((tmp_path / "agent").iterdir())


def test_a_work_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    code, text = boot(str(tmp_path / "file"), ECHO)
    assert code == 3 and " cannot io" in text and "Not a directory" in text


def test_the_boot_is_short_and_plain():
    """Older Pythons must be able to read it to say that they are too old; a device takes 4 kB of command."""
    assert len(WORD) < 2000 and 'f"' not in BOOT and ":=" not in BOOT
    old = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.version_info = (3, 7); exec({BOOT!r})", "w", "x", "1"],
        capture_output=True,
        text=True,
    )
    assert old.stdout == "\nKVGATE x cannot python Python 3.7, allowed: 3.9 or newer\n"


def test_the_refused_boot_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    board = {"driver": "local", "address": "", "python": sys.executable, "work": str(tmp_path / "file")}
    said = r"the board cannot take the agent: .*Not a directory"
    with pytest.raises(Refused, match=said) as why, Session(board, AGENT, 5, FAST):
        pass
    assert why.value.kind == "io" and "\n" not in why.value.reason
