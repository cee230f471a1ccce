"""Fetch: a source becomes one plain checkpoint folder: safetensors, tokenizer, manifest. Whole or absent."""

import importlib
import pkgutil
import shutil
import sys
from pathlib import Path
from typing import Any

from kvgate import hashed, sources
from kvgate.job import Job
from kvgate.record import blocked


def known() -> list[str]:
    """The kinds of sources: the modules of the folder `sources`."""
    return sorted(x.name for x in pkgutil.iter_modules(sources.__path__))


def run(job: Job) -> dict[str, Any]:
    """Reads the source, writes the checkpoint's files. Raises Blocked where there is no usable checkpoint."""
    source = job.config["source"]
    kind = source.get("kind")
    if kind not in known():
        text = f"source kind: got {kind!r}, known: {', '.join(known())}"
        raise blocked("source", text)
    print(f"fetch {job.wildcards['model']} from {kind}", file=sys.stderr)
    part = job.folder.with_name(f".{job.folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a killed job
    part.mkdir(parents=True)
    try:
        facts = importlib.import_module(f"kvgate.sources.{kind}").fetch(_rooted(source, job.base), part)
        architecture = _inspect(part)
        (part / "README.md").unlink(missing_ok=True)  # only its licence was of use
        files = {path.name: hashed.fresh(path, job.results) for path in sorted(part.iterdir())}
        shutil.rmtree(job.folder, ignore_errors=True)
        part.replace(job.folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    licence = source.get("licence") or facts["licence"] or "unknown"
    return {"source": source, "files": files, **facts, **architecture, "licence": licence}


def _rooted(source: dict[str, Any], base: Path) -> dict[str, Any]:
    """The source with its local paths taken from the repository's folder."""
    return source | {name: str(base / source[name]) for name in ("path", "tokenizer") if name in source}


def _inspect(folder: Path) -> dict[str, Any]:
    """Load the checkpoint as everybody after this will, and say what it is.

    Raises Blocked on weights that are missing (transformers would fill in random ones), truncated or not finite, and
    on an architecture that is no decoder with K and V.
    """
    import torch

    from kvgate import reference

    config = _config(folder)
    model = _model(folder, config)
    if not list(folder.glob("*.safetensors")):  # an old checkpoint: pickles are read once, here
        for path in folder.glob("*.bin*"):
            path.unlink()
        saved = folder / "saved"
        model.save_pretrained(saved)
        for path in saved.iterdir():
            path.replace(folder / path.name)  # not written over: a file here may be a link to the user's own
        saved.rmdir()
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise blocked("weights", f"weight {name}: got NaN or inf, allowed: finite values")
    try:
        _, keys, values = reference.whole(model.float(), [0, 1])
    except Exception as error:
        raise blocked("architecture", f"architecture {config.model_type}: cannot work: {_line(error)}") from error
    text = config.get_text_config()
    return {
        "architecture": type(model).__name__,
        "model_type": config.model_type,
        "vocabulary": int(text.vocab_size),
        "hidden": int(text.hidden_size),
        "positions": reference.context_limit(config),
        "layers": [
            {"kv_heads": k.shape[1], "key_size": k.shape[2], "value_size": v.shape[2]}
            for k, v in zip(keys, values, strict=True)
        ],
        "parameters": sum(x.numel() for x in model.parameters()),
        "tied": bool(text.tie_word_embeddings),
    } | _tokenizer(folder)


def _config(folder: Path) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise blocked("architecture", f"config.json: cannot be read: {_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise blocked(
            "architecture",
            f"architecture: got {config.model_type!r}, allowed: a decoder that AutoModelForCausalLM knows",
        )
    return config


def _model(folder: Path, config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype="auto",
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise blocked("weights", f"weights: cannot be read: {_line(error)}") from error
    model, report = found
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(what):
            names = sorted(str(x) for x in report[what])
            raise blocked("weights", f"weights: {len(names)} {what.replace('_', ' ')}, the first is {names[0]}")
    return model.eval()


def _tokenizer(folder: Path) -> dict[str, Any]:
    from kvgate import reference

    try:
        tokenizer = reference.load_tokenizer(folder)
    except Exception as error:
        raise blocked("tokenizer", f"tokenizer: cannot be read: {_line(error)}") from error
    return {"tokenizer": {"tokens": len(tokenizer), "chat": bool(tokenizer.chat_template)}}


def _line(error: Exception) -> str:
    from kvgate.sources.folder import one_line

    return one_line(error)
