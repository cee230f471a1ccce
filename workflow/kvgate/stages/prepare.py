"""Prepare: a checkpoint becomes weights.bin, every tensor in the orientation that the graph uses, and its facts."""

import importlib
import math
import pkgutil
import sys
from typing import Any

from kvgate import weights
from kvgate.jobs import record
from kvgate.jobs.entries.weights import Weights
from kvgate.jobs.job import Job
from kvgate.planning.preparations import HOOKS

FORMS = ("recipe", "plain")
_NOTHING = 1e-12  # an error below is float64's own, and the PC's


def preparation(name: str) -> Any:
    """The module of a step of a weight preparation. Raises ValueError naming those known."""
    known = sorted(x.name for x in pkgutil.iter_modules(weights.__path__))
    if name not in known:
        raise ValueError(f"weight preparation: got {name!r}, known: {', '.join(known)}")
    return importlib.import_module(f"kvgate.weights.{name}")


def run(job: Job) -> dict[str, Any]:
    """Writes weights.bin and tables.npz (embedding rows [V, C], learned positions [P, C], changed bases of K and V);
    where a preparation moves weights on purpose moved.npz too, what they give (hooks.Work.moved); where one
    searched choice.yaml, an entry of weights.yaml that makes the same without a search.

    The body: the spec, the index of weights.bin, which matrices are sums, have a widened input or stay in float16, the
    final form with its reason, the self-check's error. Raises record.Blocked where the model or a preparation cannot
    work.
    """
    import numpy as np
    import torch

    from kvgate.checkpoint import load, precise
    from kvgate.export import blob
    from kvgate.prepare.choose_form import prepare
    from kvgate.prepare.preparation import capabilities

    if job.wildcards["form"] not in FORMS:
        raise ValueError(f"form: got {job.wildcards['form']!r}, known: {', '.join(FORMS)}")
    asked: Weights = job.config["weights"]
    steps = [(step["name"], preparation(step["name"]), step["options"]) for step in asked["steps"]]
    with torch.no_grad(), precise.float64():
        model = load.model(job.checkpoint())
        for name, step, options in steps:
            families = capabilities(step).FAMILIES
            if families and model.config.model_type not in families:
                _refuse(f"preparation {name}: got a {model.config.model_type}, known: {', '.join(families)}")
            if hasattr(step, "checkpoint"):
                print(f"preparation {name}: the model", file=sys.stderr)
                try:
                    step.checkpoint(model, **options)
                except ValueError as why:
                    _refuse(f"preparation {name}: {why}")
        prepared = prepare(model, job.wildcards["form"])
        _refuse_replaced(prepared.spec, steps)
        work = _changed(job, prepared, steps)
        index, digest = blob.write(job.folder / "weights.bin", work.tensors())
        tables = {"embedding": prepared.embedding.single(), **work.bases()}
        if prepared.positions is not None:
            tables["position"] = precise.single(prepared.positions)
        files = {"tables.npz": tables}
        if any(capabilities(step).MOVES for _, step, _ in steps):
            files["moved.npz"] = work.moved()
    for name in ("moved.npz", "choice.yaml"):
        (job.folder / name).unlink(missing_ok=True)
    for name, arrays in files.items():
        part = record.partial(job.folder / name)
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.replace(job.folder / name)
    names = list(files)
    if work.chosen:
        record.write_bytes(job.folder / "choice.yaml", _choice(job, work.chosen).encode())
        names.append("choice.yaml")
    return {
        "form": prepared.spec.form,
        "reason": prepared.spec.reason,
        "error": float(f"{max(prepared.error, _NOTHING):.1e}"),
        "spec": prepared.spec.to_dict(),
        "tensors": index,
        "sums": work.sums,
        "widened": work.widened,
        "kept": work.kept,
        "compensated": any(capabilities(step).COMPENSATES for _, step, _ in steps),
        "parameter_bytes": sum(4 * math.prod(x["shape"]) for x in index.values()),
        "files": {"weights.bin": digest} | {name: record.sha256(job.folder / name) for name in names},
    }


def _refuse_replaced(spec: Any, steps: list[Any]) -> None:
    """A step that changes weights knows the tensors of attention, not those of layers that keep other states."""
    changing = [name for name, step, _ in steps if any(hasattr(step, hook) for hook in HOOKS)]
    if changing and spec.mixers:
        _refuse(f"preparation {changing[0]}: got {spec.mixers[0].module}, which caches no K and V, allowed: plain")


def _choice(job: Job, chosen: list[dict[str, Any]]) -> str:
    """A file for --configfile: the entry with the steps that were chosen in the place of the search."""
    import yaml

    given = job.config["weights"]["steps"]
    (at,) = (n for n, step in enumerate(given) if hasattr(preparation(step["name"]), "matrices"))
    name, steps = f"{job.wildcards['weights']}_chosen", [*given[:at], *chosen, *given[at + 1 :]]
    return (
        f"# Weights that need no search: what {given[at]['name']} with {given[at]['options']} chose for the model\n"
        f"# {job.wildcards['model']}. Put {name} into a sweep of yours, with the quant that the search had,\n"
        "# and give both files to --configfile.\n"
    ) + yaml.safe_dump({"weights": {name: {"steps": steps, "calibrate": True}}}, sort_keys=False)


def _changed(job: Job, prepared: Any, steps: list[Any]) -> Any:
    """The prepared model after all steps (hooks.Work)."""
    from kvgate.prepare import hooks

    texts = [job.file(label, "trace.npz") for label in job.labels("calibration")]
    work = hooks.Work(prepared, texts)
    try:
        for name, step, options in steps:
            for hook in HOOKS[1:]:
                if hasattr(step, hook):
                    print(f"preparation {name}: {hook}", file=sys.stderr)
                    getattr(work, hook)(step, options)
    except ValueError as why:
        _refuse(f"preparation {name}: {why}")
    return work


def _refuse(text: str) -> None:
    raise record.blocked("preparation", text)
