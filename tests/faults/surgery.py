"""Edits of an exported graph: its nodes, weights, host tables and contract. Not a test itself."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from kvgate.contract import Contract, canonical
from kvgate.jobs import record
from onnx import helper, numpy_helper
from planting import Sweep

Array = np.ndarray
Make = Callable[[str], str]  # the name of a tensor -> that of what takes its place


class Graph:
    """The nodes of a model.onnx."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(str(path), load_external_data=False)
        self.nodes = self.model.graph.node

    def node(self, end: str) -> Any:
        """The node whose name ends so."""
        (found,) = (x for x in self.nodes if x.name.endswith(end))
        return found

    def maker(self, output: str) -> Any:
        """The node that gives a tensor."""
        (found,) = (x for x in self.nodes if output in x.output)
        return found

    def constant(self, value: Any, dtype: type = np.float32) -> str:
        name = f"planted.{len(self.model.graph.initializer)}"
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node behind those that make its inputs. Returns its output."""
        name = f"planted.{kind}.{len(self.nodes)}"
        made = [n for n, x in enumerate(self.nodes) if set(x.output) & set(inputs)]
        self.nodes.insert(max(made, default=-1) + 1, helper.make_node(kind, list(inputs), [name], name, **attributes))
        return name

    def read(self, tensor: str, make: Make) -> None:
        """What reads `tensor` reads what is made of it instead; a graph's output stays."""
        self.rewire(list(self.nodes), tensor, make(tensor))

    def give(self, tensor: str, make: Make) -> None:
        """The graph's output `tensor` is made of what it was; what reads it inside reads that."""
        inner = f"planted.{tensor}"
        for node in self.nodes:
            node.output[:] = [inner if x == tensor else x for x in node.output]
        self.rewire(self.nodes, tensor, inner)
        made = make(inner)
        for node in self.nodes:
            node.output[:] = [tensor if x == made else x for x in node.output]

    @staticmethod
    def rewire(nodes: Any, old: str, new: str) -> None:
        for node in nodes:
            node.input[:] = [new if x == old else x for x in node.input]

    def drop(self, end: str, keep: int) -> None:
        """Take a node away: what reads its output reads its input number `keep`."""
        node = self.node(end)
        self.rewire(self.nodes, node.output[0], node.input[keep])
        self.nodes.remove(node)

    def heads(self, order: list[int]) -> Make:
        return lambda x: self.add("Gather", x, self.constant(order, np.int64), axis=0)


@contextmanager
def graph(sweep: Sweep) -> Iterator[Graph]:
    path = sweep.path("export", "model.onnx")
    found = Graph(path)
    yield found
    path.write_bytes(found.model.SerializeToString(deterministic=True))
    sweep.seal("export")


@contextmanager
def weights(sweep: Sweep) -> Iterator[dict[str, Array]]:
    """The graph's tensors by the end of their name; an edited array goes back to its place."""
    path = sweep.path("export", "weights.bin")
    data = bytearray(path.read_bytes())
    model = onnx.load(str(path.with_name("model.onnx")), load_external_data=False)
    found = {}
    for tensor in model.graph.initializer:
        place = {x.key: x.value for x in tensor.external_data}
        if place:
            view = np.frombuffer(data, np.float32, int(place["length"]) // 4, int(place["offset"]))
            found[tensor.name.removeprefix("model.model.")] = view.reshape(tuple(tensor.dims))
    yield found
    path.unlink()  # it has another link where it was prepared
    path.write_bytes(data)
    sweep.seal("export")


@contextmanager
def tables(sweep: Sweep) -> Iterator[dict[str, Array]]:
    """host.npz; the contract holds its sha256 too."""
    path = sweep.path("export", "host.npz")
    with np.load(path) as file:
        found = dict(file)
    yield found
    np.savez(path, **found)  # type: ignore[arg-type]
    with contract(sweep) as body:
        body["host_sha256"] = record.sha256(path)


@contextmanager
def contract(sweep: Sweep) -> Iterator[dict[str, Any]]:
    path = sweep.path("export", "contract.json")
    body = json.loads(path.read_text())
    yield body
    path.write_text(canonical(body) + "\n")
    sweep.seal("export")
    digest = Contract.from_json(path.read_text()).digest
    sweep.rewrite("export", lambda x: x.update(contract=digest))
