"""ADB through the system's adb and its server; with `adb_port` one of its own, as two versions end each other's.

A server that adb starts stays up; kvgate ends none, as another job may use it.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
from typing import Any

from kvgate.remote import drivers

_ANSWER = 5.0  # seconds

_CAUSES: drivers.Causes = (
    ("doesn't support PTY|only supports allocating a pty", "the board's adbd is too old: it has no shell_v2"),
    ("no devices/emulators found|device .*not found", "no such device"),
    ("device unauthorized", "the board has not allowed this computer; confirm on the board, or push the key"),
    ("device (offline|still)", "the device is offline"),
    ("more than one device", "more than one device; set address to its serial number"),
    ("insufficient permissions|no permissions", "no permission for the USB device; udev rules"),
    ("cannot connect to daemon|failed to start daemon", "no adb server, and none could be started"),
    ("^error: (closed|protocol fault)", "the connection was closed"),
)


def check(board: dict[str, Any]) -> None:
    """Raises ValueError on a serial number that is none."""
    name = r"[A-Za-z0-9_][A-Za-z0-9_.:-]*"
    drivers.hold("address", board["address"], name, "a serial number of `adb devices`")


def command(board: dict[str, Any], remote: list[str]) -> list[str]:
    """Raises ValueError also where starting adb would end a server of another version."""
    check(board)
    adb = shutil.which("adb")
    if adb is None:
        raise ValueError("adb: got no such program on PATH, allowed: Android's platform-tools")
    _hold_version(adb, board.get("adb_port") or int(os.environ.get("ANDROID_ADB_SERVER_PORT") or 5037))
    port = ["-P", str(board["adb_port"])] if board.get("adb_port") else []
    # -T asks for shell_v2 without a terminal: a board without it is refused by adb itself.
    return [adb, *port, "-s", board["address"], "shell", "-T", shlex.join(remote)]


def explain(code: int, stderr: str) -> str:
    """adb exits with 1 on its own errors; with 0 also where the connection dropped before the exit code came."""
    meaning, line = drivers.cause(_CAUSES, stderr)
    if meaning and code != 0:
        return f"{meaning} (adb: {line})"
    text = drivers.last(stderr)
    if code == 0 and not text:
        return "the connection was dropped, or the agent was killed (adb: exit 0 without a word)"
    return f"adb: {drivers.ended(code)}" + (f", {text}" if text else "")


def _hold_version(adb: str, port: int) -> None:
    """Raises ValueError where a server of another version is up: the client would kill it, and its sessions."""
    server = _server(port)
    if server is None:
        return
    text = subprocess.run(
        [adb, "version"], capture_output=True, text=True, timeout=_ANSWER, encoding="utf-8", errors="replace"
    ).stdout
    match = re.search(r"version 1\.0\.(\d+)", text)
    if match and int(match[1]) != server:
        raise ValueError(
            f"adb server on port {port}: got version {server}, which adb {match[1]} would end; "
            "set adb_port to a free port"
        )


def _server(port: int) -> int | None:
    """The version of the server on a port of this machine; None where none is up."""
    try:
        with socket.create_connection(("127.0.0.1", port), _ANSWER) as link, link.makefile("rb") as answer:
            link.sendall(b"000chost:version")
            head = answer.read(8)
            return int(answer.read(4), 16) if head == b"OKAY0004" else None
    except (OSError, ValueError):
        return None
