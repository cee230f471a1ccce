"""Generate text with a bundle: tokens go to stdout as they are made, what was done to stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from kvgate.board import bundled
from kvgate.board.context import Context, Options, Run
from kvgate.board.engine import EngineError
from kvgate.board.terminal import Terminal
from kvgate.board.text import Stream, Text, Unavailable


def parser(folder: Path) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="generate.py", description=__doc__)
    made.add_argument("prompt", nargs="?", default="-", help="what the user says; - or nothing: read from stdin")
    made.add_argument("--system", metavar="TEXT", help="a system message before it")
    made.add_argument(
        "--ids", metavar="1,2,3", help="token ids instead of a prompt; prints ids (no tokenizer is needed)"
    )
    made.add_argument(
        "--max-tokens", type=bundled.number(int, 1), metavar="N", help="stop after N tokens (default: the full cache)"
    )
    made.add_argument(
        "--temperature",
        type=bundled.number(float, 0, 2),
        default=0.0,
        help="0: always the best token (default); above: draw one",
    )
    made.add_argument(
        "--top-p",
        type=bundled.number(float, 0, 1),
        default=1.0,
        help="draw from the likeliest that sum to it (default: 1)",
    )
    made.add_argument("--seed", type=bundled.number(int, 0), help="of the draw: the same one gives the same text")
    bundled.options(made, folder)
    return made


def main(argv: list[str], folder: Path) -> int:
    made = parser(folder)
    args = made.parse_args(argv)
    if args.ids is not None and args.prompt != "-":
        made.error("got a prompt and --ids, allowed: one of them")
    terminal = Terminal(args.show_runtime)
    out, context = terminal.out, None
    try:
        bundle = bundled.Bundle(args.bundle)
        text = bundle.text() if args.ids is None else None
        ids = _ids(args.ids) if text is None else text.chat(_messages(args))
        context = bundled.open_context(args, bundle, terminal)
        run = Run(len(ids))
        options = Options(args.max_tokens, args.temperature, args.top_p, args.seed)
        for piece in _pieces(context, ids, options, run, text):
            out.write(piece)
            out.flush()
        out.write("\n")
        out.flush()
        terminal.say(summary(run))
        return 0
    except (bundled.Refused, Unavailable, EngineError, ValueError) as error:
        terminal.say("generate: {}".format(bundled.one_line(error)))
        return 1
    except BrokenPipeError:  # whoever read has had enough
        return 0
    except KeyboardInterrupt:
        terminal.say("")
        return 130
    finally:
        if context is not None:
            context.close()


def summary(run: Run) -> str:
    """`5 + 12 tokens (stop): the first after 0.8 s, then 18.3 a second`."""
    rest = len(run.tokens) - 1
    rate = ", then {:.1f} a second".format(rest / run.seconds) if rest > 0 and run.seconds else ""
    return "{} + {} tokens ({}): the first after {:.2f} s{}".format(
        run.prompt, len(run.tokens), run.finish, run.first_seconds, rate
    )


def _pieces(context: Context, ids: list[int], options: Options, run: Run, text: Text | None) -> Iterator[str]:
    """Text as it becomes certain; without a tokenizer the ids themselves."""
    tokens = context.generate(ids, options, run)
    if text is None:
        for n, token in enumerate(tokens):
            yield " {}".format(token) if n else str(token)
        return
    stream = Stream(text.decode)
    for token in tokens:
        if token not in context.end_ids:
            yield stream.push(token)
    yield stream.finish()


def _messages(args: argparse.Namespace) -> list[dict[str, str]]:
    prompt = (sys.stdin.read() if args.prompt == "-" else args.prompt).strip()
    if not prompt:
        raise ValueError("prompt: got an empty text, allowed: at least one word")
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": prompt}]


def _ids(text: str) -> list[int]:
    try:
        return [int(x) for x in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError("--ids: got {!r}, allowed: whole numbers between commas".format(text)) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path()))
