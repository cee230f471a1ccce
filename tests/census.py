"""Which decoder families work: each model type of AutoModelForCausalLM, tiny and random, through the real stages.

`make families` writes tests/FAMILIES.md; `make families NAMES="llama mpt"` prints those rows only.
"""

import dataclasses
import json
import logging
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import families
import graphs
import torch
import transformers
from kvgate.checkpoint import reference, refusals
from kvgate.jobs import record
from kvgate.jobs.record import Blocked
from kvgate.observe import observe
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PAGE = Path(__file__).with_name("FAMILIES.md")
PROMPT = [5, 60, 23, 31]
STRATEGY = "cpu_managed"
CAPACITY = 16  # tokens: more than three windows of the tiny models
LARGEST = 20_000_000  # parameters of a model that counts as tiny
TOLERANCE = 1e-4  # normalized L2 of a step's logits
WORKS = "yes"


@dataclass(frozen=True)
class Row:
    """A family in the table. equal: WORKS, or what is not."""

    family: str
    form: str  # of the graph; "" where there is none
    equal: str
    reason: str = ""  # why the form is not the recipe, or why there is no graph

    def text(self) -> str:
        return f"| {self.family} | {self.form} | {self.equal} | {self.reason} |"


def kinds() -> list[str]:
    """Every family of the table: the model types, and variants of them."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *families.FAMILIES})


def judge(family: str, folder: Path) -> Row:
    """Make the family's random model in `folder`, and hold its graph's own generation to Hugging Face's."""
    reason = ""
    try:
        config = families.config(family)
    except Exception as why:  # a config class that does not take the common keys: some are refused whatever they say
        reason = f"no tiny config: {_line(why)}"
        try:
            config = transformers.CONFIG_MAPPING[family]()
        except Exception:  # transformers' own defaults contradict each other
            return Row(family, "", "not tried", reason)
    refused = refusals.refusal(json.loads(config.to_json_string(use_diff=False)))
    if refused:
        return Row(family, "", "refused", refused)
    if reason:
        return Row(family, "", "not tried", reason)
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if count > LARGEST:
            return Row(family, "", "not tried", f"no tiny config: {count} parameters")
        model = graphs.Model.of(folder, family)
        wanted = _generated(model.checkpoint)
    except Exception as why:
        return Row(family, "", "not tried", f"no tiny model that transformers itself runs: {_line(why)}")
    try:
        return _ran(family, model, wanted)
    except (Blocked, ValueError) as why:
        return Row(family, "", "refused", _line(why))
    except Exception as why:  # of torch's exporter; a row of it would be blocked by this
        return Row(family, "", "fails", f"{type(why).__name__}: {_line(why)}")


def _ran(family: str, model: graphs.Model, wanted: list[int]) -> Row:
    trace = reference.trace(reference.load(model.checkpoint), wanted)
    trace = dataclasses.replace(trace, prompt=len(PROMPT))
    graph = model.export(STRATEGY, capacity=CAPACITY)
    found = observe(graph.engine, graph.host(), trace, ["free"])
    unequal = []
    if list(found["free/tokens"]) != wanted[len(PROMPT) :]:
        unequal.append("tokens")
    if not max(graphs.worst(found, trace, "forced")) <= TOLERANCE:
        unequal.append("logits")
    return Row(family, graph.contract.form, f"not {' and '.join(unequal)}" if unequal else WORKS, graph.contract.reason)


def _generated(checkpoint: Path) -> list[int]:
    """Prompt and tokens by transformers' own `generate`, greedy, over its cache, until our cache would be full."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=CAPACITY + 1 - len(PROMPT), do_sample=False, pad_token_id=0
    )
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids))[0].tolist()


def _line(why: Exception) -> str:
    text = " ".join(str(why).split()) or type(why).__name__
    return text.replace("|", "/")[:200]


def rows(names: list[str]) -> list[Row]:
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found.append(judge(name, Path(folder)))
        print(found[-1].text(), flush=True)
    return found


def page(found: list[Row]) -> str:
    works = sum(row.equal == WORKS for row in found)
    lines = [
        "# Decoder families",
        "",
        f"transformers {transformers.__version__}: {works} of {len(found)} families of AutoModelForCausalLM work.",
        "Made by `make families` from tiny random models; do not edit.",
        "",
        f"`equal`: in ONNX Runtime the graph of {STRATEGY} gives the logits and, over a generation to the last slot,",
        "the tokens of transformers' own `generate`. `form`: `recipe` is what the compiler fuses best, `plain` the",
        "model's own code; `reason` says why it is not the recipe, or why there is no graph.",
        "",
        "| family | form | equal | reason |",
        "|---|---|---|---|",
        *(row.text() for row in found),
    ]
    return "\n".join(lines) + "\n"


def quiet() -> None:
    """Nothing but the rows: the stages say what they do, the libraries what they think of tiny models."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


if __name__ == "__main__":
    quiet()
    made = rows(sys.argv[1:] or kinds())
    if not sys.argv[1:]:
        record.write_bytes(PAGE, page(made).encode())
