"""Graphs as the libraries' own exporters write them: what a user has today, and the baseline without a cache.

`hf_export`: transformers' `OnnxExporter` on its `DynamicCache`, static shapes. `recompute`: the whole prefix through
the legacy exporter of PyTorch, cache off. No seam of ours, no recipe; names, nodes and weights are the exporter's.

Changed, so that equal work gives equal bytes and no path of a machine is in the file: doc strings and metadata of the
graph, its nodes and values are taken out, and the weights go into weights.bin beside the graph.
"""

import inspect
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers

from kvgate import contract as c
from kvgate import record, reference
from kvgate.job import Job

OPSET = 18  # the newest that both torch's new exporter writes and the compiler reads (11 to 19)
LEGACY_OPSET = 17
_CACHE_NAME = re.compile(r"\blayers\.(\d+)\.(keys|values)$")


def run(job: Job) -> dict[str, Any]:
    """Export the strategy's graph. Raises record.Blocked where the exporter itself refuses the model."""
    strategy = job.config["strategy"]
    write = {"hf_export": _hf_export, "recompute": _recompute}[strategy["module"]]
    implementation = None if strategy["module"] == "hf_export" else "eager"  # None: transformers' default
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.inputs["fetch"].parent, dtype=torch.float32, attn_implementation=implementation, local_files_only=True
    ).eval()
    work = job.folder / ".exporter"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        inputs, outputs, layers = write(model, int(strategy["capacity"]), work)
        np.savez(work / "host.npz")  # this host looks nothing up
        contract = c.Contract(
            strategy=strategy["module"],
            part="decode",
            form="exporter",
            reason="written by the library's own exporter",
            vocabulary=int(model.get_output_embeddings().weight.shape[0]),
            hidden=int(model.config.hidden_size),
            cache=c.Cache(int(strategy["capacity"]), layout="rows", rank=4, packing="apart"),
            layers=layers,
            windows=(None,),
            inputs=inputs,
            outputs=outputs,
            host_sha256=record.sha256(work / "host.npz"),
        )
        (work / "contract.json").write_text(contract.to_json())
        files = {}
        for name in ("weights.bin", "host.npz", "contract.json", "model.onnx"):
            (work / name).replace(job.folder / name)
            files[name] = record.sha256(job.folder / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {"form": "exporter", "reason": contract.reason, "contract": contract.digest, "files": files}


Boundary = tuple[tuple[c.Tensor, ...], tuple[c.Tensor, ...], tuple[c.Layer, ...]]


def _hf_export(model: Any, capacity: int, folder: Path) -> Boundary:
    """One token against `capacity` cached ones; the present comes back with capacity + 1."""
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    cache = transformers.DynamicCache()  # without a config: sliding layers keep every slot, as our history does
    rows = _cached_rows(model)
    for i, (keys, values) in enumerate(rows):
        cache.update(keys.repeat(1, 1, capacity, 1), values.repeat(1, 1, capacity, 1), i)
    example: dict[str, Any] = {
        "input_ids": torch.zeros(1, 1, dtype=torch.int64),
        "position_ids": torch.full((1, 1), capacity - 1),
        "attention_mask": torch.ones(1, capacity + 1, dtype=torch.int64),
        "cache": cache,
        "use_cache": True,
    }
    if "position_ids" not in inspect.signature(model.forward).parameters:  # bloom counts the mask's ones
        del example["position_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exported = OnnxExporter().export(model, example, OnnxConfig(dynamic=False, opset_version=OPSET))
        except Exception as error:
            raise _refused("transformers' OnnxExporter", error) from error
    exported.save_pretrained(folder / "saved")
    graph = _save(folder / "saved" / "model.onnx", folder)
    inputs = tuple(_tensor(x) for x in graph.input)
    outputs = tuple(_tensor(x) for x in graph.output)
    layers = []
    for keys, values in rows:
        heads = reference.distinct_heads(keys, model.config).shape[1]  # falcon's tensors hold each head g times
        layers.append(c.Layer(heads, keys.shape[3], values.shape[3], rotation=None))  # angles are made in the graph
    return inputs, outputs, tuple(layers)


def _cached_rows(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each layer caches for one token: keys and values [1, Hk, 1, D]. Raises record.Blocked where it does not."""
    cache: Any = transformers.DynamicCache()
    with torch.no_grad():
        try:
            model(torch.zeros(1, 1, dtype=torch.int64), cache=cache, use_cache=True)
        except Exception as error:  # mamba and others want a cache of their own
            raise _refused("transformers' DynamicCache", error) from error
    for i, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is None or layer.keys.dim() != 4:
            text = f"layer {i}: got no K and V of the token, allowed: attention layers"
            raise record.Blocked(text, [record.finding("exporter", text)])
    return [(layer.keys, layer.values) for layer in cache.layers]


class _Whole(torch.nn.Module):
    """Token ids in, logits out, nothing else at the boundary."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # Given a mask, transformers does not look for packed sequences (aten::diff, which the exporter cannot write).
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def _recompute(model: torch.nn.Module, capacity: int, folder: Path) -> Boundary:
    """The whole prefix [1, capacity] in, every position's logits out; the causal mask is a constant of the graph."""
    ids = torch.zeros(1, capacity, dtype=torch.int64)
    with warnings.catch_warnings(), torch.no_grad(), _writable_repeats():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                _Whole(model),
                (ids,),
                str(folder / "legacy.onnx"),
                input_names=["ids"],
                output_names=["logits"],
                opset_version=LEGACY_OPSET,
                dynamo=False,
            )
        except Exception as error:
            raise _refused("torch's legacy exporter", error) from error
    graph = _save(folder / "legacy.onnx", folder)
    return tuple(_tensor(x) for x in graph.input), tuple(_tensor(x) for x in graph.output), ()


@contextmanager
def _writable_repeats() -> Iterator[None]:
    """glm4 and cohere repeat their angles by repeat_interleave, which the legacy exporter writes with wrong shapes."""
    original, method = torch.repeat_interleave, torch.Tensor.repeat_interleave

    def repeat(x: torch.Tensor, repeats: Any, dim: int | None = None, **kwargs: Any) -> torch.Tensor:
        if dim is None or not isinstance(repeats, int):
            return original(x, repeats, dim=dim, **kwargs)
        at = dim % x.ndim
        return torch.stack([x] * repeats, dim=at + 1).flatten(at, at + 1)

    torch.repeat_interleave = torch.Tensor.repeat_interleave = repeat  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.repeat_interleave, torch.Tensor.repeat_interleave = original, method  # type: ignore[method-assign]


def _refused(who: str, error: Exception) -> record.Blocked:
    lines = [x.strip() for x in str(error).splitlines() if x.strip()] or [""]
    text = f"{who}: {type(error).__name__}: {lines[0][:300]}"
    return record.Blocked(f"export: {text}", [record.finding("exporter", text)])


def _save(source: Path, folder: Path) -> onnx.GraphProto:
    """Write model.onnx and weights.bin from an exporter's file, without doc strings and metadata."""
    model = onnx.load(source)
    _strip(model)
    _strip(model.graph)
    for function in model.functions:
        _strip(function)
        for node in function.node:
            _strip(node)
    graph = model.graph
    for item in [*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer]:
        _strip(item)
    (folder / "weights.bin").touch()  # a model below the size limit of external tensors has none
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin")
    return graph


def _strip(item: Any) -> None:
    item.ClearField("doc_string")
    item.ClearField("metadata_props")  # stack traces: they hold paths of this machine


def _tensor(value: onnx.ValueInfoProto) -> c.Tensor:
    """A boundary tensor with the role that its name tells. Raises record.Blocked on a name that tells none."""
    kind = value.type.tensor_type
    shape = tuple(int(d.dim_value) for d in kind.shape.dim)
    dtype = str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)))
    cached = _CACHE_NAME.search(value.name)
    if cached:
        role = c.KEY if cached[2] == "keys" else c.VALUE
        return c.Tensor(value.name, role, shape, dtype, layer=int(cached[1]))
    roles = {
        "ids": c.IDS,
        "input_ids": c.IDS,
        "position_ids": c.POSITION,
        "attention_mask": c.ATTENTION_MASK,
        "logits": c.LOGITS,
    }
    if value.name not in roles:
        text = f"the exporter's boundary: got {value.name!r}, known: {', '.join(sorted(roles))}, layers.N.keys|values"
        raise record.Blocked(text, [record.finding("exporter", text)])
    return c.Tensor(value.name, roles[value.name], shape, dtype)
