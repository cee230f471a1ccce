"""kvgate runs on the board itself: the same agent, without a link."""

from typing import Any

from kvgate.remote import drivers


def check(board: dict[str, Any]) -> None:
    """Raises ValueError on an address: it would be ignored."""
    if board.get("address"):
        raise ValueError(f"address: got {board['address']!r}, allowed: nothing, as driver local is this machine")


def command(board: dict[str, Any], remote: list[str]) -> list[str]:
    check(board)
    return remote


def explain(code: int, stderr: str) -> str:
    text = drivers.last(stderr)
    return f"the agent: {drivers.ended(code)}" + (f", {text}" if text else " without a word")
