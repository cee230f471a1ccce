"""How much of what a row must carry lies outside the range that its calibration gave a quantized tensor. numpy only."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvgate.observe import Trace
from kvgate.strategies.host import Host


def measure(host: Host, traces: Iterable[Trace], boundary: Mapping[str, Any]) -> dict[str, float]:
    """Share of the reference's K and V beyond a cache input's calibrated range, by tensor; only those with a range.

    host: of the artifact's graph, whose buffers are the tensors. boundary: the build record's.
    """
    ranges = {t["name"]: (t["low"], t["high"]) for t in boundary.get("inputs", ()) if t.get("low") is not None}
    tensors = [t for t in host.contract.cache_inputs() if t.name in ranges]
    outside, values = dict.fromkeys((t.name for t in tensors), 0), 0
    for trace in traces if tensors else ():
        length = min(len(trace.tokens), host.contract.cache.capacity)
        host.fill(trace.tokens.tolist(), trace.keys, trace.values, length)
        values += length
        for t in tensors:
            low, high = ranges[t.name]
            # Empty slots hold zeros, which lie in every range.
            outside[t.name] += int(np.count_nonzero((host.buffers[t.name] < low) | (host.buffers[t.name] > high)))
    slots = host.contract.cache.capacity
    per_slot = {t.name: np.prod(t.shape) / slots for t in tensors}
    return {name: float(f"{count / (values * per_slot[name]):.4g}") for name, count in outside.items()}
