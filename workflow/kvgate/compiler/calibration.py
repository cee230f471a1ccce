"""Calibration samples: real decode states, each a (text, position) that the host half turns into feeds."""

import hashlib
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvgate.compiler import overlap
from kvgate.compiler.dtypes import FLOAT16
from kvgate.contract import HIDDEN, Contract, canonical
from kvgate.jobs import record
from kvgate.observe import Trace, spread
from kvgate.strategies.host import Array, Host

LIST = "dataset.txt"


@dataclass(frozen=True)
class Sample:
    text: str
    position: int


def tokens(traces: Mapping[str, Path]) -> tuple[dict[str, Array], dict[str, int]]:
    """The token ids [T] of each text's trace.npz, and the first drawn position of each that the model drew on."""
    found, drawn = {}, {}
    for text, path in traces.items():
        with np.load(path) as file:
            found[text] = file["tokens"]
            if file["prompt"] < len(found[text]):
                drawn[text] = int(file["prompt"])
    return found, drawn


def refuse_verified(
    texts: Mapping[str, Array], drawn: Mapping[str, int], verified: Mapping[str, Array], capacity: int
) -> None:
    """Raises Blocked where a text, or what another was drawn after, is a program's for the most part, or begins as it
    as far as both go and fit.

    texts, verified: token ids [T] by text and by program. A calibration that has seen what is verified flatters it.
    """
    for text, ids in texts.items():
        given = ids[: drawn.get(text, len(ids))][:capacity]
        for program, theirs in verified.items():
            alike = min(len(given), len(theirs))
            if np.array_equal(given[:alike], theirs[:alike]):
                got = f"got the first {alike} tokens of program {program}"
                raise record.Blocked(f"calibration text {text}: {got}, allowed: another text")
            share = overlap.shared(given.tolist(), theirs[:capacity].tolist())
            if share >= overlap.MOST:
                got = f"shares {100 * share:.0f} % of its runs of {overlap.RUN} tokens with program {program}"
                raise record.Blocked(f"calibration text {text}: {got}, allowed: another text")


def choose(
    texts: Mapping[str, Array], capacity: int, count: int, drawn: Mapping[str, int] | None = None
) -> list[Sample]:
    """`count` samples: positions evenly spread over 0..capacity-1, first and last among them, texts equally often.

    Up to a quarter are first positions, where the texts' first tokens differ (with a start token, one): nothing else is
    as large as what many models compute of a first token, and another token's is of another size.

    texts: token ids [T] by text. drawn: of those that the model drew on, the first drawn position: only from there on
    are they sampled, before it they are a text like others. Two texts that begin alike are one sample as far as they
    do. Raises Blocked where there are no texts, one is shorter than the capacity, there are fewer different positions
    than samples, or a drawn text would be left out.
    """
    drawn = drawn or {}
    if not texts:
        raise record.Blocked("calibration: got no texts, allowed: at least one")
    for text, ids in texts.items():
        if len(ids) < capacity:
            raise record.Blocked(f"calibration text {text}: got {len(ids)} tokens, allowed: at least {capacity}")
    different: list[dict[bytes, str]] = [{} for _ in range(capacity)]  # per position: text by prefix
    for position, found in enumerate(different):
        # Where every text is a drawn one, what they were drawn after is all that there is.
        for text in [t for t in texts if position >= drawn.get(t, 0)] or texts:
            found.setdefault(texts[text][: position + 1].tobytes(), text)
    slots = [position for position, found in enumerate(different) for _ in found]
    if not 1 <= count <= len(slots):
        raise record.Blocked(f"calibration: got {count} samples, allowed: 1 to {len(slots)} different (text, position)")
    used: Counter[str] = Counter()
    samples: list[Sample] = []
    for position in _positions(slots, len(different[0]), count):
        taken = {s.text for s in samples[-len(texts) :] if s.position == position}
        free = (t for t in different[position].values() if t not in taken)
        text = min(free, key=lambda t: (used[t], t not in drawn))
        used[text] += 1
        samples.append(Sample(text, position))
    for text, first in drawn.items():
        if not any(s.text == text and s.position >= first for s in samples):
            raise record.Blocked(
                f"calibration text {text}: got none of {count} samples from its first drawn position {first} on, "
                "allowed: more samples, or fewer such texts"
            )
    return samples


def _positions(slots: Sequence[int], firsts: int, count: int) -> list[int]:
    """`count` of `slots`, the positions of all different samples, in order; `firsts` of them are 0."""
    for more in range(min(firsts, count // 4), -1, -1):
        positions = [0] * more + [slots[at] for at in spread(count - more, len(slots))]
        if positions.count(0) <= firsts:
            break
    return positions


def digest(samples: Sequence[Sample], traces: Mapping[str, str]) -> str:
    """What the samples are: sha256 over their traces' sha256 (by text) and positions."""
    return hashlib.sha256(canonical([[traces[s.text], s.position] for s in samples]).encode()).hexdigest()


def write(
    folder: Path,
    contract: Contract,
    host: Host,
    traces: Mapping[str, Path],
    samples: Sequence[Sample],
    before: "Before | None" = None,
) -> Path:
    """Write one .npy an input and sample (contract order, the graph's shapes and dtypes) and the list of them.

    traces: each text's trace.npz. host: of the whole graph, where the contract is a piece's; before: the pieces that
    run before that one. Holds one sample in memory at a time. Paths in the list are relative to it, as the
    toolkit cannot read a path with a space. Raises Blocked on a full disk, identical samples, NaN, infinity, what
    float16 cannot hold, and a shape or dtype that is not the contract's.
    """
    size = sum(int(np.prod(t.shape)) * np.dtype(t.dtype).itemsize for t in contract.inputs)
    need, free = len(samples) * size, shutil.disk_usage(folder).free
    if need > free:
        raise record.Blocked(
            f"calibration: got {free >> 20} MiB of free disk, {len(samples)} samples need {need >> 20}"
        )
    seen: dict[str, Sample] = {}
    for text in dict.fromkeys(s.text for s in samples):
        trace = Trace.load(str(traces[text]))
        for n, sample in enumerate(samples):
            if sample.text == text:
                what = f"calibration: {_name(sample)}"
                arrays = feeds(host.contract, host, trace, sample.position, what)
                stream = before.stream(arrays) if before else arrays[contract.inputs[0].name]
                arrays = {t.name: stream if t.role == HIDDEN else arrays[t.name] for t in contract.inputs}
                same = seen.setdefault(_fingerprint(arrays), sample)
                if same is not sample:
                    raise record.Blocked(f"calibration: {_name(sample)} is identical to {_name(same)}")
                _save(folder, n, arrays)
    lines = (" ".join(_file(n, i) for i in range(len(contract.inputs))) for n in range(len(samples)))
    path = folder / LIST
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def feeds(contract: Contract, host: Host, trace: Trace, position: int, what: str) -> dict[str, Array]:
    """As in an isolated run: the cache filled from the trace, then the next step's inputs. `what` opens the errors."""
    host.fill(trace.tokens.tolist(), trace.before(position), position)
    most = min(contract.tokens, contract.cache.capacity - position)  # of a prefill part a chunk
    arrays = host.feeds([int(x) for x in trace.tokens[position : position + most]])
    for t in contract.inputs:
        array = arrays[t.name]
        if array.shape != t.shape or array.dtype != t.dtype:
            got = f"got {array.dtype} {list(array.shape)}, allowed: {t.dtype} {list(t.shape)}"
            raise record.Blocked(f"{what}, input {t.name!r}: {got}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise record.Blocked(f"{what}, input {t.name!r}: got NaN or infinity")
        if array.dtype.kind == "f" and (peak := float(np.abs(array).max())) > FLOAT16:
            got = f"got {peak:.4g}, allowed: at most {FLOAT16:g} (float16)"
            raise record.Blocked(f"{what}, input {t.name!r}: {got}")
    return arrays


class Before(Protocol):
    """What gives the stream that a piece reads, of a step's feeds."""

    def stream(self, feeds: Mapping[str, Array]) -> Array: ...


def _fingerprint(feeds: Mapping[str, Array]) -> str:
    total = hashlib.sha256()
    for array in feeds.values():
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def _save(folder: Path, sample: int, feeds: Mapping[str, Array]) -> None:
    for i, array in enumerate(feeds.values()):
        try:
            np.save(folder / _file(sample, i), array)
        except OSError as error:
            raise record.Blocked(f"calibration: sample {sample} could not be written: {error.strerror}") from None


def _file(sample: int, index: int) -> str:
    return f"{sample}.{index}.npy"


def _name(sample: Sample) -> str:
    return f"sample ({sample.text}, {sample.position})"
