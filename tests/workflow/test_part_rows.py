"""Rows of several artifacts in the real workflow: prefill beside decode, and a decoder in pieces."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from kvgate.jobs import record

pytestmark = pytest.mark.slow

SWEEP = """
sweep:
  blocks:
    - {models: [tiny], strategies: [chunky, cut, tiny_cpu_managed], platforms: [rk3576], quants: [fp16]}
    - {models: [tiny], strategies: [cut, tiny_cpu_managed], platforms: [rk3576], quants: [w8a8]}
    - {models: [tiny], strategies: [chunky, uneven], platforms: [host], quants: [fp32]}
strategies:
  chunky: {module: cpu_managed, capacity: 32, prefill: 8}
  cut: {module: cpu_managed, capacity: 32, layers: 1}
  uneven: {module: cpu_managed, capacity: 32, layers: 3}
"""
CONFIG = "tests/workflow/tiny.yaml parts.yaml"
ROWS = "results/models/tiny/rows/plain/{}/rk3576/{}/simulator"
BUNDLES = "results/bundles/tiny/tiny/plain/{}/rk3576/fp16/simulator-pass"


@pytest.fixture(scope="module")
def parts(built, tmp_path_factory):
    """The sweep of SWEEP, run once over the tiny one's results."""
    repository = built.copy(tmp_path_factory.mktemp("parts") / "copy")
    (repository.path / "parts.yaml").write_text(SWEEP)
    done = repository.snakemake(config=CONFIG)
    assert done.returncode == 0, done.stderr
    return repository


def verdict(repository, strategy: str, quant: str = "fp16") -> dict:
    return record.read(repository.path / ROWS.format(strategy, quant) / "verdict.json")


def generate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(folder / "generate.py"), *words], capture_output=True, text=True)


def test_a_row_is_judged_by_both_of_its_parts(parts):
    found = verdict(parts, "chunky")
    assert found["verdict"] == "pass"
    programs = {g["program"] for g in found["gates"]}
    assert {"tiny_chat", "tiny_fill", "prefill/tiny_chat", "prefill/tiny_fill"} <= programs
    metrics = record.read(parts.path / ROWS.format("chunky", "fp16") / "metrics.json")["programs"]
    assert metrics["prefill/tiny_fill"]["histories"]["forced"]["steps"] == 32
    assert metrics["prefill/tiny_fill"]["histories"]["forced"]["logits"] is None
    figures, alone = found["figures"], verdict(parts, "tiny_cpu_managed")["figures"]
    assert figures["prefill_tokens"] == 8 and figures["cycles"] == alone["cycles"]
    assert figures["first_token_cycles"] < alone["first_token_cycles"] == 32 * alone["cycles"]
    assert figures["artifact_bytes"] > alone["artifact_bytes"]


def test_the_decode_part_is_the_one_that_was_there(parts):
    """Asking for a prefill part changes no byte of the other one."""
    for name in ("model.onnx", "contract.json"):
        one, two = (
            parts.path / f"results/models/tiny/graphs/plain/{x}/decode/{name}" for x in ("tiny_cpu_managed", "chunky")
        )
        assert one.read_bytes() == two.read_bytes()


def test_a_bundle_reads_its_prompt_in_chunks_and_says_the_same(parts, tmp_path):
    folder = parts.path / BUNDLES.format("chunky")
    assert (folder / "prefill/model.rknn").is_file()
    assert "`prefill/` reads a prompt 8 tokens a step" in (folder / "README.md").read_text()
    chunked = generate(folder, "--max-tokens", "4", "What is it")
    alone = generate(parts.path / BUNDLES.format("tiny_cpu_managed"), "--max-tokens", "4", "What is it")
    assert chunked.returncode == 0 and chunked.stdout == alone.stdout and alone.stdout
    copy = tmp_path / "copy"
    done = parts.kvgate("bundle", str(folder.relative_to(parts.path)), str(copy), "--with-graph")
    assert done.returncode == 0, done.stderr
    assert (copy / "graph/prefill/model.onnx").is_file()
    assert generate(copy, "--max-tokens", "4", "What is it").stdout == alone.stdout
    (copy / "prefill/graph_contract.json").write_bytes((copy / "graph_contract.json").read_bytes())
    broken = generate(copy, "Hi")
    assert broken.returncode == 1 and broken.stderr.count("\n") == 1
    assert "prefill/graph_contract.json" in broken.stderr


def test_pieces_are_the_row_that_the_whole_is(parts):
    """In the simulator too: the stream crosses as float16, which it is inside as well."""
    cut, whole = verdict(parts, "cut"), verdict(parts, "tiny_cpu_managed")
    assert cut["verdict"] == whole["verdict"] == "pass"
    folder = parts.path / "results/models/tiny/artifacts/plain"
    one, two = (
        dict(np.load(folder / x / "rk3576/fp16/decode/observations/tiny_fill.npz")) for x in ("cut", "tiny_cpu_managed")
    )
    assert one.keys() == two.keys()
    for name in ("forced/logits", "forced/layers.1.value"):
        error = np.linalg.norm(one[name].astype(np.float64) - two[name]) / np.linalg.norm(two[name])
        assert error < 2e-3, name
    built = record.read(folder / "cut/rk3576/fp16/decode/build.json")
    assert list(built["pieces"]) == sorted(["layers.0-0", "layers.1-1", "head"])
    assert built["artifact_bytes"] == sum(x["artifact_bytes"] for x in built["pieces"].values())


def test_the_bundle_of_pieces_tells_them_apart(parts, tmp_path):
    folder = tmp_path / "pieces"
    shutil.copytree(parts.path / BUNDLES.format("cut"), folder)
    facts = json.loads((folder / "bundle.json").read_text())
    assert (
        "3 artifacts, which run in this order: `layers.0-0/`, `layers.1-1/`, `head/`"
        in (folder / "README.md").read_text()
    )
    assert [x["part"] for x in facts["pieces"]] == ["layers.0-0", "layers.1-1", "head"]
    for a, b in (("layers.0-0", "x"), ("layers.1-1", "layers.0-0"), ("x", "layers.1-1")):
        (folder / a).rename(folder / b)
    swapped = generate(folder, "Hi")
    assert swapped.returncode == 1 and "is not the contract that bundle.json names" in swapped.stderr
    shutil.rmtree(folder / "head")
    lost = generate(folder, "Hi")
    assert lost.returncode == 1 and "head" in lost.stderr and lost.stderr.count("\n") == 1


def test_pieces_are_calibrated_by_the_pieces_before_them(parts):
    """Each by the stream that float32 gives it: about as far off as the whole."""
    cut, whole = (verdict(parts, x, "w8a8")["figures"] for x in ("cut", "tiny_cpu_managed"))
    assert cut["dtype"] == "w8a8" and 0.5 < cut["kv_median"] / whole["kv_median"] < 2


def test_pieces_that_do_not_divide_block_their_row_by_name(parts):
    uneven = parts.path / "results/models/tiny/rows/plain/uneven/host/fp32/onnxruntime/verdict.json"
    assert record.read(uneven)["reason"] == "layers: got 3 a piece, allowed: a divisor of the model's 2: 1, 2"


def test_another_chunk_makes_its_own_part_again_and_no_other(parts):
    assert parts.planned(config=CONFIG) == {}
    sweep = yaml.safe_load(SWEEP)
    sweep["strategies"]["chunky"]["prefill"] = 4
    (parts.path / "parts.yaml").write_text(yaml.safe_dump(sweep))
    planned = parts.planned(config=CONFIG)
    (parts.path / "parts.yaml").write_text(SWEEP)
    assert planned == {"export": 1, "check": 1, "build": 1, "verify": 2, "judge": 2, "tabulate": 1}
