"""Hybrid quantization: some tensors at another dtype, chosen by patterns. Runs in the child."""

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kvgate.compiler.request import Failure, Request


def build(request: Request, toolkit: Any, opened: Callable[[], Any], call: Callable[[str, Callable], Any]) -> Any:
    """The toolkit's two steps with an edit of its list in between. Returns the object of the second step.

    request.hybrid: {pattern of a tensor's name: dtype}. Raises Failure where a pattern fits no tensor.
    """
    import yaml

    call("hybrid step 1", lambda: toolkit.hybrid_quantization_step1(dataset=request.dataset, proposal=False))
    stem = Path(request.graph).stem
    path = Path(f"{stem}.quantization.cfg")
    settings = yaml.safe_load(path.read_text())
    names = list(settings["quantize_parameters"])
    chosen: dict[str, str] = {}
    for pattern, dtype in request.hybrid.items():
        fitting = [n for n in names if fnmatch(n, pattern)]
        if not fitting:
            raise Failure(f"hybrid: got pattern {pattern!r}, which fits none of {len(names)} tensors, e.g. {names[:4]}")
        chosen |= dict.fromkeys(fitting, dtype)
    settings["custom_quantize_layers"] = chosen
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    # The object of step 1 keeps state that breaks step 2.
    second = opened()
    call("hybrid step 2", lambda: second.hybrid_quantization_step2(f"{stem}.model", f"{stem}.data", str(path)))
    return second
