"""A double of the adb server: our own Python, from the protocol as seen on the wire. It is no adb, and says so by name.

Its one device runs every command in a shell of this machine. It can drop the connection, lie about exit codes, lack
shell_v2, be offline. The real adb client talks to it. Not a test itself.
"""

import contextlib
import shutil
import socket
import struct
import subprocess
import threading
from dataclasses import dataclass, field
from typing import Any

_OUT, _ERR, _EXIT, _CLOSE = 1, 2, 3, 4  # packets of shell_v2; 0 is stdin
VERSION = 41  # of the client that Debian has; another one would end this server


@dataclass
class Double:
    """A context manager. `asked` are the requests, in order."""

    serial: str = "double-0001"
    features: str = "shell_v2,cmd,stat_v2"
    state: str = "device"
    drop: int = 1 << 60  # bytes of stdout after which the connection is closed without an exit packet
    exit: int | None = None  # the exit code that is told, whatever it was
    env: dict[str, str] | None = None
    asked: list[str] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)  # processes of shells

    def __enter__(self) -> "Double":
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # a close alone leaves the other thread accepting, on any next socket
        self._acceptor.join()
        self._listener.close()
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()

    def board(self, **change: Any) -> dict[str, Any]:
        """An entry of boards.yaml for it."""
        entry = {"platform": "host", "driver": "adb", "address": self.serial, "user": "", "port": 0}
        entry |= {"adb_port": self.port, "engine": "onnxruntime", "core_mask": "auto", "clocks": "record"}
        return entry | change

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError, ValueError):
            while True:
                size = int(_exactly(link, 4), 16)
                request = _exactly(link, size).decode()
                self.asked.append(request)
                if not self._answer(link, request):
                    return

    def _answer(self, link: socket.socket, request: str) -> bool:
        """Whether the connection goes on."""
        if request == "host:version":
            _okay(link, f"{VERSION:04x}")
        elif request in ("host:features", f"host-serial:{self.serial}:features"):
            _okay(link, self.features)
        elif request.startswith("host-serial:"):
            return _fail(link, f"device '{request.split(':')[1]}' not found")
        elif request.startswith("host:tport:"):
            if self.state != "device":
                return _fail(link, f"device {self.state}")
            link.sendall(b"OKAY" + struct.pack("<Q", 1))
            return True
        elif request.startswith("shell,v2"):
            link.sendall(b"OKAY")
            self._shell(link, request.partition(":")[2])
        else:
            return _fail(link, f"unknown request {request}")
        return False

    def _shell(self, link: socket.socket, command: str) -> None:
        process = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.env
        )
        self.running.append(process)
        lock, left = threading.Lock(), [self.drop]

        def packet(kind: int, data: bytes) -> None:
            with lock, contextlib.suppress(OSError):
                link.sendall(struct.pack("<BI", kind, len(data)) + data)

        def pump(kind: int, stream: Any) -> None:
            while data := stream.read1(1 << 15):
                if kind == _OUT and len(data) > left[0]:
                    packet(kind, data[: left[0]])
                    link.shutdown(socket.SHUT_RDWR)
                    return
                left[0] -= len(data) if kind == _OUT else 0
                packet(kind, data)

        pumps = [
            threading.Thread(target=pump, args=(kind, stream), daemon=True)
            for kind, stream in ((_OUT, process.stdout), (_ERR, process.stderr))
        ]
        for thread in pumps:
            thread.start()
        threading.Thread(target=_feed, args=(link, process.stdin), daemon=True).start()
        for thread in pumps:
            thread.join()
        code = process.wait()
        packet(_EXIT, bytes([(code if self.exit is None else self.exit) & 0xFF]))
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)  # a close alone would wait for the thread that reads it


def _feed(link: socket.socket, stdin: Any) -> None:
    """Packets of the client to the shell, until either is gone."""
    with contextlib.suppress(OSError, ValueError):
        while True:
            kind, size = struct.unpack("<BI", _exactly(link, 5))
            data = _exactly(link, size)
            if kind == _CLOSE:
                break
            stdin.write(data)
            stdin.flush()
    with contextlib.suppress(OSError):
        stdin.close()


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise ValueError("closed")
        data += part
    return data


def _okay(link: socket.socket, text: str) -> None:
    link.sendall(b"OKAY" + f"{len(text):04x}{text}".encode())


def _fail(link: socket.socket, text: str) -> bool:
    link.sendall(b"FAIL" + f"{len(text):04x}{text}".encode())
    return False


ADB = shutil.which("adb")
