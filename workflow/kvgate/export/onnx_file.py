"""A Decoder to ONNX: opset 17, its matrices in weights.bin by offset, the same bytes wherever it is made."""

import contextlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from kvgate.contract import LOGITS
from kvgate.export import pieces, residual
from kvgate.export.decoder import Decoder, example
from kvgate.export.pieces import Piece
from kvgate.prepare import widened

OPSET = 17  # the compiler takes at most 19
NAME_LIMIT = 127  # characters: longer tensor names fail the build


@dataclass(frozen=True)
class Graph:
    model: onnx.ModelProto
    sums: int  # of the residual stream that keep what they lose; 0: as the model has them
    shift: int  # Contract.shift
    pieces: list[Piece]  # none where the graph is compiled as a whole
    slices: list[tuple[str, int, int]]  # of the heads' weights (pieces.shards)


def export(
    decoder: Decoder,
    index: Mapping[str, Any],
    location: str,
    sums: Mapping[str, int] | None = None,
    wide: Mapping[str, str] | None = None,
    signs: Mapping[str, np.ndarray] | None = None,
    compensated: bool = False,
    every: int = 0,
) -> Graph:
    """index: blob.write's, of the tensors' names in `decoder.model`. location: the weights file's name.

    sums: matrices that are the first of so many terms, `{name}.1` and on in the index: their products are added up.
    wide: matrices whose input is widened (kvgate.prepare.widened), each with the name of its signs.
    compensated: the residual stream keeps what its sums lose (residual.compensate), in pieces in each by itself.
    every: layers of a piece; 0: no pieces.

    Raises pieces.Uncut where the graph cannot be cut so, ValueError on a parameter that is not in the index, or a name
    that the compiler would refuse.
    """
    declared = {t.name for t in decoder.contract.inputs}
    model = _trace(decoder, folding=True)
    if any(x.name.removeprefix("model.") not in index for x in model.graph.input if x.name not in declared):
        model = _trace(decoder, folding=False)  # a folded parameter has no values anywhere
    _attach(model, declared, index, location)
    # What only the logits need is not in the graph of another part.
    there = None if decoder.contract.part == "decode" else {x.name for x in model.graph.initializer}
    sums = {name: n for name, n in (sums or {}).items() if there is None or f"model.{name}" in there}
    wide = {f"model.{name}": of for name, of in (wide or {}).items() if there is None or f"model.{name}" in there}
    for name, terms in sums.items():
        _add_terms(model, f"model.{name}", [f"{name}.{n}" for n in range(1, terms)], index, location)
    widened.widen(model, wide, signs or {}, decoder.contract.tokens)
    residual.reorder(model)
    parts = []
    if every:
        plain = onnx.ModelProto()
        plain.CopyFrom(model)
        _shift_logits(plain, decoder.spec.top)
        parts = pieces.cut(plain, decoder.contract, every)
    kept = residual.compensate(model) if compensated else 0
    shift = _shift_logits(model, decoder.spec.top) if decoder.contract.part == "decode" else 0
    _finish(model, decoder.contract.part)
    for piece in parts:
        if compensated:
            residual.compensate(piece.model)
        _finish(piece.model, piece.contract.part)
    slices: list[tuple[str, int, int]] = []
    if parts:
        *layers, head = parts
        heads, slices = pieces.shards(head)
        parts = [*layers, *heads]
    return Graph(model, kept, shift, parts, slices)


def _finish(model: onnx.ModelProto, part: str) -> None:
    _clean(model, part)
    _check_names(model)


def _trace(decoder: Decoder, folding: bool) -> onnx.ModelProto:
    contract, buffer = decoder.contract, io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings(), _exportable():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            decoder,
            example(contract),
            buffer,
            dynamo=False,
            opset_version=OPSET,
            export_params=False,  # parameters become inputs: they are pointed into weights.bin below
            do_constant_folding=folding,
            input_names=[t.name for t in contract.inputs],
            output_names=[t.name for t in contract.outputs],
        )
    return onnx.load_from_string(buffer.getvalue())


def _attach(model: onnx.ModelProto, declared: set[str], index: Mapping[str, Any], location: str) -> None:
    """Parameter inputs become initializers in the weights file; declared inputs stay, all of them, in order."""
    inputs = list(model.graph.input)
    missing = declared - {x.name for x in inputs}
    if missing:
        raise ValueError(f"graph: got no input {sorted(missing)[0]!r}, allowed: every input of the contract is used")
    del model.graph.input[:]
    for value in inputs:
        if value.name in declared:
            model.graph.input.append(value)
            continue
        name = value.name.removeprefix("model.")
        if name not in index:
            raise ValueError(f"graph: got a parameter {name!r}, allowed: those of the weights file")
        entry = index[name]
        _initializer(model, value.name, entry, location)


def _initializer(model: onnx.ModelProto, name: str, entry: Mapping[str, Any], location: str) -> None:
    tensor = model.graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=entry["shape"])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    length = 4 * math.prod(entry["shape"])
    for key, text in (("location", location), ("offset", entry["offset"]), ("length", length)):
        tensor.external_data.add(key=key, value=str(text))


def _add_terms(model: onnx.ModelProto, name: str, terms: list[str], index: Mapping[str, Any], location: str) -> None:
    """x W becomes x W + x W1 + ..; raises ValueError where the graph has no such product. A convolution is one."""
    nodes = list(model.graph.node)
    at = next((i for i, n in enumerate(nodes) if n.op_type in ("MatMul", "Conv") and n.input[1] == name), None)
    if at is None:
        raise ValueError(f"graph: got no product with {name!r}, which is a sum of {len(terms) + 1}")
    product = nodes[at]
    output, added = product.output[0], []
    product.output[0] = total = f"{output}.0"
    for n, term in enumerate(terms, start=1):
        _initializer(model, f"model.{term}", index[term], location)
        one, new = f"{output}.{n}", output if n == len(terms) else f"{output}.0+{n}"
        again = onnx.helper.make_node(product.op_type, [product.input[0], f"model.{term}"], [one], name=one)
        again.attribute.extend(product.attribute)
        added.append(again)
        added.append(onnx.helper.make_node("Add", [total, one], [new], name=f"{product.name}.sum{n}"))
        total = new
    del model.graph.node[:]
    model.graph.node.extend([*nodes[: at + 1], *added, *nodes[at + 1 :]])


def _shift_logits(model: onnx.ModelProto, by: int) -> int:
    """The largest logits around 0, where float16 is fine: as a bias of the head, which is added before the rounding.

    From 16 to 32 float16 is a grid of 1/64, on which tokens tie that the model tells apart. Returns the shift, which
    the host adds (Contract.shift); 0 where the logits are not the head's own product.
    """
    graph = model.graph
    constants = {x.name: x for x in graph.initializer}
    made = {out: node for node in graph.node for out in node.output}
    product = made[LOGITS]
    while product.op_type == "Add" and not set(product.input) & set(constants):
        product = made[product.input[0]]  # a sum of products: the shift goes into the first one
    head = constants.get(product.input[1]) if product.op_type == "MatMul" else None
    if head is None or not by:
        return 0
    shifted, plain = product.output[0], f"{LOGITS}.product"
    product.output[0] = plain
    shift = onnx.numpy_helper.from_array(np.full(head.dims[1], -by, np.float32), f"{LOGITS}.shift")
    graph.initializer.append(shift)
    add = onnx.helper.make_node("Add", [plain, shift.name], [shifted], name=f"{LOGITS}.shifted")
    graph.node.insert(list(graph.node).index(product) + 1, add)
    return by


def _clean(model: onnx.ModelProto, part: str) -> None:
    """Take out what says who made the graph and where."""
    model.producer_name, model.producer_version, model.doc_string = "kvgate", "", ""
    model.graph.name, model.graph.doc_string = part, ""
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    del model.metadata_props[:]
    del model.graph.value_info[:]


def _check_names(model: onnx.ModelProto) -> None:
    names = [n for node in model.graph.node for n in (*node.output, node.name)]
    long = max([*names, *(x.name for x in model.graph.initializer)], key=len)
    if len(long) > NAME_LIMIT:
        raise ValueError(f"graph: got a name of {len(long)} characters ({long}), allowed: {NAME_LIMIT}")


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 in operators of opset 17; as a product it keeps around 0 what the difference would lose."""
    return torch.tanh(x / 2) * (torch.exp(x) + 1)


@contextlib.contextmanager
def _exportable() -> Iterator[None]:
    """Operators that the exporter refuses or turns into a graph that it refuses, written out.

    glm4 repeats cos along the last axis by repeat_interleave. apertus' activation calls expm1, which opset 17 has not.
    """
    original, original_expm1 = torch.Tensor.repeat_interleave, torch.expm1

    def repeat(self: Tensor, repeats: Any, dim: int | None = None, **kwargs: Any) -> Tensor:
        if isinstance(repeats, int) and dim is not None:
            axis = dim % self.dim()
            return torch.stack([self] * repeats, axis + 1).flatten(axis, axis + 1)
        return original(self, repeats, dim, **kwargs)

    torch.Tensor.repeat_interleave = repeat  # type: ignore[method-assign]
    torch.expm1 = expm1
    try:
        yield
    finally:
        torch.Tensor.repeat_interleave = original  # type: ignore[method-assign]
        torch.expm1 = original_expm1
