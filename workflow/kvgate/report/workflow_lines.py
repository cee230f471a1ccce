"""What a person sees of Snakemake's own lines: warnings and errors, one line each where a job of ours failed.

Its news, two lines a job and more, would stand between ours. Whoever wants them asks for them: `--quiet host` (or
`--verbose`) in the place of the profile's setting. Snakemake's log in .snakemake/log has all of them in any case.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

_STARTED, _PLANNED = "WORKFLOW_STARTED", "RUN_INFO"  # names of snakemake's events
_KEPT = ("Terminating processes", "Will exit after")  # after ctrl-C, and after a polite signal
_FAILED = re.compile(
    r"Command '.*-m kvgate (\w+) .*(?:--log|tee) (.*?)(?:; exit .*)?' "
    r"(?:returned non-zero exit status (\d+)|died with <Signals\.\w+: (\d+)>)",
    re.DOTALL,
)


class Lines(logging.Handler):
    """Prints what `planned` gives, once, when the jobs of this run are known; with `alone` it silences the rest."""

    def __init__(self, planned: Callable[[], Iterable[str]], alone: bool) -> None:
        super().__init__()
        self.planned, self.alone = planned, alone
        self.running = self.said = False

    def attach(self, logger: logging.Logger) -> None:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.filters.insert(0, self.shown)  # snakemake's own would keep the start of a run from it
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        from snakemake.common import NOTHING_TO_BE_DONE_MSG

        if not self.said and (_event(record) == _PLANNED or record.msg == NOTHING_TO_BE_DONE_MSG):
            self.said = True
            print("\n".join(self.planned()), file=sys.stderr, flush=True)

    def shown(self, record: logging.LogRecord) -> bool:
        """Whether snakemake may print it. Before a run, as with --unlock or --list-rules, it may print all."""
        self.running |= _event(record) == _STARTED
        failed = _FAILED.search(str(record.msg)) if record.levelno >= logging.ERROR else None
        if failed:
            _say_ended(*failed.groups())
            return False
        if self.alone and self.running and record.levelno < logging.WARNING:
            return str(record.msg).startswith(_KEPT)
        return True


def reasons(reason: Any) -> list[str]:
    """Why snakemake runs a job that our own comparison of keys does not ask for, as `progress.stale` says it."""
    own = [f"snakemake: {x}" for x in reason.get_names() if x != "input files updated by another job"]
    return own or ["inputs"]


def _event(record: logging.LogRecord) -> str:
    return getattr(getattr(record, "event", None), "name", "")


def _say_ended(stage: str, log: str, code: str | None, signal: str | None) -> None:
    """A job says itself why it fails; one that was ended from outside cannot."""
    number = int(signal or 0) or int(code or 0) - 128
    if number > 0:
        memory = ", as the kernel does when memory runs out" if number == 9 else ""
        print(f"{stage}: ended by signal {number}{memory}; see {log.strip()}", file=sys.stderr, flush=True)
