"""The commands as a person calls them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvgate.contract import canonical
from kvgate.jobs import keys
from kvgate.jobs.job import RECORDS
from kvgate.planning import config

BASE = Path(__file__).parents[1]


def kvgate(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvgate", *args]
    return subprocess.run(command, cwd=BASE, capture_output=True, text=True, env={"PYTHONPATH": "workflow"})


def test_help_names_every_command():
    lines = kvgate("--help").stdout.splitlines()
    first = next(n for n, line in enumerate(lines) if line.strip() == "COMMAND")
    named = [line.split()[0] for line in lines[first + 1 :] if line.startswith("    ") and line[4] != " "]
    own = ["table", "ask", "gate", "audit", "store", "bench", "bundle", "preflight"]
    assert named == [*RECORDS, *own]


def test_a_bad_config_is_one_line(tmp_path):
    (tmp_path / "bad.yaml").write_text("sweep: {programs: [nope]}\n")
    done = kvgate("table", "--configfile", str(tmp_path / "bad.yaml"))
    assert done.returncode == 2
    assert done.stderr.startswith("kvgate table: sweep.programs[0]: got 'nope', known: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["table", "gate", "audit", "ask"])
def test_several_config_files_as_snakemake_takes_them(tmp_path, command):
    """The last one wins, in one option or in several; `ask` takes its question after them."""
    for name in "abc":
        (tmp_path / f"{name}.yaml").write_text(f"sweep: {{name: {name}, programs: [nope_{name}]}}\n")
    a, b, c = (str(tmp_path / f"{name}.yaml") for name in "abc")
    for words in (["--configfile", a, b, c], ["--configfile", a, b, "--configfile", c]):
        done = kvgate(command, *words)
        assert done.returncode == 2 and "got 'nope_c'" in done.stderr
    if command == "ask":
        assert "got 'nope_b'" in kvgate(command, "--configfile", a, b, "Which one?").stderr


def test_whoever_has_read_enough_ends_it_without_a_word(tmp_path):
    command = [sys.executable, "-m", "kvgate", "audit", "--results", str(tmp_path)]
    run = subprocess.Popen(
        command, cwd=BASE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={"PYTHONPATH": "workflow"}
    )
    run.stdout.close()  # before it prints
    assert run.stderr.read() == "" and run.wait() == 128 + signal.SIGPIPE


def test_a_config_longer_than_an_argument_may_be(tmp_path):
    """4,000 excludes, as the workflow's target passes them."""
    exclude = [{"models": [f"model-{n}-{n * n}"], "quants": [f"quant{n}"]} for n in range(4000)]
    text = keys.pack(canonical({"sweep": {"exclude": exclude}}))
    assert len(canonical({"sweep": {"exclude": exclude}})) > 1 << 17 > len(text)
    assert config.override([], text) == {"sweep": {"exclude": exclude}}


def test_a_key_that_is_none_is_one_line():
    done = kvgate("judge", "not a key")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_the_table_of_nothing_says_so(tmp_path):
    done = kvgate("table", "--results", str(tmp_path))
    assert done.returncode == 1 and "no row is finished yet, 14 planned" in done.stderr


def test_gate_fails_while_rows_are_missing(tmp_path):
    done = kvgate("gate", "--results", str(tmp_path))
    assert done.returncode == 1


HEAVY = """import sys, kvgate.planning.plan, kvgate.planning.progress
print(sorted({'torch', 'onnx', 'numpy', 'rknn'} & set(sys.modules)))"""


def test_planning_imports_nothing_heavy():
    env = {"PYTHONPATH": str(BASE / "workflow")}
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "[]", done.stderr
