"""Fetch: a source becomes one plain checkpoint folder: safetensors, tokenizer, manifest. Whole or absent."""

import importlib
import json
import pkgutil
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvgate import sources
from kvgate.jobs import hashed
from kvgate.jobs.entries.model import Source
from kvgate.jobs.job import Job
from kvgate.jobs.record import blocked, one_line
from kvgate.planning.module_facts import constants

_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json")


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
        left_out = facts.pop("left_out", {}) | architecture.pop("left_out")
        (part / "README.md").unlink(missing_ok=True)  # only its licence was of use
        files = {path.name: hashed.fresh(path, job.results) for path in sorted(part.iterdir())}
        shutil.rmtree(job.folder, ignore_errors=True)
        part.replace(job.folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    licence = source.get("licence") or facts["licence"] or "unknown"
    return {"source": source, "files": files, **facts, **architecture, "licence": licence, "left_out": left_out}


def _rooted(source: Source, base: Path) -> dict[str, object]:
    """The source with its local paths taken from the repository's folder."""
    given: dict[str, object] = {**source}
    local = constants("sources", source["kind"])["LOCAL"]
    return given | {name: str(base / str(given[name])) for name in local if name in given}


def _inspect(folder: Path) -> dict[str, Any]:
    """Load the checkpoint as everybody after this will, and say what it is.

    Raises Blocked on weights that are missing (transformers would fill in random ones), left over, truncated or not
    finite, and on an architecture that is no decoder with K and V.
    """
    import torch

    from kvgate.checkpoint import held, reference, stored

    config = _config(folder)
    weights = stored.read(folder)
    for name in weights.integers:
        if name.endswith(".weight"):
            raise blocked("weights", f"weight {name}: got integers, allowed: floats (dequantize the checkpoint first)")
    model = _model(folder, config, weights.dtypes)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise blocked("weights", f"weight {name}: got NaN or inf, allowed: finite values")
    left_out = held.hold(weights.contents, model)
    if not list(folder.glob("*.safetensors")):  # an old checkpoint: pickles are read once, here
        for path in folder.glob("*.bin*"):
            path.unlink()
        saved = folder / "saved"
        model.save_pretrained(saved)
        for path in saved.iterdir():
            path.replace(folder / path.name)  # not written over: a file here may be a link to the user's own
        saved.rmdir()
    try:
        _, states = reference.whole(model.float(), [0, 1])
    except Exception as error:
        raise blocked("architecture", f"architecture {config.model_type}: cannot work: {one_line(error)}") from error
    text = config.get_text_config()
    return {
        "architecture": type(model).__name__,
        "model_type": config.model_type,
        "vocabulary": int(text.vocab_size),
        "hidden": int(text.hidden_size),
        "positions": reference.context_limit(config),
        "states": {name: list(x.shape[1:]) for name, x in states.items()},
        "parameters": sum(x.numel() for x in model.parameters()),
        "tied": bool(text.tie_word_embeddings),
        "left_out": left_out,
    } | _tokenizer(folder)


def _config(folder: Path) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    given = _json(folder / "config.json")
    if given.get("quantization_config"):
        text = f"config.json: quantization_config: got {given['quantization_config'].get('quant_method')!r}"
        raise blocked("weights", f"{text}, allowed: none, weights of plain floats: dequantize them first")
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise blocked("architecture", f"config.json: cannot be read: {_cause(error, given)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise blocked(
            "architecture",
            f"architecture: got {config.model_type!r}, allowed: a decoder that AutoModelForCausalLM knows",
        )
    return config


def _json(path: Path) -> dict[str, Any]:
    """The keys and values of a JSON file. Raises Blocked with its name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise blocked("architecture", f"{path.name}: is no JSON: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise blocked("architecture", f"{path.name}: got {type(found).__name__}, allowed: keys and values")
    return found


def _model(folder: Path, config: Any, dtypes: frozenset[str]) -> Any:
    """The model in the one dtype that holds all of the files' values, whatever config.json says of it."""
    import torch
    from transformers import AutoModelForCausalLM

    halves = {frozenset({"BF16"}): torch.bfloat16, frozenset({"F16"}): torch.float16}
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=halves.get(dtypes, torch.float32),
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `held` names them
        )
    except Exception as error:
        text = _cause(error, _json(folder / "config.json"))
        raise blocked("weights", f"weights: cannot be read: {text}") from error
    model, report = found
    for what in ("missing_keys", "error_msgs"):
        if report.get(what):
            names = sorted(str(x) for x in report[what])
            raise blocked("weights", f"weights: {len(names)} {what.replace('_', ' ')}, the first is {names[0]}")
    return model.eval()


def _cause(error: Exception, config: Mapping[str, object]) -> str:
    """One line. A bare KeyError is the value of a key of config.json that transformers has no entry for."""
    if isinstance(error, KeyError) and error.args:
        for where, value in _leaves(config):
            if value == error.args[0]:
                return f"config.json: {where}: got {value!r}, allowed: one that transformers knows"
    return one_line(error)


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield where, value
        return
    for key, part in value.items():
        yield from _leaves(part, f"{where}.{key}" if where else key)


def _tokenizer(folder: Path) -> dict[str, Any]:
    from kvgate.checkpoint import reference

    if not any(path for x in _TOKENIZERS for path in folder.glob(x)):  # transformers makes an empty one
        raise blocked("tokenizer", f"tokenizer: got no file of one, allowed: {' or '.join(_TOKENIZERS)}")
    for path in folder.glob("tokenizer*.json"):
        _json(path)
    try:
        tokenizer = reference.load_tokenizer(folder)
    except Exception as error:
        raise blocked("tokenizer", f"tokenizer: cannot be read: {one_line(error)}") from error
    return {"tokenizer": {"tokens": len(tokenizer), "chat": bool(tokenizer.chat_template)}}
