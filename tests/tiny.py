"""A tiny random llama as a source, and jobs without the workflow. Not a test itself."""

import json
from pathlib import Path
from typing import Any

from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.stages import fetch, trace

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def random_source(**config: Any) -> dict[str, Any]:
    return {"kind": "random", "seed": 3, "config": LLAMA | config}


def fetch_job(results: Path, source: dict[str, Any], base: Path = Path()) -> Job:
    return Job("fetch", {"model": "tiny"}, {"source": source}, {}, results, base)


def fetched(results: Path, source: dict[str, Any] | None = None) -> Path:
    """Fetch and write the manifest, as the runner does. Returns the checkpoint's folder."""
    job = fetch_job(results, source or random_source())
    record.write(job.record, fetch.run(job) | {"status": "ok"})
    return job.folder


def trace_job(results: Path, program: dict[str, Any], base: Path, name: str = "program") -> Job:
    inputs = {"fetch": results / "models/tiny/checkpoint/manifest.json"}
    return Job("trace", {"model": "tiny", "program": name}, {"program": program}, inputs, results, base)


def traced(results: Path, text: str, base: Path, **program: Any) -> tuple[dict[str, Any], Path]:
    """Trace a text that is written into `base`. Returns the body and the trace.npz."""
    (base / "text.txt").write_text(text)
    job = trace_job(results, {"text": "text.txt", "tokens": 8, **program}, base)
    return trace.run(job), job.folder / "trace.npz"


def edit(path: Path, **changes: Any) -> None:
    """Change a checkpoint's .json as if fetch had written it so."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    relist(path.with_name("manifest.json"))


def relist(path: Path) -> None:
    """Let a record say what its files are now: as if its stage had written them so."""
    body = record.read(path)
    record.write(path, body | {"files": {name: record.sha256(path.parent / name) for name in body["files"]}})
