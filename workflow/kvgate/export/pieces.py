"""A decode graph cut into pieces: some layers each, and the head, with the residual stream handed on between them.

Where to cut is read off the graph itself: the last tensor that all ways from the embedding to what a later piece
returns go through. No name of a module is read.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from kvgate import contract as c

INPUT, OUTPUT = "hidden", "hidden.out"  # the stream, as a piece reads it and as it returns it
HEAD, WEIGHTS = "head", "head.bin"
_ADDRESSES = 4 << 30  # bytes of one address domain of the NPU
COLUMNS = 65_536  # of a head in one piece: compilers and boards had trouble with 151,936 (compiler/risks.py)


class Uncut(ValueError):
    """A graph that cannot be cut as asked. One line."""


@dataclass(frozen=True)
class Piece:
    """A graph of its own, its contract's `part` is its name."""

    model: onnx.ModelProto
    contract: c.Contract


def names(layers: int, every: int) -> list[str]:
    """The pieces of a decoder of so many layers. Raises Uncut where `every` does not divide them."""
    if not 0 < every <= layers or layers % every:
        divisors = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise Uncut(f"layers: got {every} a piece, allowed: a divisor of the model's {layers}: {divisors}")
    return [f"layers.{n}-{n + every - 1}" for n in range(0, layers, every)] + [HEAD]


def fitting(layers: int, weights: int, head: int, build_mb: int) -> int:
    """How many layers a piece may have, the most that fit; 0 where the whole decoder fits.

    weights, head: bytes in float32, of all and of the head alone; build_mb: a build's memory. Raises Uncut where not
    even one layer fits.
    """
    if _peak(weights) <= build_mb and weights // 2 <= _ADDRESSES:
        return 0
    one = (weights - head) // layers
    able = [n for n in range(1, layers + 1) if layers % n == 0 and _peak(n * one) <= build_mb]
    able = [n for n in able if n * one // 2 <= _ADDRESSES]
    if not able:
        raise Uncut(f"layers: auto: a build of one layer takes about {_peak(one)} MB, got build_mb {build_mb}")
    return able[-1]


def _peak(weights: int) -> int:
    """MB that a build takes at its worst, about: float16 took 6.5 bytes for each of float32's, sums of two 8.5."""
    return 600 + int(8.5 * weights / 2**20)


def cut(model: onnx.ModelProto, contract: c.Contract, every: int) -> list[Piece]:
    """The pieces in the order in which they run. Raises Uncut where the graph cannot be cut."""
    parts = names(len(contract.layers), every)
    if contract.cache.packing == "model":
        raise Uncut("packing: got 'model' with pieces, allowed: apart, layer: one tensor holds all layers")
    graph = model.graph
    order = _dominators(graph, next(t.name for t in contract.inputs if t.role == c.EMBEDDING))
    returned = _returned(contract)
    firsts = [n * every for n in range(1, len(parts) - 1)]
    streams = [_stream(order, [name for name, layer in returned if layer >= first]) for first in firsts]
    streams.append(_last_sum(graph, order))
    found = []
    for n, part in enumerate(parts):
        below, above = ([None, *streams][n], [*streams, None][n])
        mine = [name for name, layer in returned if layer // every == n or (part == HEAD and layer == math.inf)]
        found.append(_piece(model, contract, part, below, above, mine))
    return found


def shards(head: Piece) -> tuple[list[Piece], list[tuple[str, int, int]]]:
    """A head of more columns than COLUMNS as several, each with some of them; the head itself where it is narrow.

    Also the matrices' names and the first and end column of each, in the order in which their values, [C, columns],
    follow each other in the file WEIGHTS.
    """
    model, contract = head.model, head.contract
    size = [contract.hidden, contract.vocabulary]
    if contract.vocabulary <= COLUMNS:
        return [head], []
    if not any(list(x.dims) == size for x in model.graph.initializer):
        raise Uncut(f"pieces: got no matrix {size} for the head")
    count = math.ceil(contract.vocabulary / COLUMNS)
    edges = [contract.vocabulary * n // count for n in range(count + 1)]
    found: list[Piece] = []
    slices: list[tuple[str, int, int]] = []
    offset = 0
    for first, end in itertools.pairwise(edges):
        made = onnx.ModelProto()
        made.CopyFrom(model)
        for tensor in made.graph.initializer:
            if list(tensor.dims) == size:
                length = _external(tensor, (contract.hidden, end - first), offset)
                slices.append((tensor.name, first, end))
                offset += length
            elif list(tensor.dims) == size[1:]:  # what is added to the logits
                values = onnx.numpy_helper.to_array(tensor)[first:end]
                tensor.CopyFrom(onnx.numpy_helper.from_array(values.copy(), tensor.name))
        outputs = tuple(replace(t, shape=(*t.shape[:-1], end - first)) for t in contract.outputs)
        made.graph.output[0].type.tensor_type.shape.dim[-1].dim_value = end - first
        found.append(Piece(made, replace(contract, part=f"{HEAD}.{len(found)}", outputs=outputs)))
    return found, slices


def _external(tensor: onnx.TensorProto, shape: tuple[int, int], offset: int) -> int:
    """Point a matrix to its values in WEIGHTS; returns their bytes."""
    length = 4 * math.prod(shape)
    del tensor.external_data[:]
    tensor.dims[:] = shape
    for key, value in (("location", WEIGHTS), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return length


def _returned(contract: c.Contract) -> list[tuple[str, float]]:
    """Every output and the layer that it is of; the logits are above all layers."""
    layer = {x.name: x.layer for x in contract.states}
    return [(t.name, layer[t.states[0]] if t.states else math.inf) for t in contract.outputs]


def _dominators(graph: onnx.GraphProto, source: str) -> dict[str, tuple[str, int]]:
    """Of every tensor that follows from `source` the nearest one that all ways to it go through, and its depth."""
    found: dict[str, tuple[str, int]] = {source: (source, 0)}
    for node in graph.node:  # in the order of their computation
        reached = [x for x in node.input if x in found]
        if reached:
            nearest = _common(found, reached)
            found |= dict.fromkeys(node.output, (nearest, found[nearest][1] + 1))
    return found


def _common(order: Mapping[str, tuple[str, int]], tensors: Sequence[str]) -> str:
    """The nearest tensor that all ways to all of `tensors` go through, one of them itself if need be."""
    nearest = tensors[0]
    for other in tensors[1:]:
        while nearest != other:
            if order[nearest][1] < order[other][1]:
                nearest, other = other, nearest
            nearest = order[nearest][0]
    return nearest


def _stream(order: Mapping[str, tuple[str, int]], targets: Sequence[str]) -> str:
    """The tensor between what comes before `targets` and all of them."""
    found = _common(order, targets)
    if found in targets or order[found][1] == 0:
        raise Uncut(f"pieces: got no tensor that all of {targets[0]} and what follows goes through")
    return found


def _last_sum(graph: onnx.GraphProto, order: Mapping[str, tuple[str, int]]) -> str:
    """The stream after the last layer: the last sum of two tensors that all ways to the logits go through."""
    made = {x: node for node in graph.node for x in node.output}
    at = c.LOGITS
    while order[at][1] > 0:
        at = order[at][0]
        if at in made and made[at].op_type == "Add" and all(x in order for x in made[at].input):
            return at
    raise Uncut("pieces: got no residual stream before the head")


def _piece(
    model: onnx.ModelProto, contract: c.Contract, part: str, below: str | None, above: str | None, mine: Iterable[str]
) -> Piece:
    """What computes `mine`, and the stream `above`, out of the stream `below` and the graph's inputs."""
    wanted = {*mine, *([above] if above else [])}
    needed, nodes = set(wanted), []
    for node in reversed(model.graph.node):
        if set(node.output) & (needed - {below}):
            needed |= set(node.input)
            nodes.append(node)
    inputs = [t for t in contract.inputs if t.name in needed]
    outputs = [t for t in contract.outputs if t.name in wanted]
    stream = c.Tensor(INPUT, c.HIDDEN, (1, contract.tokens, contract.hidden))
    if below:
        inputs.insert(0, stream)
    if above:
        outputs.insert(0, replace(stream, name=OUTPUT))
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for field in (made.graph.node, made.graph.input, made.graph.output, made.graph.initializer):
        del field[:]
    renamed = {name: new for name, new in ((below, INPUT), (above, OUTPUT)) if name}
    for node in reversed(nodes):
        new = made.graph.node.add()
        new.CopyFrom(node)
        for side in (new.input, new.output):
            side[:] = [renamed.get(x, x) for x in side]
    made.graph.initializer.extend(x for x in model.graph.initializer if x.name in needed)
    for tensors, values in ((inputs, made.graph.input), (outputs, made.graph.output)):
        for t in tensors:
            kind = onnx.helper.np_dtype_to_tensor_dtype(onnx.numpy_helper.np.dtype(t.dtype))
            values.append(onnx.helper.make_tensor_value_info(t.name, kind, t.shape))
    kept = {name for t in (*inputs, *outputs) for name in t.states}
    shaped = replace(
        contract,
        part=part,
        states=tuple(x for x in contract.states if x.name in kept),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        shift=contract.shift if part == HEAD else 0,
    )
    return Piece(made, shaped)
