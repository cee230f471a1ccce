"""Export: prepared weights and a strategy become model.onnx, contract.json and host.npz; nothing is measured again."""

import importlib
import sys
from dataclasses import replace
from typing import Any

from kvgate.contract import Cache
from kvgate.jobs import graph_files, record
from kvgate.jobs.entries.strategy import Strategy
from kvgate.jobs.job import Job
from kvgate.jobs.record import Blocked, blocked, finding
from kvgate.jobs.rows import DECODE, PREFILL


def run(job: Job) -> dict[str, Any]:
    """Writes the graph's files. Raises record.Blocked where the model cannot be cached as the strategy asks."""
    strategy: Strategy = job.config["strategy"]  # of the part `decode` without `prefill`
    if strategy["form"] == "exporter":  # by name: only those rows' keys hold that module's code
        return importlib.import_module("kvgate.export.exporter").run(job)
    return _decoder(job, strategy)


def _decoder(job: Job, strategy: Strategy) -> dict[str, Any]:
    import numpy as np
    import torch

    from kvgate.checkpoint import load
    from kvgate.export import blob, decoder, onnx_file
    from kvgate.export.pieces import HEAD, WEIGHTS, Uncut
    from kvgate.prepare import surgery, widened
    from kvgate.prepare.spec import Spec

    prepared = job.read("prepare")
    spec = Spec.from_dict(prepared["spec"])
    cache = Cache(strategy["capacity"], strategy["layout"], strategy["rank"], strategy["packing"])
    part = job.wildcards["part"]
    tokens = strategy["prefill"] if part == PREFILL else 1
    try:
        contract = decoder.contract(spec, strategy["module"], cache, part=part, tokens=tokens)
    except ValueError as why:
        raise Blocked(str(why), [finding("packing", str(why))]) from why
    weights = blob.read(job.file("prepare", "weights.bin"), prepared["tensors"])
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    signs = {name: tensors[name].numpy() for name in prepared["widened"].values()}
    for name, of in prepared["widened"].items():  # the model itself is traced at its own width
        tensors[name] = tensors[name][: widened.rows(tensors[name], signs[of])]
    with np.load(job.file("prepare", "tables.npz")) as tables:
        turned = {int(name[7:]): torch.from_numpy(x) for name, x in tables.items() if name.startswith("turned.")}
    made = decoder.Decoder(load.shell(job.checkpoint()), spec, contract, tensors, turned)
    surgery.fill(made.model, tensors)
    host_digest = _host(job, made)
    try:
        graph = onnx_file.export(
            made,
            prepared["tensors"],
            "weights.bin",
            prepared["sums"],
            prepared["widened"],
            signs,
            prepared["compensated"],
            _every(job, spec, prepared) if part == DECODE else 0,
        )
    except Uncut as why:
        raise Blocked(str(why), [finding("pieces", str(why))]) from why
    except torch.onnx.errors.OnnxExporterError as why:
        text = f"the ONNX exporter refuses the model: {str(why).strip().splitlines()[0]}"
        raise blocked("exporter", text) from why
    if (
        prepared["compensated"] and not graph.sums and part == DECODE
    ):  # else the weights' name would promise what is not there
        text = "preparation compensate: got no residual stream of at least two sums in the graph"
        raise blocked("preparation", text)
    contract = replace(contract, host_sha256=host_digest, shift=graph.shift)
    record.link(job.file("prepare", "weights.bin"), job.folder / "weights.bin")
    record.write_bytes(job.folder / "model.onnx", graph.model.SerializeToString(deterministic=True))
    record.write_bytes(job.folder / "contract.json", (contract.to_json() + "\n").encode())
    names = ["model.onnx", "contract.json"]
    if graph.slices:
        matrices = (weights[name.removeprefix("model.")][:, first:end] for name, first, end in graph.slices)
        record.write_blocks(job.folder / WEIGHTS, (x.tobytes() for x in matrices))
        names.append(WEIGHTS)
    for piece in graph.pieces:
        shift = graph.shift if piece.contract.part.startswith(HEAD) else 0
        own = replace(piece.contract, host_sha256=host_digest, shift=shift)
        graph_files.put_piece(job.folder, own, piece.model.SerializeToString(deterministic=True))
        names += graph_files.piece_names(own.part)
    if "moved.npz" in prepared["files"]:
        record.link(job.file("prepare", "moved.npz"), job.folder / "moved.npz")
        names.append("moved.npz")
    files = {name: record.sha256(job.folder / name) for name in names}
    return {
        "form": spec.form,
        "reason": spec.reason,
        "contract": contract.digest,
        "opset": onnx_file.OPSET,
        "nodes": len(graph.model.graph.node),
        "vocabulary": spec.vocabulary,
        "hidden": spec.hidden,
        "layers": spec.depth,
        "sums": graph.sums,
        "pieces": [x.contract.part for x in graph.pieces],
        "terms": len(prepared["sums"]),
        "parameter_bytes": prepared["parameter_bytes"],
        "kept": prepared["kept"],
        "history_bytes": contract.history_bytes(),
        "returned_bytes": contract.returned_bytes(),
        "files": {**files, "host.npz": host_digest, "weights.bin": prepared["files"]["weights.bin"]},
    }


def _every(job: Job, spec: Any, prepared: dict[str, Any]) -> int:
    """Layers of a piece; 0: the decoder is one. Raises pieces.Uncut."""
    from kvgate.export.pieces import fitting

    asked = job.config["strategy"]["layers"]
    if asked != "auto":
        return int(asked)
    head = 4 * spec.vocabulary * spec.hidden
    found = fitting(spec.depth, prepared["parameter_bytes"], head, job.config["build_mb"])
    print(f"layers: auto: {f'{found} a piece' if found else 'in one piece'}", file=sys.stderr)
    return found


def _host(job: Job, made: Any) -> str:
    """Write host.npz: embedding rows, learned positions and rotary tables up to the capacity. Returns its sha256."""
    import numpy as np

    from kvgate.prepare import rotary

    capacity = made.contract.cache.capacity
    with np.load(job.file("prepare", "tables.npz")) as file:
        arrays = dict(file)
    if "position" in arrays:
        arrays["position"] = arrays["position"][:capacity]
    for i, rotation in enumerate(made.spec.rotations):
        stub = made.model.get_submodule(rotation.module)
        rotary.refuse_changing(stub, rotation, capacity)
        for name, table in rotary.tables(stub, rotation, capacity).items():
            arrays[f"{name}.{i}"] = table
    path = job.folder / "host.npz"
    part = record.partial(path)
    with part.open("wb") as file:
        np.savez(file, **arrays)
    part.replace(path)
    return record.sha256(path)
