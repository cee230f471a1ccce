"""What is added touches only the files that the README's table names."""

import shutil

import pytest
from kvgate.jobs import record

pytestmark = pytest.mark.slow

SWEEP = """
sweep:
  blocks: [{models: [tiny], strategies: [own], platforms: [host], quants: [fp32]}]
strategies:
  own: {module: own, capacity: 32, prefill: 8}
"""
ROW = "results/models/tiny/rows/plain/own/host/fp32/onnxruntime/verdict.json"


def test_a_strategy_is_a_folder_and_an_entry(repository):
    """Its two halves alone: planning, export, check, verdict and bundle know it by them; it has both parts."""
    strategies = repository.path / "workflow/kvgate/strategies"
    shutil.copytree(strategies / "cpu_managed", strategies / "own")
    (repository.path / "own.yaml").write_text(SWEEP)
    done = repository.snakemake(config="tests/workflow/tiny.yaml own.yaml")
    assert done.returncode == 0, done.stderr
    found = record.read(repository.path / ROW)
    assert found["verdict"] == "pass"
    assert {"tiny_fill", "prefill/tiny_fill"} <= {g["program"] for g in found["gates"]}
    bundle = repository.path / "results/bundles/tiny/tiny/plain/own/host/fp32/onnxruntime-pass"
    assert (bundle / "kvgate/strategies/own/host.py").is_file()


def test_a_strategy_that_is_taken_away_is_refused_while_planning(repository):
    (repository.path / "own.yaml").write_text(SWEEP)
    done = repository.snakemake("-n", config="tests/workflow/tiny.yaml own.yaml")
    assert done.returncode == 1
    assert "strategies.own.module: got 'own', known: cpu_managed, dynamic_concat, fixed_max_blend" in done.stderr
