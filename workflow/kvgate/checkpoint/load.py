"""A checkpoint folder to the model's own code: with its weights (prepare), or as an empty shell (export)."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from kvgate.checkpoint import mapped, precise, refusals, seams, shims
from kvgate.jobs.record import blocked


def config(folder: Path) -> Any:
    """The folder's config. Raises record.Blocked where such a model cannot work."""
    refused = refusals.refusal(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    if refused:
        raise blocked("refused", refused)
    return AutoConfig.from_pretrained(folder)


def model(folder: Path) -> nn.Module:
    """The checkpoint's model, eager attention, untouched code, in torch's default type (precise.float64), in which its
    matrices stay in their files (kvgate.checkpoint.mapped).

    Raises record.Blocked on missing weights.
    """
    logging.disable_progress_bar()  # the log of a stage is read by people
    found = config(folder)
    attention = refusals.attention(found.to_dict())
    with mapped.loading():
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=found,
            dtype=torch.get_default_dtype(),
            attn_implementation=attention,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        text = f"checkpoint: got {len(missing)} tensors without weights, the first {missing[0]}"
        raise blocked("weights", text)
    precise.settle(loaded)
    return _settle(loaded)


def shell(folder: Path) -> nn.Module:
    """The model without weights (everything on the meta device), its attention calling our seams."""
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config(folder), dtype=torch.float32, attn_implementation="eager")
    return attach(_settle(made))


def attach(module: nn.Module) -> nn.Module:
    """Switch a model's attention over to our functions."""
    shims.apply(module)
    for part in module.modules():
        # Set on the object: the setter would check whether the class supports the name.
        if hasattr(part, "config") and hasattr(part.config, "_attn_implementation"):
            part.config._attn_implementation = seams.NAME
    return module


def _settle(module: nn.Module) -> nn.Module:
    module.config.use_cache = False
    return module.eval().requires_grad_(False)
