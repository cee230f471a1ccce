"""What the config says of programs and calibration texts, checked while planning. Every error is one line.

Stands before every run, so nothing heavy is imported here. Tokens are counted by the trace: here a text is its bytes.
"""

from collections.abc import Iterable
from pathlib import Path

from kvgate.compiler import overlap
from kvgate.jobs.entries.program import Program
from kvgate.planning.config import ConfigError
from kvgate.planning.entries import Config
from kvgate.planning.module_facts import cacheless

_GIVEN = 4  # tokens at least that a drawn text is drawn after: fewer could begin any text


def check(config: Config, base: Path) -> None:
    """Every program by itself, the texts of those that the sweep uses, and no text on both sides."""
    entries = config["programs"]
    for name, entry in entries.items():
        _check_generated(f"programs.{name}.generated", entry)
    for name in config["sweep"]["programs"]:
        if not entries[name]["histories"]:
            raise ConfigError(f"programs.{name}.histories: got [], allowed: isolated, forced, free")
        _check_text(f"programs.{name}", entries[name], base)
    for name in config["calibration"]["texts"]:
        _check_text(f"programs.{name}", entries[name], base)
    _check_unseen(config, base)


def check_calibration(where: str, config: Config, strategy: str, quant: str) -> None:
    """Whether the texts reach the strategy's capacity, drawn tokens within it, and have as many states as samples."""
    entries, texts, wanted = config["programs"], config["calibration"]["texts"], config["calibration"]["samples"]
    capacity, most = config["strategies"][strategy]["capacity"], 0
    if not texts:
        raise ConfigError(f"{where}: quant {quant} calibrates, calibration.texts: got [], allowed: at least one")
    for name in texts:
        tokens, drawn = entries[name]["tokens"], entries[name]["generated"]
        if tokens < capacity:
            raise ConfigError(
                f"programs.{name}.tokens: got {tokens}, too short to calibrate the "
                f"capacity {capacity} of strategy {strategy}"
            )
        if drawn and tokens - drawn >= capacity:
            raise ConfigError(
                f"programs.{name}.generated: got {drawn} of {tokens} tokens, none of them within the "
                f"capacity {capacity} of strategy {strategy}"
            )
        most += capacity - (tokens - drawn if drawn else 0)
    if all(entries[name]["generated"] for name in texts):
        most += min(entries[name]["tokens"] - entries[name]["generated"] for name in texts) * len(texts)
    if wanted > most:
        raise ConfigError(f"calibration.samples: got {wanted}, allowed: at most {most} positions")


def check_context(where: str, config: Config, model: str, limit: int, calibrates: bool) -> None:
    """Whether the texts fit the model's context of `limit` tokens; a chat is cut to it by the trace.

    calibrates: the row reads the calibration texts too.
    """
    texts = [name for name in config["sweep"]["programs"] if config["programs"][name]["kind"] == "text"]
    for name in texts + (config["calibration"]["texts"] if calibrates else []):
        tokens = config["programs"][name]["tokens"]
        if tokens > limit:
            raise ConfigError(
                f"{where}: program {name} has {tokens} tokens, model {model} takes at most {limit} tokens"
            )


def unreached(config: Config, strategies: Iterable[str]) -> list[str]:
    """Strategies whose cache no program of the sweep is sure to take to its last slot, in a line: a row is not `pass`
    where that was not seen (gates.capacity). A chat's own end is not known while planning."""
    programs = (config["programs"][name] for name in config["sweep"]["programs"])
    texts = [x["tokens"] for x in programs if x["kind"] == "text" and {"forced", "free"} & set(x["histories"])]
    longest = max(texts, default=0)
    entries = {name: config["strategies"][name] for name in dict.fromkeys(strategies)}
    short = [name for name, x in entries.items() if x["capacity"] > longest and not cacheless(x)]
    if not short:
        return []
    slots = max(entries[name]["capacity"] for name in short)
    return [f"  no forced text of {slots} tokens: rows of {', '.join(short)} may not pass, their cache is not filled"]


def _check_generated(where: str, entry: Program) -> None:
    drawn = entry["generated"]
    if drawn and entry["kind"] != "calibration":
        raise ConfigError(f"{where}: got {drawn} on kind {entry['kind']}, allowed: on kind calibration only")
    if drawn and drawn > entry["tokens"] - _GIVEN:
        allowed = f"at most {entry['tokens'] - _GIVEN} of its {entry['tokens']} tokens"
        raise ConfigError(f"{where}: got {drawn}, allowed: {allowed}, the first {_GIVEN} are the text's")


def _check_text(where: str, entry: Program, base: Path) -> None:
    try:
        text = (base / entry["text"]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}.text: {entry['text']} cannot be read: {error}".splitlines()[0]) from None
    if not text.strip():
        raise ConfigError(f"{where}.text: {entry['text']} is empty")
    # A token is at least a byte, so this much is known without the tokenizer; the trace counts the tokens themselves.
    given = entry["tokens"] - entry["generated"]
    if entry["kind"] != "chat" and len(text.encode()) < given:
        raise ConfigError(f"{where}.text: got {len(text.encode())} bytes, too short for {given} tokens")


def _check_unseen(config: Config, base: Path) -> None:
    """No calibration text says what a program verifies, under whatever name; the build compares the tokens."""
    entries = config["programs"]

    def words(name: str) -> str:
        return " ".join((base / entries[name]["text"]).read_text(encoding="utf-8").split())

    def used(name: str) -> list[str]:
        """At most: a word has at least one token."""
        return words(name).split()[: entries[name]["tokens"] - entries[name]["generated"]]

    verified = {name: words(name) for name in config["sweep"]["programs"]}
    for n, name in enumerate(config["calibration"]["texts"]):
        mine = words(name)
        for program, theirs in verified.items():
            shorter, longer = sorted((mine, theirs), key=len)
            same = mine == theirs
            # A prompt is short, and stands in a chat template: a text may well begin with its word.
            if entries[program]["kind"] != "chat":
                share = overlap.shared(used(name), used(program))
                same = longer.startswith(shorter) or share >= overlap.MOST
            if same:
                raise ConfigError(
                    f"calibration.texts[{n}]: {name} has the text of program {program}, allowed: another text"
                )
