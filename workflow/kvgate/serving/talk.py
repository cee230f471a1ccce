"""A conversation at the terminal, or of lines from a pipe. Standard library only, Python 3.9."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from kvgate.serving.context import CANCELLED, LENGTH, Context, Run
from kvgate.serving.pieces import pieces
from kvgate.serving.sampling import Options
from kvgate.serving.terminal import Terminal
from kvgate.serving.text import Text

HELP = (
    "/reset: start over   /system TEXT: start over with this system message (none: without)   "
    "/quit or ctrl-D: end   ctrl-C: end the answer"
)
_PROMPT = "> "


class Talk:
    """What was said so far, and the context that answers."""

    def __init__(
        self, context: Context, text: Text, options: Options, stops: Sequence[str], system: str, terminal: Terminal
    ) -> None:
        self.context, self.text, self.options, self.stops, self.terminal = context, text, options, stops, terminal
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.interactive = os.isatty(0) and terminal.out.isatty()

    def run(self, first: str = "") -> None:
        """Until the input ends or /quit. first: said before anything is read. Raises EngineError, ValueError on input
        that is no UTF-8, KeyboardInterrupt where lines come from a pipe."""
        if self.interactive:
            self.terminal.say(HELP)
        if first:
            self.say(first)
        for line in self._lines():
            if line.startswith("/"):
                if self._command(line):
                    return
            elif line.strip():
                self.say(line.strip())

    def say(self, content: str) -> None:
        """One turn: the answer goes to stdout. A turn that cannot be answered is as if it had not been."""
        turns = [*self.turns, {"role": "user", "content": content}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            ids = self.text.chat([*system, *turns])
        except ValueError as error:
            self.terminal.say(str(error))
            return
        capacity = self.context.capacity
        if len(ids) > capacity:
            full = "the conversation is full: got {} tokens with this turn, allowed: {}; /reset starts over"
            self.terminal.say(full.format(len(ids), capacity))
            return
        run, said = Run(len(ids)), ""
        with _asked_to_stop() as asked:
            found = pieces(self.context, self.text, ids, self.options, self.stops, run, lambda: bool(asked))
            for piece in found:
                said += piece.text
                self.terminal.out.write(piece.text)
                self.terminal.out.flush()
        self.terminal.out.write("\n")
        self.terminal.out.flush()
        if said or run.finish != CANCELLED:
            self.turns = [*turns, {"role": "assistant", "content": said}]
        if run.finish == LENGTH and len(run.tokens) != self.options.max_tokens:
            self.terminal.say("the conversation is full: {} tokens; /reset starts over".format(capacity))

    def _command(self, line: str) -> bool:
        """Whether it ends."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/quit", "/exit"):
            return True
        if name == "/help":
            self.terminal.say(HELP)
        elif name in ("/reset", "/system"):
            self.turns = []
            if name == "/system":
                self.system = rest.strip()
            if self.interactive:
                self.terminal.say("a new conversation")
        else:
            self.terminal.say("{}: unknown, allowed: /reset, /system, /help, /quit".format(name[:40]))
        return False

    def _lines(self) -> Iterator[str]:
        if not self.interactive:
            for line in sys.stdin.buffer:
                yield _utf8(line)
            return
        with contextlib.suppress(ImportError):  # arrows and history at the prompt
            import readline  # noqa: F401
        for stream in (sys.stdin, sys.stdout):
            stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
        while True:
            try:
                with _stdout(self.terminal.out.fileno()):
                    yield input(_PROMPT)
            except KeyboardInterrupt:
                self.terminal.out.write("\n")
                self.terminal.out.flush()
            except EOFError:
                self.terminal.out.write("\n")
                self.terminal.out.flush()
                return


def _utf8(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("stdin: got bytes that are no UTF-8") from None


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that ctrl-C puts something into; a second one, when a step hangs, is the usual exception."""
    asked: list[int] = []

    def handle(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, usual)


@contextlib.contextmanager
def _stdout(to: int) -> Iterator[None]:
    """File descriptor 1 is the user's meanwhile: a line is edited there and nowhere else."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(to, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
