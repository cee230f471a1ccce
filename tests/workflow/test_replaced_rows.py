"""Models with replaced states in the real workflow with the real toolkit, from fetch to bundle, and what is refused."""

import csv
from pathlib import Path

import pytest
from kvgate.jobs import record

pytestmark = pytest.mark.slow


def test_every_row_passes_or_is_refused_by_name(checkout, tmp_path: Path) -> None:
    repository = checkout(tmp_path / "repository")
    done = repository.snakemake(config="tests/workflow/replaced.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    tables = repository.path / "results/tables/replaced"
    with (tables / "acceptance.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    right = [x for x in rows if x["verdict"] != "blocked"]
    assert len(right) == 4 and {x["verdict"] for x in right} == {"pass"}
    for row in right:
        assert row["form"] == "recipe" and row["cpu_operators"] == "0" and row["tokens_end"] == "1/1"
        assert 0 < float(row["state_l2_worst"]) < 0.005 and row["state_worst"].startswith("layers.")
    blocked = {x["model"]: x["reason"] for x in rows if x["verdict"] == "blocked"}
    assert blocked["tiny_lfm2"].startswith("calibration: got the replaced state layers.0.convolution, allowed: a quant")
    assert blocked["tiny_qwen3_5"].startswith(
        "model type 'qwen3_5_text': layers with states that are replaced, allowed"
    )
    bundles = record.read(tables / "acceptance.json")["bundles"]
    assert {x.split("/")[2] for x in bundles} == {"tiny_lfm2", "tiny_qwen3_5"}
