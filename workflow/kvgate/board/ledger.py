"""Where the time of a step goes. Wraps the engine and the host half while a program runs.

Microseconds by a monotonic clock, medians over steps after the warm-up. What the runtime itself does not account for
is `overhead_us` (runtime and data boundary together: copies, layout, locks, system calls), never called a transfer.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.contract import Contract, Tensor

_PARTS = ("inputs_us", "inference_us", "cache_us")


class Timed:
    """A host half and an engine in one, to be given to `observe` as both; all else is the host half's.

    before: called before every inference and after: after it, both outside the times.
    """

    def __init__(
        self,
        engine: Any,
        host: Any,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._host, self._before, self._after = engine, host, before, after
        self._last_us = getattr(engine, "last_us", None)
        self.clear()

    def clear(self) -> None:
        """Forget all times."""
        self.times = {name: array("d") for name in (*_PARTS, "run_us")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def feeds(self, tokens: Sequence[int]) -> Any:
        started = time.perf_counter_ns()
        feeds = self._host.feeds(tokens)
        self._add("inputs_us", started)
        return feeds

    def step(self, feeds: Mapping[str, np.ndarray]) -> Any:
        self._before()
        started = time.perf_counter_ns()
        outputs = self._engine.step(feeds)
        self._add("inference_us", started)
        if self._last_us is not None:
            own = self._last_us().get("run_us")
            if own is not None:
                self.times["run_us"].append(own)
        self._after()
        return outputs

    def take(self, outputs: Mapping[str, np.ndarray], valid: int = 1) -> Any:
        started = time.perf_counter_ns()
        step = self._host.take(outputs, valid)
        self._add("cache_us", started)
        return step

    def _add(self, part: str, started: int) -> None:
        self.times[part].append((time.perf_counter_ns() - started) / 1000)

    def totals(self) -> np.ndarray:
        """[n] the whole of every step that came to its end."""
        parts = [np.asarray(self.times[name]) for name in _PARTS]
        count = min(len(x) for x in parts)
        return sum((x[:count] for x in parts), np.zeros(count))


def summary(timed: Timed, contract: Contract, warmup: int) -> dict[str, Any]:
    """The ledger of the steps in `timed`, of which the first `warmup` do not count."""
    parts = {name: np.asarray(timed.times[name])[warmup:] for name in _PARTS}
    totals, run = timed.totals()[warmup:], np.asarray(timed.times["run_us"])[warmup:]
    if not len(totals):
        raise ValueError("timing: got {} steps, allowed: more than warmup {}".format(len(timed.totals()), warmup))
    total = _median(totals)
    inference, own = _median(parts["inference_us"]), _median(run) if len(run) == len(totals) else None
    return {
        **{name: _median(values) for name, values in parts.items()},
        "total_us": total,
        "total_p10_us": round(float(np.percentile(totals, 10)), 1),
        "total_p90_us": round(float(np.percentile(totals, 90)), 1),
        "run_us": own,
        "overhead_us": None if own is None else round(inference - own, 1),
        "tokens_per_second": round(1e6 / total, 3) if total else None,
        "steps": len(totals),
        "warmup": warmup,
        "bytes_in": _bytes(contract.inputs),
        "bytes_out": _bytes(contract.outputs),
    }


def layers(found: Mapping[str, Any] | None, why: str) -> dict[str, Any]:
    """The NPU's and the CPU's share of a step from the runtime's layer table, or None and why there is none."""
    if not found:
        return {"npu_us": None, "cpu_us": None, "source": None, "why": why, "operators": None}
    return {"npu_us": None, "cpu_us": None, "source": None, "why": None, "operators": None, **found}


def first_token(timed: Timed, isolated: int, prompt: int) -> float | None:
    """Microseconds of a whole prompt up to its first generated token, from a program's forced history.

    isolated: how many steps of another history lie before it. None where the prompt was not run to its end.
    """
    steps = timed.totals()[isolated : isolated + prompt]
    return round(float(steps.sum()), 1) if len(steps) == prompt else None


def peak_rss(status: Path = Path("/proc/self/status")) -> int | None:
    """The most memory that this program had in use (VmHWM; getrusage's value survives exec: it may be the parent's)."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:")), None)


def _median(values: np.ndarray) -> float:
    return round(float(np.median(values)), 1)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the arrays that cross between host half and engine in one step."""
    return sum(int(np.prod(t.shape)) * np.dtype(t.dtype).itemsize for t in tensors)
