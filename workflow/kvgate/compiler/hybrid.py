"""Hybrid quantization: some tensors at another dtype, chosen by patterns. Runs in the child."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvgate.compiler.request import Failure, Request


def build(request: Request, toolkit: Any, opened: Callable[[], Any], call: Callable[[str, Callable], Any]) -> Any:
    """The toolkit's two steps with an edit of its list in between. Returns the object of the second step.

    request.hybrid: {pattern: dtype}, see `choose`. Raises Failure where a pattern fits no tensor.
    """
    import onnx
    import yaml

    call("hybrid step 1", lambda: toolkit.hybrid_quantization_step1(dataset=request.dataset, proposal=False))
    stem = Path(request.graph).stem
    path = Path(f"{stem}.quantization.cfg")
    settings = yaml.safe_load(path.read_text())
    graph = onnx.load(f"{stem}.model", load_external_data=False).graph  # after all fusions
    makers = {name: node.op_type for node in graph.node for name in node.output}
    # The list also has constants and the graph's own inputs and outputs, whose names step 2 refuses.
    refused = {value.name for value in graph.output}
    tensors = {n: makers[n] for n in settings["quantize_parameters"] if n in makers and n not in refused}
    settings["custom_quantize_layers"] = choose(request.hybrid, tensors)
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    # The object of step 1 keeps state that breaks step 2.
    second = opened()
    call("hybrid step 2", lambda: second.hybrid_quantization_step2(f"{stem}.model", f"{stem}.data", str(path)))
    return second


def choose(patterns: Mapping[str, str], tensors: Mapping[str, str]) -> dict[str, str]:
    """{tensor: dtype} of the tensors that a pattern fits, a later over an earlier. Raises Failure where one has none.

    tensors: name to the operator that makes it. A pattern is of the whole `operator:name`, or of the name where it has
    no colon: operators are named alike in every family, the rest of a name is the model's own.
    """
    chosen: dict[str, str] = {}
    for pattern, dtype in patterns.items():
        named = {n: f"{operator}:{n}" if ":" in pattern else n for n, operator in tensors.items()}
        fitting = [n for n, full in named.items() if fnmatchcase(full, pattern)]
        if not fitting:
            some = [f"{operator}:{n}" for n, operator in tensors.items()][:4]
            raise Failure(f"hybrid: got pattern {pattern!r}, which fits none of {len(tensors)} tensors, e.g. {some}")
        chosen |= dict.fromkeys(fitting, dtype)
    return chosen
