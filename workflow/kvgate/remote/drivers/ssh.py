"""SSH through the system's OpenSSH client: keys, known hosts, jump hosts and the rest are the user's own ssh config."""

import os
import shlex
from typing import Any

from kvgate.remote import drivers

CONNECT = 10  # seconds for one attempt to connect

# Nothing asks, nothing is trusted at first sight, and a dead link ends after 4 to 6 seconds. A connection that the
# user's own control master holds is used; this one never becomes a master, which would outlive the job.
_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": str(CONNECT),
    "ServerAliveInterval": "2",
    "ServerAliveCountMax": "2",
    "LogLevel": "ERROR",
    "ControlMaster": "no",
    "RemoteCommand": "none",
    "EscapeChar": "none",
    "ForwardAgent": "no",
}

_CAUSES: drivers.Causes = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "the board's host key is not the known one; `ssh-keygen -R` if it may"),
    ("host key is known|Host key verification failed", "the board's host key is unknown; log in by hand once"),
    ("bad permissions|permissions .* are too open", "the key file may be read by others; chmod 600"),
    ("no mutual signature|incorrect passphrase|error in libcrypto|Load key", "the key cannot be used"),
    ("Permission denied", "the board takes none of the keys; ssh-copy-id"),
    ("jumphost loop|UNKNOWN port|stdio forwarding failed|open failed", "the jump host did not connect"),
    ("Could not resolve hostname", "no such host"),
    ("Connection refused", "no ssh server there"),
    ("timed out|No route to host|Network is unreachable", "the board does not answer"),
    ("hostname contains invalid|remote username contains invalid", "no host name"),
    ("Bad configuration option|Bad owner or permissions|Can't open user config", "the ssh config has an error"),
    ("Too many authentication failures", "the board was offered too many keys; IdentitiesOnly yes in the ssh config"),
    ("closed by|Connection reset|Broken pipe|kex_exchange_identification|not responding", "the connection was closed"),
)


def check(board: dict[str, Any]) -> None:
    """Raises ValueError on an address or user that is none."""
    name = r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*"
    drivers.hold("address", board["address"], name, "a host name or a Host of your ssh config")
    drivers.hold("user", board.get("user", ""), r"([A-Za-z0-9_][A-Za-z0-9_.@-]*)?", "a user name, or nothing")


def command(board: dict[str, Any], remote: list[str]) -> list[str]:
    check(board)
    config = os.environ.get("KVGATE_SSH_CONFIG")  # for tests: in the place of the user's own
    words = ["ssh", *(["-F", config] if config else []), "-T", "-x"]
    for name, value in _OPTIONS.items():
        words += ["-o", f"{name}={value}"]
    if board.get("user"):
        words += ["-l", board["user"]]
    if board.get("port"):
        words += ["-p", str(board["port"])]
    return [*words, "--", board["address"], shlex.join(remote)]


def explain(code: int, stderr: str) -> str:
    """ssh's 255 alone says nothing: its text does, and where there is none, that."""
    meaning, line = drivers.cause(_CAUSES, stderr) if code == 255 else ("", "")
    if meaning:
        return f"{meaning} (ssh: {line})"
    text = drivers.last(stderr)
    if code == 255 and not text:
        return "the link went dead, or the agent was killed (ssh: exit 255 without a word)"
    return f"ssh: {drivers.ended(code)}" + (f", {text}" if text else "")
