"""Run a program on an engine: the histories `isolated`, `forced` and `free`. Observes, never judges.

numpy only, Python 3.9: boards run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from kvgate.contract import LOGITS, Contract
from kvgate.strategies.host import Host, Step

Array = np.ndarray
_REPLACED = "replaced/"  # how their names begin in a trace.npz


class Engine(Protocol):
    """What executed a graph or artifact: float32 arrays by the contract's names in, by the contract's names out."""

    def step(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]: ...


@dataclass(frozen=True)
class Trace:
    """The reference of a program: whole-prefix recomputation in float32.

    Position t read tokens[t]; logits[t] predicts tokens[t + 1]. A prompt's tokens end with the generated ones.
    """

    tokens: Array  # [T] int64
    prompt: int  # how many of them were given; T for a text
    ended: bool  # the generation reached an end-of-text token by itself
    end_ids: tuple[int, ...]
    states: dict[str, Array]  # the appended ones by name: every token's entry [T, Hk, D] (keys rotated)
    logits: Array | None = None  # [T, V]; None for calibration texts
    replaced: dict[str, Array] = field(default_factory=dict)  # the others: the whole after each position of `at`
    at: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    @staticmethod
    def load(path: str) -> Trace:
        """Read a trace.npz."""
        with np.load(path) as file:
            return Trace(
                file["tokens"],
                int(file["prompt"]),
                bool(file["ended"]),
                tuple(int(x) for x in file["end_ids"]),
                {name: file[name] for name in file.files if name.startswith("layers.")},
                file["logits"] if "logits" in file.files else None,
                {x.removeprefix(_REPLACED): file[x] for x in file.files if x.startswith(_REPLACED)},
                *([file["at"]] if "at" in file.files else []),
            )

    def save(self, path: str) -> None:
        """Write a trace.npz, the same bytes for the same content (numpy stores a fixed date in its zip)."""
        arrays = {"tokens": self.tokens, "prompt": self.prompt, "ended": self.ended, "end_ids": self.end_ids}
        arrays |= self.states
        if self.replaced:
            arrays |= {_REPLACED + name: x for name, x in self.replaced.items()} | {"at": self.at}
        if self.logits is not None:
            arrays["logits"] = self.logits
        with Path(path).open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def before(self, length: int) -> dict[str, Array]:
        """The states of `Host.fill` at a length. Raises ValueError where a replaced one is not known there."""
        if not self.replaced or not length:
            return self.states
        found = np.flatnonzero(self.at == length - 1)
        if not len(found):
            raise ValueError(f"trace: got no replaced states after position {length - 1}, known: {self.at.tolist()}")
        return self.states | {name: x[found[0]] for name, x in self.replaced.items()}

    def steps(self, room: int) -> list[int]:
        """The positions below `room` whose step can be fed the reference's states and compared with it."""
        if not self.replaced:
            return list(range(room))
        at = set(self.at.tolist())
        return [p for p in range(room) if p in at and (p == 0 or p - 1 in at)]


def spread(count: int, positions: int) -> list[int]:
    """Up to `count` positions of 0..positions-1, evenly spread, the first and the last among them."""
    return sorted({int(x) for x in np.linspace(0, positions - 1, min(count, positions)).round()})


def histories(contract: Contract, asked: Sequence[str]) -> list[str]:
    """Those of `asked` that a part has: without logits it has no tokens of its own, a free run is the forced one."""
    if any(t.role == LOGITS for t in contract.outputs):
        return list(asked)
    return [x for x in ("isolated", "forced") if x in asked or (x == "forced" and "free" in asked)]


def planned(trace: Trace, capacity: int, histories: Sequence[str], isolated: int) -> dict[str, list[int]]:
    """The positions of each history's steps, in order; a free run begins as the forced run, which it needs."""
    # A prompt's last generated token is read by nobody; a text's last token is fed to see its K/V and the last slot.
    fed = len(trace.tokens) - (trace.prompt < len(trace.tokens))
    room = min(fed, capacity)
    able = trace.steps(room)
    found = {"isolated": [able[n] for n in spread(isolated, len(able))]} if "isolated" in histories else {}
    return found | ({"forced": list(range(room))} if {"forced", "free"} & set(histories) else {})


def observe(
    engine: Engine,
    host: Host,
    trace: Trace,
    histories: Sequence[str],
    isolated: int = 16,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Array]:
    """Run a trace's program in the given histories; `isolated`: how many positions of that history.

    Returns arrays by `{history}/{what}`, n steps in order: `positions` [n], `tokens` [n] as fed, `logits` [n, V],
    every state by its name (`layers.3.key` [n, Hk, D], of a replaced one the steps at positions of `Trace.at` alone),
    `disturbed` [n] (Step.disturbed). `free/tokens` are the generated ones, `free/diverged` is the first generated step
    that differs from the reference's (-1: none); its other arrays begin after the divergence, as before it the free run
    is the forced one. Positions beyond the capacity are left out. Raises ValueError where nothing could be run.
    """
    positions = planned(trace, host.contract.cache.capacity, histories, isolated)
    found: dict[str, Array] = {}
    if "isolated" in positions:
        found |= _pack("isolated", _isolated(engine, host, trace, positions["isolated"], progress), trace)
    if "forced" in positions:
        room = len(positions["forced"])
        steps, diverged, state = _forced(engine, host, trace, room, progress)
        found |= _pack("forced", steps, trace)
        if "free" in histories:
            found |= _free(engine, host, trace, room, steps, diverged, state, progress)
    if not found:
        raise ValueError(f"histories: got {list(histories)}, known: isolated, forced, free")
    return found


Row = tuple[int, int, Step]  # position, token fed, what came back


def _run(engine: Engine, host: Host, token: int) -> Row:
    position = host.length
    return position, token, host.take(engine.step(host.feeds(token)))


def _isolated(
    engine: Engine, host: Host, trace: Trace, positions: list[int], progress: Callable[[str], None]
) -> list[Row]:
    rows = []
    for n, position in enumerate(positions):
        host.fill(trace.tokens.tolist(), trace.before(position), position)
        rows.append(_run(engine, host, int(trace.tokens[position])))
        progress(f"isolated {n + 1}/{len(positions)}")
    return rows


def _forced(engine: Engine, host: Host, trace: Trace, room: int, progress: Callable[[str], None]) -> tuple:
    """The rows, the first diverging position of the generated part (-1: none), and the host's state after it."""
    host.reset()
    rows, diverged, state = [], -1, None
    for position in range(room):
        rows.append(_run(engine, host, int(trace.tokens[position])))
        generates = trace.prompt - 1 <= position < len(trace.tokens) - 1
        if diverged < 0 and generates and int(rows[-1][2].logits.argmax()) != trace.tokens[position + 1]:
            diverged, state = position, host.snapshot()
        progress(f"forced {position + 1}/{room}")
    return rows, diverged, state


def _free(engine, host, trace, room, forced, diverged, state, progress) -> dict[str, Array]:  # type: ignore[no-untyped-def]
    """Own tokens from the divergence on, to an end-of-text token, the reference's cap, or the full cache."""
    generated = [int(t) for t in trace.tokens[trace.prompt : (diverged if diverged >= 0 else room) + 1]]
    rows: list[Row] = []
    if diverged >= 0:
        host.restore(state)
        generated.append(int(forced[diverged][2].logits.argmax()))
        cap = min(len(trace.tokens) - trace.prompt, host.contract.cache.capacity - trace.prompt + 1)
        while len(generated) < cap and generated[-1] not in trace.end_ids:
            rows.append(_run(engine, host, generated[-1]))
            generated.append(int(rows[-1][2].logits.argmax()))
            progress(f"free {len(generated)}/{cap}")
    found = _pack("free", rows, trace) if rows else {}
    step = diverged - (trace.prompt - 1) if diverged >= 0 else -1
    return found | {"free/tokens": np.array(generated, np.int64), "free/diverged": np.array(step)}


def _pack(history: str, rows: list[Row], trace: Trace) -> dict[str, Array]:
    known = set(trace.at.tolist())
    steps = [step for _, _, step in rows]
    found = {
        "positions": np.array([p for p, _, _ in rows]),
        "tokens": np.array([t for _, t, _ in rows]),
        "logits": compact(np.stack([s.logits for s in steps])),
        "disturbed": np.array([s.disturbed for s in steps]),
    }
    for name in steps[0].states:
        kept = [s.states[name] for p, _, s in rows if name not in trace.replaced or p in known]
        found[name] = compact(np.stack(kept)) if kept else np.zeros((0, *steps[0].states[name].shape), np.float16)
    return {f"{history}/{name}": array for name, array in found.items()}


def compact(array: Array) -> Array:
    """The array as float16 where that loses nothing (the simulator's outputs often are), else as float32."""
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), array, equal_nan=True) else array.astype(np.float32)
