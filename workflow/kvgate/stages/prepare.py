"""Prepare: a checkpoint becomes weights.bin, every tensor in the orientation that the graph uses, and its facts."""

import importlib
import pkgutil
from typing import Any

from kvgate import record, weights
from kvgate.job import Job

FORMS = ("recipe", "plain")


def preparation(name: str) -> Any:
    """The module of a step of a weight preparation. Raises ValueError naming those known."""
    known = sorted(x.name for x in pkgutil.iter_modules(weights.__path__))
    if name not in known:
        raise ValueError(f"weight preparation: got {name!r}, known: {', '.join(known)}")
    return importlib.import_module(f"kvgate.weights.{name}")


def run(job: Job) -> dict[str, Any]:
    """Writes weights.bin and tables.npz (embedding rows [V, C], learned positions [P, C]).

    The body: the spec, the index of weights.bin, the final form with its reason, the self-check's error. Raises
    record.Blocked where the model cannot work.
    """
    import numpy as np
    import torch

    from kvgate.export import blob, load, surgery
    from kvgate.export.prepare import prepare

    if job.wildcards["form"] not in FORMS:
        raise ValueError(f"form: got {job.wildcards['form']!r}, known: {', '.join(FORMS)}")
    steps = [preparation(name) for name in job.config["weights"]["steps"]]
    stats = None  # activation statistics: no preparation needs them yet
    with torch.no_grad():
        model = load.model(job.inputs["fetch"].parent)
        for step in steps:
            if hasattr(step, "checkpoint"):
                step.checkpoint(model, stats)
        prepared = prepare(model, job.wildcards["form"])
        tensors = {name: tensor.numpy() for name, tensor in surgery.state(prepared.model).items()}
        for name in tensors:
            for step in steps:
                if hasattr(step, "linear") and tensors[name].ndim > 1:
                    tensors[name] = step.linear(name, tensors[name], stats)
        index, digest = blob.write(job.folder / "weights.bin", tensors)
        tables = {"embedding": prepared.embedding.numpy()}
        if prepared.positions is not None:
            tables["position"] = prepared.positions.numpy()
    part = record.partial(job.folder / "tables.npz")
    with part.open("wb") as file:
        np.savez(file, **tables)
    part.replace(job.folder / "tables.npz")
    return {
        "form": prepared.spec.form,
        "reason": prepared.spec.reason,
        "error": float(f"{prepared.error:.1e}"),
        "spec": prepared.spec.to_dict(),
        "tensors": index,
        "parameter_bytes": sum(x.nbytes for x in tensors.values()),
        "files": {"weights.bin": digest, "tables.npz": record.sha256(job.folder / "tables.npz")},
    }
