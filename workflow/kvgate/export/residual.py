"""Parallel blocks sum (mlp + attention) + residual; as (residual + attention) + mlp both sums join their matrices.

The compiler fuses a sum into the matrix product before it; a sum of two products is an operator of its own (one row a
layer in gpt_neox, phi, falcon). Cohere's own order is already this one.
"""

from collections import Counter

import onnx


def reorder(model: onnx.ModelProto) -> int:
    """Change the order in place; returns how many sums were changed. Sums are equal up to float32 rounding."""
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
