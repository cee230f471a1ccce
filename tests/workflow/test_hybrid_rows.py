"""Hybrid rows in the real workflow: a set that fits the graph, and one with a pattern that fits nothing in it."""

import pytest
from kvgate.jobs import record

pytestmark = pytest.mark.slow

SWEEP = """
sweep:
  blocks: [{models: [tiny], strategies: [tiny_cpu_managed], platforms: [rk3576], quants: [typo, w8a8, w8a8_hybrid]}]
quants:
  typo: {mask: -100, calibrate: true, config: {quantized_dtype: w8a8}, hybrid: {"*/atn/*": float16}}
"""
ROW = "results/models/tiny/rows/plain/tiny_cpu_managed/rk3576/{}/simulator/verdict.json"


def test_a_pattern_that_fits_nothing_blocks_its_row_and_no_other(repository):
    (repository.path / "hybrid.yaml").write_text(SWEEP)
    done = repository.snakemake(config="tests/workflow/tiny.yaml hybrid.yaml")
    assert done.returncode == 0, done.stderr
    typo, plain, mixed = (record.read(repository.path / ROW.format(q)) for q in ("typo", "w8a8", "w8a8_hybrid"))
    assert typo["verdict"] == "blocked" and typo["first"]["stage"] == "build"
    assert (
        typo["reason"].startswith("hybrid: got pattern '*/atn/*', which fits none of ") and "\n" not in typo["reason"]
    )
    assert plain["verdict"] == "fail"
    before, after = (max(g["value"] for g in v["gates"] if g["name"] == "kv_l2") for v in (plain, mixed))
    assert after < 0.5 * before  # measured: 3.4 % and 15.7 %
    table = (repository.path / "results/tables/tiny/acceptance.md").read_text()
    assert "w8a8_hybrid" in table and "*/atn/*" in table
