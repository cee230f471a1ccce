"""Trace: the reference run of one program. Frozen token ids, logits, every layer's K and V."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from kvgate.jobs import record
from kvgate.jobs.entries.program import Text
from kvgate.jobs.job import Job
from kvgate.jobs.record import blocked, finding, one_line
from kvgate.serving import today
from kvgate.serving.control import steers

KINDS = ("chat", "text", "calibration")


class Drawn(TypedDict):
    """Which tokens the model drew, and how."""

    first: int
    count: int
    seed: int
    temperature: float
    top_k: int


# A key is no name of Python's.
Tokenizer = TypedDict(
    "Tokenizer",
    {
        "class": str,
        "tokens": int,
        "chat_template_sha256": str | None,
        "today": str | None,  # the day that the template was told, where it asks for one
    },
)


def run(job: Job) -> dict[str, Any]:
    """Reads the checkpoint and the program's text, writes trace.npz. Raises Blocked on a text that cannot be run."""
    import torch

    from kvgate.checkpoint import reference

    torch.set_num_threads(1)  # the same bytes whatever the number of cores
    program: Text = job.config["program"]
    folder = job.checkpoint()
    name = job.wildcards["program"]
    model, tokenizer = reference.load(folder), reference.load_tokenizer(folder)
    limit, text = reference.context_limit(model.config), _text(job.base / program["text"], program["text"])
    chat = program["kind"] == "chat"
    if program["kind"] not in KINDS:
        raise blocked("program", f"program {name}: got kind {program['kind']!r}, known: {', '.join(KINDS)}")
    drawn = program.get("generated", 0)
    ids = prompt_ids(tokenizer, text) if chat else text_ids(tokenizer, text, program["tokens"] - drawn)
    check_ids(ids, model.config.get_text_config().vocab_size, limit, chat, drawn)
    ends = reference.end_ids(model, tokenizer)
    new = min(program["tokens"], limit - len(ids) if limit else program["tokens"]) if chat else 0
    given = len(ids)
    ids += _drawn(model, ids, drawn, ends)
    found = reference.trace(
        model, ids, new, ends, program["kind"] != "calibration", lambda x: print(f"{name}: {x}", file=sys.stderr)
    )
    if drawn:
        found = replace(found, prompt=given)
    path = job.folder / "trace.npz"
    part = record.partial(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        found.save(str(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    scored = program["kind"] == "text" and found.logits is not None
    return {
        "kind": program["kind"],
        "tokens": found.tokens.tolist(),
        "prompt": found.prompt,
        "ended": found.ended,
        "end_ids": list(found.end_ids),
        "drawn": _how(found.tokens[:given].tolist(), drawn) if drawn else None,
        "text": tokenizer.decode(found.tokens[found.prompt :].tolist()),
        "perplexity": reference.perplexity(found.tokens, found.logits) if scored else None,  # type: ignore[arg-type]
        "states": len(found.states) + len(found.replaced),
        "tokenizer": _facts(tokenizer, chat),
        "findings": differences(model, tokenizer, ends) if chat else [],
        "files": {"trace.npz": record.sha256(path)},
    }


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """A chat's ids: the chat template applied once; the tokenizer's own way where it has no template.

    Raises Blocked on a template that cannot be used, and on a text that holds tokens which steer the model: a template
    would be applied twice, and a bundle (board/plain) takes their spelling in a content as plain text.
    """
    from kvgate.checkpoint import reference

    special = _steering(tokenizer) & set(tokenizer(text, add_special_tokens=False)["input_ids"])
    if special:
        token = tokenizer.convert_ids_to_tokens(min(special))
        raise blocked(
            "prompt", f"prompt: got the special token {token!r} in the text, allowed: plain text without a template"
        )
    if not _template(tokenizer):
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    try:
        return list(reference.chat(tokenizer, messages, add_generation_prompt=True))
    except Exception as error:  # whatever a template does
        raise blocked("template", f"chat template: {one_line(error)}") from None


def differences(model: Any, tokenizer: Any, ends: Sequence[int]) -> list[dict[str, Any]]:
    """Findings on a chat: where its tokens are not what people get from transformers' `generate`."""
    from kvgate.checkpoint import reference

    found = []
    settings = ", ".join(f"{name} {str(x)[:60]}" for name, x in reference.unheeded(model).items())
    if settings:
        text = f"generation_config.json: {settings}: not used, the trace and the bundle take the best token each step"
        found.append(finding("generation", text))
    token = _open_turn(tokenizer, ends)
    if token is not None:
        name = tokenizer.convert_ids_to_tokens(token)
        text = f"the chat template ends a turn with {name!r}, which no list of end ids has: an answer goes on after it"
        found.append(finding("turn_end", text, token=token))
    return found


def _open_turn(tokenizer: Any, ends: Sequence[int]) -> int | None:
    """The token by which the template ends an answer, where it ends no text."""
    from kvgate.checkpoint import reference

    answer = "kvgate"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
    try:
        _, shown, after = reference.chat(tokenizer, messages, tokenize=False).rpartition(answer)
    except Exception:  # a template may refuse what this one has no part for
        return None
    ids = tokenizer(after.strip(), add_special_tokens=False)["input_ids"] if shown else []
    return int(ids[0]) if ids and ids[0] in _steering(tokenizer) and ids[0] not in ends else None


def _steering(tokenizer: Any) -> set[int]:
    """The tokens that a template alone may make."""
    added = {n for n, x in tokenizer.added_tokens_decoder.items() if steers(x.content, x.special)}
    return added | set(tokenizer.all_special_ids)


def _template(tokenizer: Any) -> str | None:
    from kvgate.checkpoint import reference

    try:
        return reference.template(tokenizer)
    except ValueError as error:
        raise blocked("template", str(error)) from None


def text_ids(tokenizer: Any, text: str, count: int) -> list[int]:
    """The first `count` ids of a text, the tokenizer's own start token among them if it sets one."""
    ids = list(tokenizer(text)["input_ids"])
    if len(ids) < count:
        raise blocked("text", f"text too short: got {len(ids)} tokens, needed {count}")
    return ids[:count]


def check_ids(ids: list[int], vocabulary: int, limit: int | None, generates: bool, drawn: int = 0) -> None:
    """Raises Blocked on no ids, on an id outside the vocabulary, and on more ids than the model has positions for.

    drawn: how many are still to come.
    """
    if not ids:
        raise blocked("prompt", "prompt: got no tokens, allowed: at least 1")
    wrong = [x for x in ids if not 0 <= x < vocabulary]
    if wrong:
        raise blocked("token", f"token id: got {wrong[0]}, allowed: 0 to {vocabulary - 1}")
    if limit is not None and len(ids) + drawn + generates > limit:
        what = "prompt" if generates else "text"
        raise blocked(
            "context",
            f"{what}: got {len(ids) + drawn} tokens, allowed: at most {limit - generates} (the context limit)",
        )


def _drawn(model: Any, ids: list[int], count: int, ends: tuple[int, ...]) -> list[int]:
    from kvgate.checkpoint import reference

    try:
        return reference.draw(model, ids, count, ends) if count else []
    except FloatingPointError as error:
        raise blocked("nan", str(error)) from None


def _how(given: list[int], count: int) -> Drawn:
    from kvgate.checkpoint import reference

    return {
        "first": len(given),
        "count": count,
        "seed": reference.seed(given),
        "temperature": reference.TEMPERATURE,
        "top_k": reference.TOP_K,
    }


def _text(path: Path, name: str) -> str:
    if not path.is_file():
        raise blocked("text", f"text {name}: got no such file")
    text = path.read_text(encoding="utf-8").strip()
    if not text:
        raise blocked("prompt", f"text {name}: got an empty text, allowed: at least one word")
    return text


def _facts(tokenizer: Any, chat: bool) -> Tokenizer:
    template = _template(tokenizer) if chat else None
    return {
        "class": type(tokenizer).__name__,
        "tokens": len(tokenizer),
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
        "today": today.TODAY.date().isoformat() if template and today.asked(template) else None,
    }
