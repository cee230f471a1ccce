"""The workflow as a module of another one, run from another folder."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

OTHER = """
configfile: "my.yaml"

module kvgate:
    snakefile: "{}"
    config: config

use rule * from kvgate as kvgate_*

rule mine:
    default_target: True
    input: rules.kvgate_all.input
"""


TWICE = """
configfile: "my.yaml"

module one:
    snakefile: "{0}"
    config: config
    {1}

module two:
    snakefile: "{0}"
    config: config
    {2}

use rule * from one as one_*
use rule * from two as two_*
use rule fetch from two as two_fetch with:
    threads: 2

rule mine:
    default_target: True
    input: rules.one_all.input, rules.two_all.input
"""
MANIFEST = "models/tiny/checkpoint/manifest.json"


@pytest.fixture
def other(checkout, tmp_path):
    """Another workflow in another folder; gives its snakemake, which ends well, and what that printed."""
    repository = checkout(tmp_path / "kvgate")
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "my.yaml").write_text((repository.path / "tests/workflow/tiny.yaml").read_text())

    def make(text: str, *more: str):
        (folder / "Snakefile").write_text(text.format(repository.path / "Snakefile", *more))

        def snakemake(*args: str, code: int = 0) -> str:
            command = [sys.executable, "-m", "snakemake", "--cores", "1", *args]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert done.returncode == code, done.stderr
            return done.stderr

        return folder, snakemake

    return make


def test_another_workflow_uses_ours(other):
    folder, snakemake = other(OTHER)
    said = snakemake("-n")
    assert "kvgate: sweep tiny: 4 rows, 23 jobs, 23 to do" in said
    said = snakemake(f"results/{MANIFEST}")
    assert "Building DAG of jobs..." in said and "Execute 1 jobs..." in said  # its lines are not ours to hide
    assert (folder / "results/models/tiny/checkpoint/model.safetensors").is_file()
    assert "23 jobs, 22 to do" in snakemake("-n")


@pytest.mark.parametrize(
    ("first", "second", "paths"),
    [
        ('prefix: "a b"', 'prefix: "c"', ("a b/results", "c/results")),
        ('replace_prefix: {"results": "x"}', "", ("x", "results")),
    ],
)
def test_twice_in_one_workflow_each_in_a_folder_of_its_own(other, first, second, paths):
    folder, snakemake = other(TWICE, first, second)
    said = snakemake("-n")
    assert said.count("kvgate: sweep tiny: 4 rows, 23 jobs, 23 to do") == 2
    snakemake(f"{paths[0]}/{MANIFEST}")
    assert (folder / paths[0] / MANIFEST).is_file() and not (folder / paths[1]).exists()
    said = snakemake("-n")
    assert said.count("23 jobs, 22 to do") == 1 == said.count("23 jobs, 23 to do")
    assert (folder / paths[0] / "logs/models/tiny/checkpoint/manifest.log").is_file()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("", "", "kvgate: this workflow uses it twice for results: give each module a prefix of its own"),
        ('prefix: "a"', 'prefix: "a"', "kvgate: this workflow uses it twice for a/results: give each module a prefix"),
        ('replace_prefix: {"results/models": "x"}', "", "kvgate: replace_prefix: got a part of results, allowed: the"),
    ],
)
def test_what_cannot_work_is_one_line_while_planning(other, first, second, said):
    _, snakemake = other(TWICE, first, second)
    lines = [x for x in snakemake("-n", code=1).splitlines() if "profile" not in x and "filesystem" not in x]
    assert len(lines) == 1 and lines[0].startswith(said)


def test_a_target_that_there_is_not_is_one_line(checkout, tmp_path):
    done = checkout(tmp_path / "kvgate").snakemake("-n", "results/models/gpt9/checkpoint/manifest.json")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvgate: target: model: got 'gpt9', known: ")
