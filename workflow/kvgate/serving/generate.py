"""Generate text with a bundle: tokens go to stdout as they are made, what was done to stderr."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from kvgate.serving import arguments, bundled
from kvgate.serving.context import Context, Run
from kvgate.serving.pieces import pieces
from kvgate.serving.talk import Talk
from kvgate.serving.terminal import Terminal
from kvgate.serving.text import Text


def parser(folder: Path) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="generate.py", description=__doc__)
    made.add_argument(
        "prompt", nargs="?", type=bundled.text, default="-", help="what the user says; - or nothing: read from stdin"
    )
    made.add_argument(
        "--chat", action="store_true", help="a conversation: one turn a line, /help lists what else there is"
    )
    made.add_argument("--system", type=bundled.text, metavar="TEXT", help="a system message before it")
    made.add_argument("--system-file", type=Path, metavar="FILE", help="the system message from a file in UTF-8")
    made.add_argument(
        "--ids", metavar="1,2,3", help="token ids instead of a prompt; prints ids (no tokenizer is needed)"
    )
    made.add_argument(
        "--stop",
        type=bundled.text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end before it (repeatable)",
    )
    arguments.sampling(made)
    bundled.options(made, folder)
    return made


def _parsed(argv: list[str], folder: Path) -> argparse.Namespace:
    made = parser(folder)
    args = made.parse_args(argv)
    if args.ids is not None and (args.prompt != "-" or args.chat or args.stop):
        made.error("got a prompt and --ids, allowed: one of them; --chat and --stop are for text")
    if args.system is not None and args.system_file is not None:
        made.error("got --system and --system-file, allowed: one of them")
    if "" in args.stop:
        made.error("argument --stop: got an empty text, allowed: at least one character")
    return args


def main(argv: list[str], folder: Path) -> int:
    with bundled.ends_at_once():
        args = _parsed(argv, folder)
        terminal, context = Terminal(args.show_runtime), None
    try:
        with bundled.ends_at_once():
            bundle = bundled.Bundle(args.bundle)
            text = bundle.text() if args.ids is None else None
            system = _system(args)
            ids = [] if args.chat else _ids(args.ids) if text is None else text.chat(_messages(args.prompt, system))
            context = bundled.open_context(args, bundle, terminal)
        if args.chat and text is not None:
            talk = Talk(context, text, arguments.chosen(args), args.stop, system, terminal)
            talk.run("" if args.prompt == "-" else args.prompt)
            return 0
        run = Run(len(ids))
        for piece in _pieces(context, ids, args, run, text):
            terminal.out.write(piece)
            terminal.out.flush()
        terminal.out.write("\n")
        terminal.out.flush()
        terminal.say(summary(run))
        return 0
    except BrokenPipeError:  # whoever read has had enough
        return 0
    except KeyboardInterrupt:
        terminal.say("")
        return 130
    except BaseException as error:  # of a vendor's package, too: one line on the user's stderr, which is not fd 2 here
        terminal.say("generate: {}".format(bundled.one_line(error)))
        return 1
    finally:
        if context is not None:
            with bundled.ends_at_once(), contextlib.suppress(Exception):  # the text is there already
                context.close()


def summary(run: Run) -> str:
    """`5 + 12 tokens (stop): the first after 0.8 s, then 18.3 a second`."""
    rest = len(run.tokens) - 1
    rate = ", then {:.1f} a second".format(rest / run.seconds) if rest > 0 and run.seconds else ""
    return "{} + {} tokens ({}): the first after {:.2f} s{}".format(
        run.prompt, len(run.tokens), run.finish, run.first_seconds, rate
    )


def _pieces(context: Context, ids: list[int], args: argparse.Namespace, run: Run, text: Text | None) -> Iterator[str]:
    """Text as it becomes certain; without a tokenizer the ids themselves."""
    options = arguments.chosen(args)
    if text is None:
        for n, token in enumerate(context.generate(ids, options, run)):
            yield " {}".format(token) if n else str(token)
        return
    for piece in pieces(context, text, ids, options, args.stop, run):
        yield piece.text


def _system(args: argparse.Namespace) -> str:
    if args.system_file is None:
        return args.system or ""
    try:
        return str(args.system_file.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise bundled.Refused("--system-file: {}: {}".format(args.system_file, error.strerror)) from None
    except UnicodeDecodeError:
        raise bundled.Refused("--system-file: {}: got bytes that are no UTF-8".format(args.system_file)) from None


def _messages(prompt: str, system: str) -> list[dict[str, str]]:
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("prompt: got bytes that are no UTF-8") from None
    if not prompt.strip():
        raise ValueError("prompt: got an empty text, allowed: at least one word")
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt.strip()}]


def _ids(text: str) -> list[int]:
    try:
        return [int(x) for x in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError("--ids: got {!r}, allowed: whole numbers between commas".format(text)) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path()))
