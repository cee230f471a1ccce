"""What was done so far, for /metrics, and how long one answer took. Standard library only, Python 3.9."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvgate.serving.context import Run

_HELP = {
    "requests_total": ("counter", "requests answered, by route and status (499: the client was gone)"),
    "prompt_tokens_total": ("counter", "tokens of prompts, the reused ones among them"),
    "reused_tokens_total": ("counter", "tokens of prompts whose K and V were in the cache already"),
    "generated_tokens_total": ("counter", "tokens generated"),
    "prompt_seconds_total": ("counter", "seconds from a generation's begin to its first token"),
    "generation_seconds_total": ("counter", "seconds from the first token to the last"),
    "requests_running": ("gauge", "requests that are generated now: 0 or 1"),
    "requests_waiting": ("gauge", "requests in the queue"),
    "queue_limit": ("gauge", "requests that may wait"),
}


class Measures:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._sums: Counter[str] = Counter()

    def request(self, route: str, status: int) -> None:
        with self._lock:
            self._requests[route, status] += 1

    def generation(self, run: Run) -> None:
        with self._lock:
            self._sums["prompt_tokens_total"] += run.prompt
            self._sums["reused_tokens_total"] += run.reused
            self._sums["generated_tokens_total"] += len(run.tokens)
            self._sums["prompt_seconds_total"] += run.first_seconds  # type: ignore[assignment]
            self._sums["generation_seconds_total"] += run.seconds  # type: ignore[assignment]

    def text(self, now: Mapping[str, int]) -> str:
        """In Prometheus' format. now: values of the gauges."""
        with self._lock:
            requests, sums = sorted(self._requests.items()), dict(self._sums)
        lines = []
        for name, (kind, words) in _HELP.items():
            lines += ["# HELP kvgate_{} {}".format(name, words), "# TYPE kvgate_{} {}".format(name, kind)]
            if name == "requests_total":
                form = 'kvgate_requests_total{{route="{}",status="{}"}} {}'
                lines += [form.format(route, status, count) for (route, status), count in requests]
            else:
                value = now[name] if kind == "gauge" else sums.get(name, 0)
                lines.append("kvgate_{} {}".format(name, round(value, 6)))
        return "\n".join(lines) + "\n"


def timings(runs: Sequence[Run]) -> dict[str, Any]:
    """Of all answers to one prompt, by llama.cpp's names.

    An answer's first token is the prompt's work: the rate is of those after it.
    """
    fed, answered = sum(x.prompt - x.reused for x in runs), sum(len(x.tokens) for x in runs)
    after = sum(max(len(x.tokens) - 1, 0) for x in runs)
    first, rest = sum(x.first_seconds for x in runs), sum(x.seconds for x in runs)
    return {
        "cache_n": runs[0].reused,
        "prompt_n": fed,
        "prompt_ms": round(first * 1e3, 3),
        "prompt_per_second": round(fed / first, 3) if first else 0.0,
        "predicted_n": answered,
        "predicted_ms": round(rest * 1e3, 3),
        "predicted_per_second": round(after / rest, 3) if rest else 0.0,
    }
