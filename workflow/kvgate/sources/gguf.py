"""Source `gguf`: a local .gguf file, {"kind": "gguf", "path": file, "sha256": optional, "licence": optional}.

transformers' own loader reads weights and tokenizer. Quantized tensors become float32: every value of the file's
grids is exact there, float16 would round scale times code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from kvgate.record import blocked
from kvgate.sources import folder

REQUIRED = {"path": ""}  # keys, and the form of what they hold
MAGIC = b"GGUF"


def fetch(source: dict[str, Any], into: Path) -> dict[str, Any]:
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
        model, tokenizer = _load(path)
        licence = source.get("licence") or _licence(path)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    return {"revision": folder.sha256(path), "licence": licence}


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


def _load(path: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:  # the readers raise whatever the damaged bytes lead to
        kind = "architecture" if "architecture" in str(error) else "corrupt"
        raise blocked(kind, f"gguf {path.name}: cannot be read: {folder.one_line(error)}") from error
    # save_pretrained refuses a model that still counts as quantized; the weights are plain float32 by now.
    model.hf_quantizer = None
    model.is_quantized = False
    for owner, name in ((model.config, "quantization_config"), (model, "quantization_method")):
        if hasattr(owner, name):
            delattr(owner, name)
    return model, tokenizer


def _licence(path: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("general.license")
    return str(field.contents()) if field else None
