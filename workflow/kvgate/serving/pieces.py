"""An answer's text piece by piece: tokens of the context, whole characters, ended by a stop string. Python 3.9."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvgate.serving.context import CANCELLED, STOP, Context, Run
from kvgate.serving.sampling import Logprob, Options
from kvgate.serving.text import Stops, Stream, Text


@dataclass(frozen=True)
class Piece:
    """Text that is certain, and the tokens that it and what was held back before it come from.

    logprobs: as asked for; none of an end-of-text token, nor of tokens whose text begins behind the end.
    """

    text: str
    logprobs: Sequence[Logprob] = ()


def pieces(
    context: Context,
    text: Text,
    ids: Sequence[int],
    options: Options,
    stops: Sequence[str],
    run: Run,
    stopped: Callable[[], bool] = lambda: False,
) -> Generator[Piece, None, None]:
    """Pieces with text, as they come; `run` is kept up to date. Raises what `Context.generate` does."""
    stream, held = Stream(text.decode), Stops(stops)
    shown = made = 0  # characters given out, and of all tokens so far
    waiting: list[tuple[int, Logprob]] = []  # where a token's text begins
    tokens = context.generate(ids, options, run, stopped)
    try:
        for token in tokens:
            ended = token in context.end_ids
            more = "" if ended else stream.push(token)
            if run.logprobs and not ended:
                waiting.append((made, run.logprobs[-1]))
            if run.finish != CANCELLED:
                more += stream.finish()
            made += len(more)
            piece, stop = held.push(more)
            if stop:
                run.finish = STOP
            elif run.finish != CANCELLED:
                piece += held.held
            shown += len(piece)
            if piece or (waiting and run.finish != CANCELLED):
                told = [x for place, x in waiting if place < shown or (not stop and run.finish != CANCELLED)]
                waiting = waiting[len(told) :]
                yield Piece(piece, told)
            if stop:
                return
    finally:
        tokens.close()
