"""Run a program on an engine: the histories `isolated`, `forced` and `free`. Observes, never judges.

numpy only, Python 3.9: boards run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from kvgate import contract as c
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

    def steps(self, room: int, tokens: int = 1) -> list[int]:
        """Where a step of `tokens` tokens can begin: it ends below `room`, can be fed the reference's states and be
        compared with it."""
        at = set(self.at.tolist()) if self.replaced else set(range(room))
        return [p for p in range(room - tokens + 1) if p + tokens - 1 in at and (p == 0 or p - 1 in at)]


def spread(count: int, positions: int) -> list[int]:
    """Up to `count` positions of 0..positions-1, evenly spread, the first and the last among them."""
    return sorted({int(x) for x in np.linspace(0, positions - 1, min(count, positions)).round()})


def histories(contract: c.Contract, asked: Sequence[str]) -> list[str]:
    """Those of `asked` that a part has: only the whole decoder has tokens of its own, elsewhere `free` is `forced`."""
    if contract.part == "decode":
        return list(asked)
    return [x for x in ("isolated", "forced") if x in asked or (x == "forced" and "free" in asked)]


def planned(
    trace: Trace, capacity: int, histories: Sequence[str], isolated: int, tokens: int = 1
) -> dict[str, list[int]]:
    """The positions of each history's tokens, in the order of the steps, which have `tokens` of them each but for the
    last one of a forced run; a free run begins as the forced run, which it needs."""
    chunks = _chunks(trace, capacity, histories, isolated, tokens)
    return {
        history: [p for begin, count in steps for p in range(begin, begin + count)] for history, steps in chunks.items()
    }


def _chunks(
    trace: Trace, capacity: int, histories: Sequence[str], isolated: int, tokens: int
) -> dict[str, list[tuple[int, int]]]:
    """Each step's first position and its number of tokens."""
    # A prompt's last generated token is read by nobody; a text's last token is fed to see its K/V and the last slot.
    fed = len(trace.tokens) - (trace.prompt < len(trace.tokens))
    room = min(fed, capacity)
    found = {}
    if "isolated" in histories:
        size = min(tokens, room)
        able = trace.steps(room, size)
        found["isolated"] = [(able[n], size) for n in spread(isolated, len(able))]
    if {"forced", "free"} & set(histories):
        found["forced"] = [(begin, min(tokens, room - begin)) for begin in range(0, room, tokens)]
    return found


def observe(
    engine: Engine,
    host: Host,
    trace: Trace,
    histories: Sequence[str],
    isolated: int = 16,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Array]:
    """Run a trace's program in the given histories; `isolated`: how many positions of that history.

    Returns arrays by `{history}/{what}`, n tokens in order: `positions` [n], `tokens` [n] as fed, `logits` [n, V],
    every state by its name (`layers.3.key` [n, Hk, D], of a replaced one the steps at positions of `Trace.at` alone),
    `disturbed` [n] (Step.disturbed). `free/tokens` are the generated ones, `free/diverged` is the first generated step
    that differs from the reference's (-1: none); its other arrays begin after the divergence, as before it the free run
    is the forced one. Positions beyond the capacity are left out. Raises ValueError where nothing could be run.

    A part without logits has neither `logits` nor a free run. Of several tokens a step, isolated steps are chunks that
    begin at spread positions, and forced ones follow each other, the last one padded.
    """
    contract = host.contract
    chunks = _chunks(trace, contract.cache.capacity, histories, isolated, contract.tokens)
    speaks = any(t.role == c.LOGITS for t in contract.outputs)
    found: dict[str, Array] = {}
    if "isolated" in chunks:
        found |= _pack("isolated", _isolated(engine, host, trace, chunks["isolated"], progress), trace, contract)
    if "forced" in chunks:
        steps, diverged, state = _forced(engine, host, trace, chunks["forced"], progress)
        found |= _pack("forced", steps, trace, contract)
        if "free" in histories and speaks:
            found |= _free(engine, host, trace, len(steps), steps, diverged, state, progress)
    if not found:
        raise ValueError(f"histories: got {list(histories)}, known: isolated, forced, free")
    return found


Ran = tuple[int, list[int], Step]  # first position, tokens fed, what came back


def _run(engine: Engine, host: Host, tokens: Sequence[int] | Array) -> Ran:
    position, fed = host.length, [int(t) for t in tokens]
    outputs = engine.step(host.feeds(fed))
    # One token as those host halves take it that tests put in the place of the right ones.
    return position, fed, host.take(outputs, len(fed)) if host.contract.tokens > 1 else host.take(outputs)


def _isolated(
    engine: Engine, host: Host, trace: Trace, chunks: list[tuple[int, int]], progress: Callable[[str], None]
) -> list[Ran]:
    rows = []
    for n, (position, count) in enumerate(chunks):
        host.fill(trace.tokens.tolist(), trace.before(position), position)
        rows.append(_run(engine, host, trace.tokens[position : position + count]))
        progress(f"isolated {n + 1}/{len(chunks)}")
    return rows


def _forced(
    engine: Engine, host: Host, trace: Trace, chunks: list[tuple[int, int]], progress: Callable[[str], None]
) -> tuple:
    """The rows, the first diverging position of the generated part (-1: none), and the host's state after it."""
    host.reset()
    rows, diverged, state = [], -1, None
    for n, (position, count) in enumerate(chunks):
        rows.append(_run(engine, host, trace.tokens[position : position + count]))
        logits = rows[-1][2].logits
        generates = logits is not None and trace.prompt - 1 <= position < len(trace.tokens) - 1
        if diverged < 0 and generates and int(logits.argmax()) != trace.tokens[position + 1]:
            diverged, state = position, host.snapshot()
        progress(f"forced {n + 1}/{len(chunks)}")
    return rows, diverged, state


def _free(engine, host, trace, room, forced, diverged, state, progress) -> dict[str, Array]:  # type: ignore[no-untyped-def]
    """Own tokens from the divergence on, to an end-of-text token, the reference's cap, or the full cache."""
    generated = [int(t) for t in trace.tokens[trace.prompt : (diverged if diverged >= 0 else room) + 1]]
    rows: list[Ran] = []
    if diverged >= 0:
        host.restore(state)
        generated.append(int(forced[diverged][2].logits.argmax()))
        cap = min(len(trace.tokens) - trace.prompt, host.contract.cache.capacity - trace.prompt + 1)
        while len(generated) < cap and generated[-1] not in trace.end_ids:
            rows.append(_run(engine, host, generated[-1:]))
            generated.append(int(rows[-1][2].logits.argmax()))
            progress(f"free {len(generated)}/{cap}")
    found = _pack("free", rows, trace, host.contract) if rows else {}
    step = diverged - (trace.prompt - 1) if diverged >= 0 else -1
    return found | {"free/tokens": np.array(generated, np.int64), "free/diverged": np.array(step)}


def _pack(history: str, rows: list[Ran], trace: Trace, contract: c.Contract) -> dict[str, Array]:
    known = set(trace.at.tolist())
    steps = [step for _, _, step in rows]
    logits = [s.logits for s in steps if s.logits is not None]
    found = {
        "positions": np.concatenate([np.arange(p, p + len(tokens)) for p, tokens, _ in rows]),
        "tokens": np.concatenate([tokens for _, tokens, _ in rows]),
        **({"logits": compact(np.stack(logits))} if logits else {}),
        "disturbed": np.repeat([s.disturbed for s in steps], [len(tokens) for _, tokens, _ in rows]),
    }
    for name in steps[0].states:
        kept = [s.states[name] for p, tokens, s in rows if name not in trace.replaced or p + len(tokens) - 1 in known]
        joined = np.concatenate if contract.tokens > 1 and name not in trace.replaced else np.stack
        found[name] = compact(joined(kept)) if kept else np.zeros((0, *steps[0].states[name].shape), np.float16)
    return {f"{history}/{name}": array for name, array in found.items()}


def compact(array: Array) -> Array:
    """The array as float16 where that loses nothing (the simulator's outputs often are), else as float32."""
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), array, equal_nan=True) else array.astype(np.float32)
