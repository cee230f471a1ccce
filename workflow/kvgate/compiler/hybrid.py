"""Hybrid quantization: some tensors at another dtype, chosen by patterns; wider ranges. Runs in the child."""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvgate.compiler.request import Failure, Request


def ranges_file(graph: str) -> str:
    """The toolkit's name for its list of ranges; {stem}.model beside it is the fused graph."""
    return f"{Path(graph).stem}.quantization.cfg"


def build(request: Request, toolkit: Any, opened: Callable[[], Any], call: Callable[[str, Callable], Any]) -> Any:
    """The toolkit's two steps with an edit of its list in between. Returns the object of the second step.

    request.hybrid: {pattern: dtype}, see `choose`; request.headroom: see `_widen`. Raises Failure where a pattern fits
    no tensor.
    """
    import onnx
    import yaml

    write_ranges(request, toolkit, call)
    stem = Path(request.graph).stem
    path = Path(ranges_file(request.graph))
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    graph = onnx.load(f"{stem}.model", load_external_data=False).graph  # after all fusions
    ranges = settings["quantize_parameters"]
    products = _products(onnx.load(request.graph, load_external_data=False).graph)
    settings["custom_quantize_layers"] = choose(request.hybrid, _tensors(graph, ranges, products))
    _widen(ranges, {constant.name for constant in graph.initializer}, request.headroom)
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    # The object of step 1 keeps state that breaks step 2.
    second = opened()
    call("hybrid step 2", lambda: second.hybrid_quantization_step2(f"{stem}.model", f"{stem}.data", str(path)))
    return second


def write_ranges(request: Request, toolkit: Any, call: Callable[[str, Callable], Any]) -> None:
    """The toolkit's first step: calibrates, and writes the fused graph and the list of all tensors' ranges."""
    with _without_int4():
        call("hybrid step 1", lambda: toolkit.hybrid_quantization_step1(dataset=request.dataset, proposal=False))


@contextmanager
def _without_int4() -> Iterator[None]:
    """The toolkit's list is written without int4 weights: step 2 finds their scales again, and nobody reads them here.

    With them it has lines of YAML for every group of weights, millions in a real model, written in pure Python.
    """
    from ruamel.yaml import YAML  # the toolkit's own

    written = YAML.dump

    def dump(self: YAML, data: Any, *rest: Any, **more: Any) -> Any:
        left = {name: x for name, x in data["quantize_parameters"].items() if x["dtype"] != "int4"}
        return written(self, data | {"quantize_parameters": left}, *rest, **more)

    YAML.dump = dump  # type: ignore[method-assign]
    try:
        yield
    finally:
        YAML.dump = written  # type: ignore[method-assign]


def _widen(ranges: dict[str, Any], constants: Set[str], headroom: float) -> None:
    """Activations' ranges by a factor, for tokens whose values go beyond all that the calibration saw.

    The toolkit takes changed ends and makes the scale from them; a changed scale it refuses.
    """
    for name in ranges.keys() - constants:
        for end in ("min", "max"):
            ranges[name][end] = [x * headroom for x in ranges[name][end]]


@dataclass(frozen=True)
class Tensor:
    operator: str  # that makes it
    peak: float = 0.0  # largest magnitude that the calibration saw
    reads: frozenset[str] = frozenset()  # tensors that its operator reads
    matrix: str = ""  # that its operator multiplies by


def _products(graph: Any) -> dict[str, str]:
    """Of the exported graph: the operators that multiply by a matrix of the weights, and its name."""
    weights = {x.name for x in graph.initializer}
    products = [x for x in graph.node if x.op_type in ("MatMul", "Conv") and x.input[1] in weights]
    return {x.name: x.input[1].removeprefix("model.") for x in products}


def _tensors(graph: Any, settings: Mapping[str, Any], products: Mapping[str, str]) -> dict[str, Tensor]:
    """Those that may be chosen. The toolkit's list also has constants and the graph's inputs and outputs: refused.

    A product is known by its operator's name, which the fusions number (`MatMul#2`); the matrix they may have permuted.
    """
    outputs = {value.name for value in graph.output}
    found = {}
    for node in graph.node:
        for name in node.output:
            if name in settings and name not in outputs:
                range_ = settings[name]
                peak = max((abs(x) for x in (*range_["min"], *range_["max"])), default=0.0)
                matrix = products.get(re.sub(r"#\d+$", "", node.name), "")
                found[name] = Tensor(node.op_type, peak, frozenset(node.input), matrix)
    return found


def choose(patterns: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """{tensor: dtype} of the tensors that a pattern fits.

    `name` or `operator:name` with wildcards, alternatives between `|`: operators are named alike in every family, the
    rest of a name is the model's own. `>32` or `operator:>32`: tensors whose values were seen beyond it, and what reads
    one of them, or it would be rounded on the way. `@name`: what the products with matrices of that name give, by which
    the toolkit keeps the matrix in float16 too. Raises Failure where a name fits none (that nothing is beyond a
    limit is no mistake), and where patterns disagree: their order is not kept.
    """
    chosen: dict[str, str] = {}
    for pattern, dtype in patterns.items():
        _check_operators(pattern, {t.operator for t in tensors.values()})
        fitting = [name for part in pattern.split("|") for name in _fitting(part, tensors)]
        for name in fitting:
            if chosen.setdefault(name, dtype) != dtype:
                raise Failure(f"hybrid: got {chosen[name]} and {dtype} for {name}, allowed: patterns that agree")
        if not fitting and not all(">" in part for part in pattern.split("|")):
            some = [f"{t.operator}:{n}" for n, t in tensors.items()][:4]
            raise Failure(f"hybrid: got pattern {pattern!r}, which fits none of {len(tensors)} tensors, e.g. {some}")
    return chosen


def _check_operators(pattern: str, present: Set[str]) -> None:
    """Raises Failure on an operator that there is nowhere; one that only this graph has not is no mistake."""
    import onnx

    for part in pattern.split("|"):
        operator, _, name = part.rpartition(":")
        known = not operator or re.search(r"[*?[]", operator) or operator in present or onnx.defs.has(operator)
        if name.startswith(">") and not (known or operator.startswith("ex")):  # the toolkit's own
            raise Failure(f"hybrid: got operator {operator!r} in {pattern!r}, known in this graph: {sorted(present)}")


def _fitting(pattern: str, tensors: Mapping[str, Tensor]) -> list[str]:
    if pattern.startswith("@"):
        return [n for n, t in tensors.items() if t.matrix and fnmatchcase(t.matrix, pattern[1:])]
    operator, _, name = pattern.rpartition(":")
    own = [n for n, t in tensors.items() if fnmatchcase(t.operator, operator or "*")]
    if not name.startswith(">"):
        return [n for n in own if fnmatchcase(n, name)]
    over = {n for n in own if tensors[n].peak > float(name[1:])}
    return [n for n, t in tensors.items() if n in over or t.reads & over]
