"""Source `gguf`: a local .gguf file, {"kind": "gguf", "path": file, "sha256": optional, "licence": optional}.

transformers' own loader reads weights and tokenizer, after `gguffile` has read keys and tensors by itself, and what it
made is held to them. Quantized tensors become float32: every value of the file's grids is exact there, float16 would
round scale times code. The path is relative to the repository.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kvgate.jobs.record import Blocked, blocked, one_line
from kvgate.sources import Fetched, folder

REQUIRED = {"path": ".+"}  # keys, and the form of the text that they hold
OPTIONAL = {"sha256": "[0-9a-f]{64}", "licence": ".+"}
LOCAL = ("path",)
MAGIC = b"GGUF"


class Source(TypedDict):
    kind: str
    path: str
    sha256: NotRequired[str]
    licence: NotRequired[str]


def fetch(source: Source, into: Path) -> Fetched:
    """Write the checkpoint in safetensors and the tokenizer into `into`. Raises Blocked on a bad file."""
    path = Path(source["path"])
    if not path.is_file():
        raise blocked("missing", f"gguf {source['path']}: got no such file, allowed: a GGUF file")
    folder.hold(path, source.get("sha256"), f"gguf {path.name}")
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise blocked("corrupt", f"gguf {path.name}: got first bytes {magic!r}, allowed: {MAGIC!r}")
    with _read_once():
        try:
            model, tokenizer, licence, left_out = _load(path)
        except Blocked:
            raise
        except Exception as error:  # the readers raise whatever the damaged bytes lead to
            kind = "architecture" if "architecture" in str(error) else "corrupt"
            raise blocked(kind, f"gguf {path.name}: cannot be read: {one_line(error)}") from error
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    return {"revision": folder.sha256(path), "licence": licence, "left_out": left_out}


@contextmanager
def _read_once() -> Iterator[None]:
    """The loader opens the file for config, weights and tokenizer, and a header of 49,152 tokens takes seconds."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(reader)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        gguf.GGUFReader = reader  # type: ignore[misc]


def _load(path: Path) -> tuple[Any, Any, str | None, dict[str, str]]:
    """The model, the tokenizer, the licence, what is left out and why. Raises Blocked, and whatever the readers do."""
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from kvgate.checkpoint import gguf_file, held

    file = gguf_file.File(gguf.GGUFReader(str(path)), f"gguf {path.name}")
    file.check()
    where: dict[str, object] = {"gguf_file": path.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(str(path.parent), **where)
    gguf_file.configure(config, file)
    model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), config=config, dtype=torch.float32, **where)
    left_out = file.left_out(_tokenizer_keys(file.value("tokenizer.ggml.pre"))) | held.hold(file.contents(), model)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
    model.generation_config.eos_token_id = file.end_ids() or None
    # save_pretrained refuses a model that still counts as quantized; the weights are plain float32 by now.
    model.hf_quantizer = None
    model.is_quantized = False
    for owner, name in ((model.config, "quantization_config"), (model, "quantization_method")):
        if hasattr(owner, name):
            delattr(owner, name)
    return model, tokenizer, file.value("general.license"), left_out


def _tokenizer_keys(split: str | None) -> set[str]:
    """The keys that transformers makes a tokenizer of. Of names for how text is split it knows some."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        GGUF_TOKENIZER_MAPPING,
    )

    read = {f"tokenizer.{x}" for part in GGUF_TOKENIZER_MAPPING.values() for x in part}
    return read if split in GGUF_PRE_TOKENIZER_SPLITS else read - {"tokenizer.ggml.pre"}
