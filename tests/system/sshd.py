"""A real OpenSSH server on the loopback as an ordinary user, its client's config, and links that are slow or cut.

Where the tests run as root, the user is a throw-away one; else it is who runs them. Not a test itself.
"""

import contextlib
import os
import pwd
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
_TOOLS = ("ssh", "ssh-keygen", *(("setpriv", "useradd", "userdel") if os.getuid() == 0 else ()))


@dataclass
class Server:
    """`folder` holds keys and configs; `home` is the far side's disk. Ended by its id."""

    folder: Path
    home: Path
    user: str
    port: int = 0
    process: Any = None
    ids: list[int] = field(default_factory=list)  # uid and gid where this is not the tests' own user

    @property
    def python(self) -> Path:
        """The far side's Python: with numpy and onnxruntime, and nothing of kvgate."""
        return self.folder / "python3"

    @property
    def config(self) -> Path:
        """The client's, in the place of the user's own."""
        return self.folder / "config"

    def board(self, **change: Any) -> dict[str, Any]:
        """An entry of boards.yaml for it."""
        entry = {"platform": "host", "driver": "ssh", "address": "board", "user": "", "port": 0, "adb_port": 0}
        entry |= {"work": str(self.home / "kvgate"), "python": str(self.python), "engine": "onnxruntime"}
        return entry | {"core_mask": "auto", "clocks": "record"} | change

    def write_config(self, **hosts: str) -> None:
        """hosts: names to lines that replace or add to the options of a Host block."""
        options = {
            "HostName": "127.0.0.1",
            "Port": str(self.port),
            "User": self.user,
            "IdentityFile": f'"{self.folder / "key"}"',
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": f'"{self.folder / "known"}"',
            "GlobalKnownHostsFile": "/dev/null",
        }
        text = ""
        for name, lines in {"board": "", **hosts}.items():
            own = dict(line.strip().split(" ", 1) for line in lines.splitlines() if line.strip())
            text += f"Host {name}\n" + "".join(f"  {k} {v}\n" for k, v in (options | own).items())
        self.config.write_text(text)

    def start(self) -> None:
        self.port = free_port()
        (self.folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {self.folder / 'host_key'}\n"
            f"AuthorizedKeysFile {self.folder / 'authorized'}\nPidFile none\nUsePAM no\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nStrictModes no\n"
        )
        assert SSHD is not None
        command = [*self._as_user(), SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL, cwd="/")
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise AssertionError(f"no sshd: {(self.folder / 'sshd.log').read_text()}")

    def stop(self) -> None:
        """End the server, and what its throw-away user still runs."""
        left = processes("", user=self.ids[0]) if self.ids else []
        for pid in [*self.sessions(), self.process.pid, *left]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def sessions(self) -> list[int]:
        """The ids of the server's processes for its connections: two each, one below the other."""
        upper = children(self.process.pid)
        return upper + [x for pid in upper for x in children(pid)]

    def agents(self) -> list[int]:
        """The ids of agents on the far side."""
        return [x for x in processes(self._agent) if x not in self.children()]

    def children(self) -> list[int]:
        """The ids of processes that hold an artifact there."""
        return processes(self._agent + r"\0--child\0")

    @property
    def _agent(self) -> str:
        return re.escape(str(self.home)) + r"/[^\0]*/agent/[0-9a-f]{64}\.pyz"

    def run(self, *words: str) -> str:
        """stdout of a command as the far side's user, without ssh."""
        return subprocess.run([*self._as_user(), *words], capture_output=True, text=True, check=True, cwd="/").stdout

    def own(self, path: Path) -> Path:
        """Give a file or folder to the far side's user."""
        if self.ids:
            os.chown(path, *self.ids)
        return path

    def _as_user(self) -> list[str]:
        if not self.ids:
            return []
        return ["setpriv", f"--reuid={self.ids[0]}", f"--regid={self.ids[1]}", "--clear-groups"]


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A running server. Skips with a reason where it cannot be."""
    missing = [x for x in _TOOLS if not shutil.which(x)] + ([] if SSHD else ["sshd"])
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (make test-system installs them)")
    folder = Path(tempfile.mkdtemp(prefix="kvgate-sshd-"))
    folder.chmod(0o755)
    home = folder / "home"
    home.mkdir(mode=0o755)
    server = Server(folder, home, pwd.getpwuid(os.getuid()).pw_name)
    root = os.getuid() == 0
    if root:
        server.user = f"kvgate{os.getpid()}"
        subprocess.run(["useradd", "-M", "-d", home, "-s", "/bin/sh", server.user], check=True, capture_output=True)
    try:
        if root:
            entry = pwd.getpwnam(server.user)
            server.ids = [entry.pw_uid, entry.pw_gid]
        for name in ("key", "host_key", "wrong_key", "other_host_key"):
            keygen(folder / name)
        shutil.copy(folder / "key.pub", folder / "authorized")
        for name in ("home", "host_key"):
            server.own(folder / name)
        _python(server)
        server.start()
        try:
            know(server, "host_key")
            server.write_config()
            yield server
        finally:
            server.stop()
    finally:
        if root:
            subprocess.run(["userdel", "-f", server.user], check=True, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _python(server: Server) -> None:
    """A Python that the far side's user can run: the tests' own, through links where it lies in a closed folder."""
    name, source = f"python3.{sys.version_info[1]}", Path(np.__file__).parents[1]
    own = Path(sys.base_prefix)
    for package in ("numpy", "numpy.libs", "onnxruntime"):
        _tree(source / package, server.folder / "site" / package)
    try:
        server.run("sh", "-c", f"{own / 'bin' / name} -c ''")  # by a shell: setpriv itself still has root's rights
    except subprocess.CalledProcessError:
        _tree(own / "lib" / name, server.folder / "base/lib" / name)
        (server.folder / "base/bin").mkdir()
        _link(str(own / "bin" / name), str(server.folder / "base/bin" / name))
        for library in (own / "lib").glob("libpython3*.so*"):
            _link(str(library), str(server.folder / "base/lib" / library.name))
        own = server.folder / "base"
    server.python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{server.folder / "site"}" LD_LIBRARY_PATH="{own / "lib"}"\n'
        f'exec {own / "bin" / name} "$@"\n'
    )
    server.python.chmod(0o755)
    server.run(str(server.python), "-c", "import numpy, onnxruntime")


def _tree(source: Path, target: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "tests", "test", "site-packages", "config-*")
    shutil.copytree(source, target, ignore=ignore, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def keygen(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "kvgate test", "-f", str(path)]
    subprocess.run(command, check=True)


def know(server: Server, *keys: str, ports: tuple[int, ...] = ()) -> None:
    """Write the client's known hosts: these keys, for the server's port and `ports`."""
    names = [f"[127.0.0.1]:{port}" for port in (server.port, *ports)]
    lines = [f"{name} {(server.folder / f'{key}.pub').read_text()}" for key in keys for name in names]
    (server.folder / "known").write_text("".join(lines))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def children(parent: int) -> list[int]:
    """The ids of a process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found


def processes(pattern: str, user: int | None = None) -> list[int]:
    """The ids of processes whose command line, words ended by NUL, has the pattern; of one user only."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            mine = entry.name.isdigit() and user in (None, entry.stat().st_uid)
            if mine and re.search(pattern, (entry / "cmdline").read_bytes().decode(errors="replace")):
                found.append(int(entry.name))
    return found


def until(condition: Any, seconds: float = 10) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@contextlib.contextmanager
def small_disk(path: Path, size: str = "8m") -> Iterator[Path]:
    """A file system of that size at `path`. Skips where mounting is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "kvgate-test", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here, so no disk can be full")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


class Proxy:
    """A TCP link to `target` with a delay, a rate, and an end after so many bytes towards it. A context manager."""

    def __init__(self, target: int, delay: float = 0.0, rate: float = 1e12, cut: float = 1e12) -> None:
        """delay: seconds one way. rate: bytes a second. cut: bytes."""
        self.target, self.delay, self.rate, self.cut = target, delay, rate, cut
        self.passed = 0  # bytes towards the target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._links: list[socket.socket] = []

    def __enter__(self) -> "Proxy":
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # a close alone leaves the other thread accepting
        self._acceptor.join()
        self._listener.close()
        self._close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self._links += [near, far]
                for pair in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, towards: bool) -> None:
        """Each block is passed on `delay` after it came, in order; blocks in flight do not wait for each other."""
        flight: queue.Queue[tuple[float, bytes]] = queue.Queue()
        threading.Thread(target=self._deliver, args=(flight, target), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                time.sleep(len(data) / self.rate)
                if towards:
                    self.passed += len(data)
                    if self.passed > self.cut:
                        break
                flight.put((time.monotonic() + self.delay, data))
        flight.put((0, b""))

    def _deliver(self, flight: "queue.Queue[tuple[float, bytes]]", target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = flight.get()
                if not data:
                    break
                time.sleep(max(0, due - time.monotonic()))
                target.sendall(data)
        self._close()

    def _close(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
