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


def test_a_target_that_there_is_not_is_one_line(checkout, tmp_path):
    done = checkout(tmp_path / "kvgate").snakemake("-n", "results/models/gpt9/checkpoint/manifest.json")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvgate: target: model: got 'gpt9', known: ")


def test_another_workflow_uses_ours(checkout, tmp_path):
    repository = checkout(tmp_path / "kvgate")
    other = tmp_path / "other"
    other.mkdir()
    (other / "Snakefile").write_text(OTHER.format(repository.path / "Snakefile"))
    (other / "my.yaml").write_text((repository.path / "tests/workflow/tiny.yaml").read_text())

    def snakemake(*args: str) -> str:
        command = [sys.executable, "-m", "snakemake", "--cores", "1", *args]
        done = subprocess.run(command, cwd=other, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "kvgate: sweep tiny: 4 rows, 23 jobs, 23 to do" in snakemake("-n")
    snakemake("results/models/tiny/checkpoint/manifest.json")
    assert (other / "results/models/tiny/checkpoint/model.safetensors").is_file()
    assert "23 jobs, 22 to do" in snakemake("-n")
