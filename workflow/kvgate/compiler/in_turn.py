"""Pieces of a decoder in ONNX Runtime, one at a time: each runs all steps of all programs, then the next is opened."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.compiler.piece import Piece
from kvgate.contract import HIDDEN, Contract
from kvgate.engines.onnxruntime import Engine
from kvgate.observe import Trace, histories, observe
from kvgate.strategies.host import Host


def run(
    pieces: Iterable[tuple[Path, Contract]],
    work: Path,
    programs: Mapping[str, tuple[Path, list[str]]],
    opened: Callable[[Contract], Host],
    isolated: int,
    say: Callable[[str], Callable[[str], None]],
) -> list[tuple[Contract, Path]]:
    """The contract of each piece, and the folder below `work` with its `observations`, for joined.observation.

    pieces: graph and contract of each, in order. programs: by name the trace.npz, and the histories that are asked for.
    opened: the host half of a contract. say: by name what takes a program's progress.
    """
    made: list[tuple[Contract, Path]] = []
    below = None
    for graph, contract in pieces:
        folder = work / contract.part
        (folder / "observations").mkdir(parents=True)
        engine, host = Engine(graph, contract), opened(contract)
        for name, (trace, asked) in programs.items():
            _observe(engine, host, trace, asked, isolated, below, folder / "observations" / f"{name}.npz", say(name))
        del engine  # before the next one is opened
        made.append((contract, folder))
        below = folder if any(t.role == HIDDEN for t in contract.outputs) else below
    return made


def _observe(
    engine: Any,
    host: Host,
    path: Path,
    asked: list[str],
    isolated: int,
    below: Path | None,
    into: Path,
    progress: Callable[[str], None],
) -> None:
    contract = host.contract
    piece = Piece(engine, contract, str(below / "observations" / into.name) if below else None)
    trace, told = Trace.load(str(path)), f"{contract.part} "
    seen = observe(piece, host, trace, histories(contract, asked), isolated, lambda text: progress(told + text))
    with into.open("wb") as file:
        np.savez(file, **piece.observed(seen))  # type: ignore[arg-type]
