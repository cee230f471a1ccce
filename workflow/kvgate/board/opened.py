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
from kvgate.contract import Contract
from kvgate.strategies.host import Host


class Engines:
    def __init__(self, job: Mapping[str, Any], folder: Path, row: parts.Row) -> None:
        """job: as an engine takes it; folder: has every artifact's files in a folder of its name. Opens nothing."""
        self.job, self.folder, self.row = job, folder, row
        self.decode: Any = None  # an engine, or a chain of them
        self.parts: dict[str, tuple[Any, Contract]] = {}  # each other part's engine and contract
        self._made: list[Any] = []

    def open(self, say: Callable[[str], None]) -> dict[str, Any]:
        """As an engine's; say(phase) names the artifact too where it has a folder of its own (`init prefill`)."""
        told: list[dict[str, Any]] = []
        pieces = [(self._opened(x, say, told), x.contract) for x in self.row.pieces]
        self.decode = Chain(pieces) if pieces else self._opened(self.row.whole, say, told)
        self.parts = {name: (self._opened(x, say, told), x.contract) for name, x in self.row.parts.items()}
        findings = [x for opened in told for x in opened.get("findings", [])]
        return {**told[0], "findings": [x for n, x in enumerate(findings) if x not in findings[:n]]}

    def close(self) -> None:
        for engine in self._made:
            with contextlib.suppress(Exception):
                engine.close()

    def _opened(self, artifact: parts.Artifact, say: Callable[[str], None], told: list[dict[str, Any]]) -> Any:
        """An engine. It is made just before it is opened: it reads what is printed from then on."""
        kind = importlib.import_module(environment.ENGINES[self.job["engine"]]).Engine
        known = {name: artifact.told[name] for name in ("custom_string", "contract_digest")}
        engine = kind({**self.job, **known}, self.folder / artifact.folder, artifact.contract)
        self._made.append(engine)
        told.append(engine.open(lambda phase: say("{} {}".format(phase, artifact.folder).rstrip())))
        return engine


def beside(engine: Any, contract: Contract, host: Host) -> Host:
    """The host half of another part of a row, on the cache of `host`: over the engine's own memory where it offers
    that. Raises ValueError where its cache inputs are not those of `host`."""
    make = getattr(engine, "beside", None)
    return host.chunked(contract) if make is None else make(host)
