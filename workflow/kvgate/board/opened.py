"""All artifacts of a row in engines of one kind: the decoder, in pieces or whole, and its parts beside it.

numpy only, Python 3.9.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvgate.board import environment, parts
from kvgate.board.chain import Chain
from kvgate.strategies.host import Host


class Engines:
    def __init__(self, job: Mapping[str, Any], folder: Path, row: parts.Row) -> None:
        """job: as an engine takes it; folder: has every artifact's files in a folder of its name. Opens nothing."""
        kind = importlib.import_module(environment.ENGINES[job["engine"]]).Engine
        self._places: list[tuple[str, Any]] = []  # in the order in which they are opened

        def made(artifact: parts.Artifact) -> Any:
            known = {name: artifact.told[name] for name in ("custom_string", "contract_digest")}
            engine = kind({**job, **known}, folder / artifact.folder, artifact.contract)
            self._places.append((artifact.folder, engine))
            return engine

        pieces = [(made(x), x.contract) for x in row.pieces]
        self.decode: Any = Chain(pieces) if pieces else made(row.whole)
        self.parts: dict[str, tuple[Any, Any]] = {name: (made(x), x.contract) for name, x in row.parts.items()}

    def open(self, say: Callable[[str], None]) -> dict[str, Any]:
        """As an engine's; say(phase) names the artifact too where it has a folder of its own (`init prefill`)."""
        found: dict[str, Any] = {}
        findings: list[dict[str, Any]] = []
        for place, engine in self._places:
            opened = engine.open(lambda phase, place=place: say("{} {}".format(phase, place).rstrip()))
            findings += opened.get("findings", [])
            found = found or opened
        return {**found, "findings": findings}

    def close(self) -> None:
        for _, engine in self._places:
            with contextlib.suppress(Exception):
                engine.close()


def beside(engine: Any, contract: Any, host: Host) -> Host:
    """The host half of another part of a row, on the cache of `host`: over the engine's own memory where it offers
    that. Raises ValueError where its cache inputs are not those of `host`."""
    make = getattr(engine, "beside", None)
    return host.chunked(contract) if make is None else make(host)
