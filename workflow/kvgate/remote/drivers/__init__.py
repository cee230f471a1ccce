"""How a process on a board is started and what its end means. A module a driver:

`check(board)` raises ValueError on an entry that it cannot use, without touching the network; `command(board, remote)`
is the argv of a local process whose stdin, stdout and stderr are those of the words `remote` run on the board;
`explain(code, stderr)` is one line on how that process ended.
"""

import importlib
import re
import signal
from collections.abc import Sequence
from typing import Any, Protocol

Causes = Sequence[tuple[str, str]]  # a pattern in the text on stderr, what it means


class Driver(Protocol):
    def check(self, board: dict[str, Any]) -> None: ...

    def command(self, board: dict[str, Any], remote: list[str]) -> list[str]: ...

    def explain(self, code: int, stderr: str) -> str: ...


def of(board: dict[str, Any]) -> Driver:
    """The driver of a checked entry. Imported by name: a row's key holds the code of its own driver only."""
    return importlib.import_module(f"kvgate.remote.drivers.{board['driver']}")  # type: ignore[return-value]


def hold(what: str, value: str, pattern: str, allowed: str) -> None:
    """Raises ValueError where a name could be taken for an option, or is none."""
    if not re.fullmatch(pattern, value):
        raise ValueError(f"{what}: got {value!r}, allowed: {allowed}")


def cause(causes: Causes, stderr: str) -> tuple[str, str]:
    """What the first matching pattern means, and the line that it was found in; both empty where none does."""
    for pattern, meaning in causes:
        for line in stderr.splitlines():
            if re.search(pattern, line, re.IGNORECASE):
                return meaning, clean(line)
    return "", ""


def ended(code: int) -> str:
    """How a process ended: minus a signal's number if it was local; 128 and more is a shell's word for a signal."""
    number = -code if code < 0 else code - 128
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    if code >= 0:
        return f"exit {code}" + (f" (killed by {name})" if name else "")
    return f"killed by {name or f'signal {number}'}"


def last(stderr: str) -> str:
    """The last line that says something."""
    lines = [clean(x) for x in stderr.splitlines()]
    return next((x for x in reversed(lines) if x), "")


def clean(text: object, limit: int = 300) -> str:
    """One printable line of at most `limit` characters: what a stranger sends goes into logs and terminals."""
    words = str(text)[: 4 * limit].split()
    line = "".join(x if x.isprintable() else "?" for x in " ".join(words))
    return line if len(line) <= limit else line[: limit - 3] + "..."
