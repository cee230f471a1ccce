"""The drivers' words: what is started, what is never passed on, and what an exit code and its text mean."""

import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvgate.remote import drivers
from kvgate.remote.drivers import adb, local, ssh
from kvgate.remote.link import WORD

HOSTILE = [
    "python3",
    "-c",
    "print('a b')\n\"$(id)\" `id`; rm -rf ~ !x",
    "~/kv gate;$(touch pwned)",
    "-oProxyCommand=id",
]


def board(**change: object) -> dict:
    entry = {"driver": "ssh", "address": "orange", "user": "", "port": 0, "adb_port": 0}
    return entry | change


def test_ssh_asks_nothing_and_trusts_nobody(monkeypatch):
    monkeypatch.delenv("KVGATE_SSH_CONFIG", raising=False)
    words = ssh.command(board(user="rock", port=2222), ["python3"])
    assert words[0] == "ssh" and words[-3:] == ["--", "orange", "python3"] and "-F" not in words
    for option in ("BatchMode=yes", "StrictHostKeyChecking=yes", "ServerAliveInterval=2", "ControlMaster=no"):
        assert words[words.index(option) - 1] == "-o"
    assert words[words.index("-l") + 1] == "rock" and words[words.index("-p") + 1] == "2222"
    monkeypatch.setenv("KVGATE_SSH_CONFIG", "/a b/config")
    assert ssh.command(board(), [])[1:3] == ["-F", "/a b/config"]


@pytest.mark.parametrize("driver", [ssh, adb])
def test_remote_words_arrive_as_they_were(driver, monkeypatch):
    """ssh and adb hand one string to a shell on the far side."""
    monkeypatch.setattr(adb.shutil, "which", lambda name: "adb")
    monkeypatch.setattr(adb, "_server", lambda port: None)
    text = driver.command(board(), HOSTILE)[-1]
    seen = subprocess.run(["sh", "-c", f"printf '%s\\0' {text}"], capture_output=True, text=True).stdout
    assert seen.split("\0")[:-1] == HOSTILE == shlex.split(text)


def test_the_boot_passes_a_csh_login():
    """tcsh takes no line break in quotes and replaces "!"; BusyBox's and every other shell take what it takes."""
    assert WORD.isprintable() and not set(WORD) & set("!'\\")


@pytest.mark.system
@pytest.mark.parametrize("shell", ["tcsh", "dash", "bash"])
def test_every_login_shell_starts_the_boot(shell, tmp_path):
    text = ssh.command(board(), [sys.executable, "-c", WORD, str(tmp_path), "sha", "1"])[-1]
    done = subprocess.run([shell, "-c", text], input="", capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "\nKVGATE sha need\n\nKVGATE sha cannot closed\n")


@pytest.mark.parametrize("name", ["-oProxyCommand=touch pwned", "", "a b", "a;b", "$(id)", "a\nb", "../x", "`id`"])
@pytest.mark.parametrize("driver", [ssh, adb])
def test_what_is_no_name_is_refused(driver, name):
    with pytest.raises(ValueError, match="address: got"):
        driver.command(board(address=name), ["true"])


def test_a_user_that_is_an_option_is_refused():
    with pytest.raises(ValueError, match="user: got '-oProxyCommand=x'"):
        ssh.check(board(user="-oProxyCommand=x"))


def test_local_takes_no_address():
    assert local.command(board(address=""), HOSTILE) == HOSTILE
    with pytest.raises(ValueError, match="address: got 'orange'"):
        local.check(board())


def test_every_driver_is_found_by_name():
    assert [drivers.of({"driver": name}) for name in ("ssh", "adb", "local")] == [ssh, adb, local]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "@@@@\n@ REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "is not the known",
        ),
        ("No ED25519 host key is known for x and you have requested strict checking.", "host key is unknown"),
        ("a@b: Permission denied (publickey).", "takes none of the keys"),
        ("Permissions 0644 for 'k' are too open.\nbad permissions\na@b: Permission denied (publickey).", "chmod 600"),
        ("ssh: connect to host x port 22: Connection refused", "no ssh server"),
        ("Connection refused\nConnection closed by UNKNOWN port 65535", "jump host"),
        ("Connection to x closed by remote host.", "was closed"),
        ("", "the link went dead, or the agent was killed"),
    ],
)
def test_ssh_255_is_explained_by_its_text(text, said):
    assert said in ssh.explain(255, text) and "\n" not in ssh.explain(255, text)


def test_ssh_other_codes_are_the_remote_command_s():
    assert ssh.explain(1, "Traceback\nImportError: no numpy\n") == "ssh: exit 1, ImportError: no numpy"
    assert "jump" not in ssh.explain(1, "the agent printed UNKNOWN port")
    assert ssh.explain(-9, "") == "ssh: killed by SIGKILL" and "signal 99" in ssh.explain(-99, "")
    assert ssh.explain(137, "Killed") == "ssh: exit 137 (killed by SIGKILL), Killed"


def test_a_stranger_s_text_is_one_printable_line():
    assert drivers.clean("a\x1b[31mb\r\n\tc\u202e") == "a?[31mb c?"
    assert len(drivers.clean("x" * 10_000)) == 300


def test_adb_exit_0_proves_nothing():
    assert "dropped" in adb.explain(0, "")
    assert (
        adb.explain(1, "error: no devices/emulators found") == "no such device (adb: error: no devices/emulators found)"
    )
    assert "shell_v2" in adb.explain(1, "error: device only supports allocating a pty")
    assert adb.explain(1, "ValueError: I/O operation on closed file.") == (
        "adb: exit 1, ValueError: I/O operation on closed file."
    )


@contextmanager
def server(version: bytes) -> Iterator[int]:
    """Answers one host:version on the loopback, as an adb server does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            link, _ = listener.accept()
            with link:
                link.recv(64)
                link.sendall(b"OKAY0004" + version)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(5)


@pytest.mark.skipif(not shutil.which("adb"), reason="adb is not installed")
def test_an_adb_server_of_another_version_is_left_alone():
    with server(b"0028") as port, pytest.raises(ValueError, match=rf"port {port}: got version 40, which adb 41"):
        adb.command(board(adb_port=port), ["true"])
    with server(b"0029") as port:
        assert adb.command(board(adb_port=port), ["true"])[1:] == [
            "-P",
            str(port),
            "-s",
            "orange",
            "shell",
            "-T",
            "true",
        ]


def test_without_adb_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="adb: got no such program on PATH"):
        adb.command(board(), ["true"])
