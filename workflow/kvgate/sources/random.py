"""Source `random`: random weights from a config, for tests.

{"kind": "random", "config": {"model_type": ..., ...}, "seed": 0, "tokenizer": optional folder, "licence": optional}.
Without a tokenizer a byte-level one of 259 tokens is made, with a chat template. Every PC makes the same: numpy draws
what transformers' own initialization asks for, in float64.
"""

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kvgate.jobs.record import blocked, one_line
from kvgate.sources import Fetched

REQUIRED = {"config": ""}  # keys, and the form of the text that they hold
OPTIONAL = {"seed": "", "tokenizer": ".+", "licence": ".+"}
LOCAL = ("tokenizer",)
START, END, UNKNOWN = "<|start|>", "<|end|>", "<|unknown|>"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


class Source(TypedDict):
    kind: str
    config: dict[str, object]  # of transformers
    seed: NotRequired[int]
    tokenizer: NotRequired[str]
    licence: NotRequired[str]


def fetch(source: Source, into: Path) -> Fetched:
    """Write a seeded random model and a tokenizer into `into`. Raises Blocked on a config that transformers refuses."""
    from transformers import AutoTokenizer

    seed = int(source.get("seed", 0))
    model = _model(dict(source["config"]), seed)
    given = source.get("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(given, local_files_only=True) if given else byte_tokenizer()
    if len(tokenizer) > model.config.get_text_config().vocab_size:
        text = f"random: got vocab_size {model.config.vocab_size}, allowed: at least the tokenizer's {len(tokenizer)}"
        raise blocked("vocabulary", text)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    return {"revision": str(seed), "licence": None}


def _model(config: dict[str, object], seed: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvgate.checkpoint import drawn, precise

    with precise.float64(), drawn.Drawn(seed):
        try:
            made = AutoConfig.for_model(config.pop("model_type", ""), **config)
            model = AutoModelForCausalLM.from_config(made, dtype=torch.float64)
        except Exception as error:
            text = f"random: transformers refuses the config: {one_line(error)}"
            raise blocked("architecture", text) from error
        with torch.no_grad():
            # Gains of 1 and biases of 0 would hide a graph that drops them.
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.empty_like(parameter).normal_()
    return model.to(torch.float32).eval()


def byte_tokenizer() -> Any:
    """A tokenizer with one token a byte and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token=START, eos_token=END, unk_token=UNKNOWN)
    made.chat_template = TEMPLATE
    return made
