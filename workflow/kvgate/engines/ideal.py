"""A graph as an ideal float16 run would compute it: float16 where a product reads, float32 in between.

Weights, activations and cache are rounded as a product takes them in; sums, norms and softmax stay in float32. No
hardware that multiplies in float16 is nearer to the model, so what is left is the model's own limit at float16.
"""

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from kvgate.jobs import record

_PRODUCTS = ("MatMul", "Conv", "Gemm")


def written(graph: Path, folder: Path) -> Path:
    """The ideal run's graph of a graph, in a folder of its own, beside links to the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for weights in graph.parent.glob("*.bin"):
        record.link(weights, folder / weights.name)
    path = folder / graph.name
    record.write_bytes(path, rounded(onnx.load(str(graph), load_external_data=False)).SerializeToString())
    return path


def rounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Round every operand of the products, in place."""
    graph, made = model.graph, set()
    nodes = []
    for node in graph.node:
        if node.op_type in _PRODUCTS:
            for place, name in enumerate(node.input[:2]):
                half, back = f"{name}/half", f"{name}/rounded"
                if name not in made:
                    nodes.append(helper.make_node("Cast", [name], [half], to=TensorProto.FLOAT16))
                    nodes.append(helper.make_node("Cast", [half], [back], to=TensorProto.FLOAT))
                    made.add(name)
                node.input[place] = back
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return model
