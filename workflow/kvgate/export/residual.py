"""The residual stream of a graph: its sums found, brought into the order that fuses, and kept exact in float16.

A stream is a chain of sums, x + u, where u was made from x. Each is rounded to float16, and a channel that a token
drives to 600 or 20,000 loses there what later layers need once they take it back: most of a float16 row's error.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest

import onnx


def reorder(model: onnx.ModelProto) -> int:
    """Change the order in place; returns how many sums were changed. Sums are equal up to float32 rounding.

    Parallel blocks sum (mlp + attention) + residual; as (residual + attention) + mlp both sums join their matrices.
    The compiler fuses a sum into the matrix product before it; a sum of two products is an operator of its own (one
    row a layer in gpt_neox, phi, falcon). Cohere's own order is already this one.
    """
    graph = model.graph
    made = {out: (i, node) for i, node in enumerate(graph.node) for out in node.output}
    constants = {x.name for x in graph.initializer}
    uses = Counter(name for node in graph.node for name in node.input)

    def product(name: str) -> bool:
        """Whether a value is a matrix product, with or without a bias."""
        node = made[name][1] if name in made else None
        if node is not None and node.op_type == "Add" and any(x in constants for x in node.input):
            return any(product(x) for x in node.input)
        return node is not None and node.op_type == "MatMul"

    changed = 0
    for outer in graph.node:
        if outer.op_type != "Add":
            continue
        for place, name in enumerate(outer.input):
            inner = made[name][1] if name in made else None
            residual = outer.input[1 - place]
            if inner is None or inner.op_type != "Add" or uses[name] != 1 or product(residual):
                continue
            if residual in constants or not all(product(x) for x in inner.input):
                continue
            first, last = sorted(inner.input, key=lambda x: made[x][0])
            inner.input[:] = [residual, first]
            outer.input[:] = [name, last]
            changed += 1
            break
    return changed


@dataclass(frozen=True)
class Sum:
    """A sum of the stream: node number `index` adds `added` to `stream`."""

    index: int
    stream: str
    added: str


def sums(graph: onnx.GraphProto) -> list[Sum]:
    """The residual stream's sums in order, none where no chain has two.

    The longest chain in which each sum goes on from the one before. An activation may add a value to what it made of
    it (GELU's tanh form): that is a chain of one.
    """
    constants = {x.name for x in graph.initializer}
    origins: dict[str, int] = {}  # what a value was made from, itself included: a bit for each value of the graph
    chains: dict[str, list[Sum]] = {}  # by the value that ends them

    def made_from(name: str) -> int:
        return origins.setdefault(name, 1 << len(origins))

    for index, node in enumerate(graph.node):
        inputs = [x for x in node.input if x and x not in constants]
        if node.op_type == "Constant":
            constants.update(node.output)
            continue
        if node.op_type == "Add" and len(inputs) == 2:
            continued = [Sum(index, a, b) for a, b in (inputs, inputs[::-1])]
            continued.sort(key=lambda x: -len(chains.get(x.stream, [])))
            for found in continued:
                chain = chains.get(found.stream, [])
                begin = chain[0].stream if chain else found.stream
                # Of parallel blocks the second one was made from what the chain was before the first.
                if found.added != begin and made_from(found.added) & made_from(begin) == made_from(begin):
                    chains[node.output[0]] = [*chain, found]
                    break
        if node.op_type == "Reshape" and inputs[0] in chains:  # opt's: of one token nothing but the rank changes
            chains[node.output[0]] = chains[inputs[0]]
        mask = 0
        for name in inputs:
            mask |= made_from(name)
        for out in node.output:
            origins[out] = mask | 1 << len(origins)
    longest = max(chains.values(), key=len, default=[])
    return longest if len(longest) > 1 else []


def _made(nodes: list[onnx.NodeProto], kind: str, a: str, b: str, name: str) -> str:
    """Append an operator; its output has its name."""
    nodes.append(onnx.helper.make_node(kind, [a, b], [name], name=name))
    return name


def compensate(model: onnx.ModelProto) -> int:
    """Carry beside the stream x what its sums lose, in place; returns the number of the stream's sums, 0: none found.

    As Kahan's summation, u = added + t, s = x + u, t = u - (s - x), and every reader but the next sum gets s + t. Exact
    in real numbers; in float32 equal up to rounding. u joins its product; four rows of the compiler's table a sum.
    """
    graph = model.graph
    found = sums(graph)
    read = Counter(name for node in graph.node for name in node.input)
    placed: dict[int, list[onnx.NodeProto]] = {}
    x, t = (found[0].stream, "") if found else ("", "")
    for one, following in zip_longest(found, found[1:]):
        node, total = graph.node[one.index], graph.node[one.index].output[0]
        added = placed[one.index] = []
        u = _made(added, "Add", one.added, t, f"{node.name}.kept") if t else one.added
        if following:
            s = _made(added, "Add", x, u, f"{node.name}.rounded")
            gain = _made(added, "Sub", s, x, f"{node.name}.gain")
            t = _made(added, "Sub", u, gain, f"{node.name}.lost")
            x, u = s, t
        if not following or following.stream != total or read[total] > 1:
            _made(added, "Add", x, u, total)
    nodes = [n for i, node in enumerate(graph.node) for n in placed.get(i, [node])]
    del graph.node[:]
    graph.node.extend(nodes)
    return len(found)
