"""The toolkit's accuracy analysis in a process of its own: one state through a graph compiled as its row was.

Run as `python -m kvgate.compiler.analysis request.json` by kvgate.compiler.toolkit. Leaves in the current folder the
artifact, `snapshot/` (kvgate.compiler.snapshot reads it), and of a quantized graph the toolkit's list of ranges and its
fused graph, which only the first step of its hybrid quantization writes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgate.compiler import child, hybrid
from kvgate.compiler.request import Failure, Request

SNAPSHOT = "snapshot"
ANALYSED = "analysed"  # an empty file: all is there but the list of ranges
NO_RANGES = "float activations have no ranges"


@dataclass(frozen=True)
class Analysis(Request):
    feeds: Sequence[str] = ()  # one state: a .npy an input in the contract's order; names in the current folder


def analyse(request: Analysis, run: child.Run) -> dict[str, Any]:
    """Facts: `ranges`, why there is no list of ranges; empty where there is one."""
    toolkit = child.compiled(request, run)
    child.calm_malloc()
    with run.of("analysis"):
        # No target: the simulator. Rank-4 arrays are taken in the graph's own order here, unlike by `inference`.
        feeds = list(request.feeds)
        child.call("accuracy_analysis", lambda: toolkit.accuracy_analysis(inputs=feeds, output_dir=SNAPSHOT))
    Path(ANALYSED).touch()
    if not request.dataset:
        return {"ranges": NO_RANGES}
    if Path(hybrid.ranges_file(request.graph)).is_file():  # the hybrid build wrote it
        return {"ranges": ""}
    toolkit.release()  # its memory, before another object takes as much
    with run.of("ranges"):
        try:
            _write_ranges(request)
        except Failure as why:  # the analysis stands without
            return {"ranges": str(why)}
    return {"ranges": ""}


def _write_ranges(request: Analysis) -> None:
    """By a second object: the first one has been built, and cannot take this step any more."""
    second = child.opened(request)
    child.call("load_onnx", lambda: second.load_onnx(model=request.graph))
    hybrid.write_ranges(request, second, child.call)


if __name__ == "__main__":
    child.main(sys.argv[1], Analysis, analyse)
