"""What stays of Snakemake's own lines on the terminal."""

import io
import logging
import types

import pytest
from kvgate.report import workflow_lines

COMMAND = "Command 'set -euo pipefail;  python -m kvgate {} --log results/logs/a b/x.log' {}"
KEY = """fetch '{"code":{"digest":"a"},"config":{"x":"--log y"}}' --results results"""


def events():
    from snakemake_interface_logger_plugins.common import LogEvent

    return LogEvent


@pytest.fixture
def log(capsys):
    """A logger with a handler like snakemake's; what it printed."""

    def make(alone):
        logger, stream = logging.Logger("snakemake"), io.StringIO()
        logger.addHandler(logging.StreamHandler(stream))
        workflow_lines.Lines(lambda: ["the plan", "  build: 1 (new)"], alone).attach(logger)
        return logger, stream

    return make


def run(logger, stats="Job stats"):
    logger.info("Unlocked working directory.")
    logger.info("Workflow has started!", extra={"event": events().WORKFLOW_STARTED})
    logger.info("Building DAG of jobs...")
    logger.info(stats, extra={"event": events().RUN_INFO} if stats == "Job stats" else {})
    logger.info("Select jobs to execute...")
    logger.info("Execute 1 jobs...", extra={"event": events().JOB_STARTED})
    logger.warning("a warning")
    logger.info(stats, extra={"event": events().RUN_INFO})
    logger.info("Terminating processes on user request, this might take some time.")
    logger.error("an error")


def test_only_warnings_and_errors_stand_beside_our_lines(log, capsys):
    logger, stream = log(alone=True)
    run(logger)
    shown = stream.getvalue().splitlines()
    assert shown == [
        *("Unlocked working directory.", "a warning"),
        *("Terminating processes on user request, this might take some time.", "an error"),
    ]
    assert capsys.readouterr().err == "the plan\n  build: 1 (new)\n"  # once


def test_whoever_asks_for_snakemake_s_lines_has_them(log, capsys):
    logger, stream = log(alone=False)
    run(logger)
    assert len(stream.getvalue().splitlines()) == 10 and capsys.readouterr().err.startswith("the plan\n")


def test_the_plan_is_said_also_where_there_is_nothing_to_do(log, capsys):
    from snakemake.common import NOTHING_TO_BE_DONE_MSG

    logger, _ = log(alone=True)
    logger.info(NOTHING_TO_BE_DONE_MSG)
    assert capsys.readouterr().err.startswith("the plan\n")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("returned non-zero exit status 1.", ""),  # it has said itself why
        ("returned non-zero exit status 2.", ""),
        ("returned non-zero exit status 143.", "fetch: ended by signal 15; see results/logs/a b/x.log\n"),
        (
            "died with <Signals.SIGKILL: 9>.",
            "fetch: ended by signal 9, as the kernel does when memory runs out; see results/logs/a b/x.log\n",
        ),
    ],
)
def test_a_failed_job_does_not_print_its_command(log, capsys, end, said):
    logger, stream = log(alone=False)
    logger.error('RuleException:\nCalledProcessError in file "x.smk", line 16:\n' + COMMAND.format(KEY, end))
    assert (stream.getvalue(), capsys.readouterr().err) == ("", said)


def test_nor_does_a_command_that_asks(log, capsys):
    logger, stream = log(alone=True)
    text = (
        "python -m kvgate gate --results results --config z:abc 2>&1 | tee results/logs/gate.log; exit ${PIPESTATUS[0]}"
    )
    logger.error(f"RuleException:\nCommand 'set -euo pipefail;  {text}' returned non-zero exit status 1.")
    assert stream.getvalue() == "" == capsys.readouterr().err


def test_other_errors_stay(log):
    logger, stream = log(alone=True)
    logger.error("RuleException:\nCommand 'set -euo pipefail;  sort x' returned non-zero exit status 1.")
    assert "sort x" in stream.getvalue()


def test_snakemake_s_own_reasons():
    def of(*names):
        return workflow_lines.reasons(types.SimpleNamespace(get_names=lambda: iter(names)))

    assert of("code has changed since last execution") == ["snakemake: code has changed since last execution"]
    assert of("input files updated by another job") == ["inputs"]
