"""Graphs as the libraries' own exporters write them: what a user has today, and the baseline without a cache.

`hf_export`: transformers' `OnnxExporter` on its `DynamicCache`, static shapes. `dynamic_concat`: the same cache through
the legacy exporter of PyTorch, angles made in the graph from the position. `recompute`: the whole prefix through the
legacy exporter, cache off. No seam of ours, no recipe; nodes and weights are the exporter's.

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
from kvgate.checkpoint import reference, refusals
from kvgate.jobs import record
from kvgate.jobs.entries.strategy import Decode
from kvgate.jobs.job import Job

OPSET = 18  # the newest that both torch's new exporter writes and the compiler reads (11 to 19)
LEGACY_OPSET = 17
_CACHE_NAME = re.compile(r"\blayers\.(\d+)\.(keys|values)$")


def run(job: Job) -> dict[str, Any]:
    """Export the strategy's graph. Raises record.Blocked where the exporter itself refuses the model."""
    strategy: Decode = job.config["strategy"]
    write = {"hf_export": _hf_export, "dynamic_concat": _legacy, "recompute": _recompute}[strategy["module"]]
    folder = job.checkpoint()
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type in refusals.REPLACED:
        got = f"model type {config.model_type!r}: layers with states that are replaced"
        raise record.blocked("exporter", f"{got}, allowed: attention layers alone, or form recipe or plain")
    own = refusals.attention(config.to_dict())
    implementation = None if strategy["module"] == "hf_export" else own  # None: transformers' default
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=implementation, local_files_only=True
    ).eval()
    work = job.folder / ".exporter"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        inputs, outputs, states, window = write(model, int(strategy["capacity"]), work)
        np.savez(work / "host.npz")  # this host looks nothing up
        contract = c.Contract(
            strategy=strategy["module"],
            part="decode",
            form="exporter",
            reason="written by the library's own exporter",
            vocabulary=int(model.get_output_embeddings().weight.shape[0]),
            hidden=int(model.config.hidden_size),
            cache=c.Cache(int(strategy["capacity"]), layout="rows", rank=4, packing="apart"),
            states=states,
            layers=(c.Layer(rotation=None),) * len({x.layer for x in states}),  # angles are made in the graph
            windows=(window,),
            inputs=inputs,
            outputs=outputs,
            host_sha256=record.sha256(work / "host.npz"),
        )
        (work / "contract.json").write_text(contract.to_json(), encoding="utf-8")
        files = {}
        for name in ("weights.bin", "host.npz", "contract.json", "model.onnx"):
            (work / name).replace(job.folder / name)
            files[name] = record.sha256(job.folder / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {"form": "exporter", "reason": contract.reason, "contract": contract.digest, "files": files}


# Inputs, outputs, states, and the sliding window of the mask that the host makes (None where it is the graph's own).
Boundary = tuple[tuple[c.Tensor, ...], tuple[c.Tensor, ...], tuple[c.State, ...], int | None]


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
    states: list[c.State] = []
    for i, (keys, values) in enumerate(rows):
        heads = reference.distinct_heads(keys, model.config).shape[1]  # falcon's tensors hold each head g times
        states += c.key_value(i, heads, keys.shape[3], values.shape[3], capacity)
    return inputs, outputs, tuple(states), None


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
            raise record.blocked("exporter", text)
    return [(layer.keys, layer.values) for layer in cache.layers]


class _Whole(torch.nn.Module):
    """Token ids in, logits out, nothing else at the boundary."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # Given a mask, transformers does not look for packed sequences (aten::diff, which the exporter cannot write).
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


class _Step(torch.nn.Module):
    """One token against the cache, everything else as the model's own code does it."""

    def __init__(self, model: torch.nn.Module, layers: int) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, ids: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, *cached: torch.Tensor) -> Any:
        cache: Any = transformers.DynamicCache()
        for i in range(self.layers):
            cache.update(cached[2 * i], cached[2 * i + 1], i)
        # A mask of rank 4 is taken as it is.
        called = {
            "position_ids": position,
            "attention_mask": mask,
            "use_cache": True,
            _cache_argument(self.model): cache,
        }
        logits = self.model(input_ids=ids, **called).logits
        return logits, *(x for layer in cache.layers for x in (layer.keys, layer.values))


def _window(config: Any) -> int | None:
    """The sliding window of all layers. Raises record.Blocked where only some slide: the mask is one input."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if window and len(kinds) > 1:
        text = f"layer types: got {', '.join(sorted(kinds))}, allowed: all the same"
        raise record.blocked("exporter", text)
    return window if kinds == {"sliding_attention"} else None


def _cache_argument(model: Any) -> str:
    """`cache` since transformers 5.24, `past_key_values` before, and in models not moved yet."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _legacy(model: Any, capacity: int, folder: Path) -> Boundary:
    """One token against `capacity` cached ones, [1, Hk, S, D]; the present comes back with capacity + 1."""
    rows = _cached_rows(model)
    states = [x for i, (k, v) in enumerate(rows) for x in c.key_value(i, k.shape[1], k.shape[3], v.shape[3], capacity)]
    cache = c.Cache(capacity, layout="rows", rank=4, packing="apart")
    history = c.cache_tensors(cache, states, capacity)
    inputs = (
        c.Tensor("ids", c.IDS, (1, 1), "int64"),
        c.Tensor("position", c.POSITION, (1, 1), "int64"),
        c.Tensor("mask.0", c.MASK, (1, 1, 1, capacity + 1)),
        *history,
    )
    logits = c.Tensor("logits", c.LOGITS, (1, 1, int(model.get_output_embeddings().weight.shape[0])))
    outputs = (logits, *c.cache_tensors(cache, states, capacity + 1, ".out"))
    example = tuple(torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in inputs)
    _export_legacy(_Step(model, len(rows)), example, [t.name for t in inputs], [t.name for t in outputs], folder)
    return inputs, outputs, tuple(states), _window(model.config)


def _recompute(model: Any, capacity: int, folder: Path) -> Boundary:
    """The whole prefix [1, capacity] in, every position's logits out; the causal mask is a constant of the graph."""
    graph = _export_legacy(_Whole(model), (torch.zeros(1, capacity, dtype=torch.int64),), ["ids"], ["logits"], folder)
    return tuple(_tensor(x) for x in graph.input), tuple(_tensor(x) for x in graph.output), (), None


def _export_legacy(
    module: torch.nn.Module, example: tuple[torch.Tensor, ...], inputs: list[str], outputs: list[str], folder: Path
) -> onnx.GraphProto:
    with warnings.catch_warnings(), torch.no_grad(), _writable_repeats():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                module,
                example,
                str(folder / "legacy.onnx"),
                input_names=inputs,
                output_names=outputs,
                opset_version=LEGACY_OPSET,
                dynamo=False,
            )
        except Exception as error:
            raise _refused("torch's legacy exporter", error) from error
    return _save(folder / "legacy.onnx", folder)


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
        state = f"layers.{cached[1]}.{cached[2].removesuffix('s')}"
        return c.Tensor(value.name, c.STATE, shape, dtype, states=(state,))
    roles = {
        "ids": c.IDS,
        "input_ids": c.IDS,
        "position_ids": c.POSITION,
        "attention_mask": c.ATTENTION_MASK,
        "logits": c.LOGITS,
    }
    if value.name not in roles:
        text = f"the exporter's boundary: got {value.name!r}, known: {', '.join(sorted(roles))}, layers.N.keys|values"
        raise record.blocked("exporter", text)
    return c.Tensor(value.name, roles[value.name], shape, dtype)
