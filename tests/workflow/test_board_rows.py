"""Rows through the agent on the real workflow: what reruns, and what a board that cannot be reached costs."""

import csv
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CONFIG = "tests/workflow/tiny.yaml tests/workflow/boards.yaml"
CODE = "\n\ndef added() -> int:\n    return 1\n"


@pytest.fixture(scope="module")
def with_boards(built, tmp_path_factory):
    """The tiny repository with its board rows run too."""
    copy = built.copy(tmp_path_factory.mktemp("boards") / "repository")
    done = copy.snakemake(config=CONFIG)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy


@pytest.fixture
def repository(with_boards, tmp_path):
    return with_boards.copy(tmp_path / "copy")


def table(repository) -> dict[tuple[str, str, str], dict[str, str]]:
    path = repository.path / "results/tables/tinyboards/acceptance.tsv"
    rows = list(csv.DictReader(path.open(), delimiter="\t"))
    return {(x["strategy"], x["platform"], x["backend"]): x for x in rows}


def edit(path: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, path.read_text())
    assert count == 1, f"{path.name}: {count} times {pattern}"
    path.write_text(text)


def planned(repository) -> dict[str, int]:
    return repository.planned(config=CONFIG)


def test_a_row_a_backend_and_the_same_numbers_through_the_agent(with_boards):
    rows = table(with_boards)
    assert len(rows) == 5
    for strategy in ("tiny_cpu_managed", "tiny_blend"):
        here, there = (rows[strategy, "host", name] for name in ("onnxruntime", "onnxruntime-here"))
        assert here["verdict"] == there["verdict"] == "pass", there["reason"]
        assert here["kv_l2_worst"] == there["kv_l2_worst"] and here["top1"] == there["top1"]
        assert float(there["total_ms"]) > 0 and not here["total_ms"]
    assert planned(with_boards) == {}


PARTS = """
sweep:
  name: tinyboards
  backends: [onnxruntime-here]
  blocks:
    - {models: [tiny], strategies: [chunky, cut], platforms: [host], quants: [fp32]}
strategies:
  chunky: {module: cpu_managed, capacity: 32, prefill: 8}
  cut: {module: cpu_managed, capacity: 32, layers: 1}
"""


def test_every_part_of_a_row_runs_in_one_job(repository):
    (repository.path / "parts.yaml").write_text(PARTS)
    config = f"{CONFIG} parts.yaml"
    done = repository.snakemake(config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(repository)
    assert {x["verdict"] for x in rows.values()} == {"pass"} and len(rows) == 4
    for strategy in ("chunky", "cut"):
        here, there = (rows[strategy, "host", name] for name in ("onnxruntime", "onnxruntime-here"))
        assert here["top1"] == there["top1"] and here["tokens_end"] == there["tokens_end"]
        assert float(there["first_token_ms"]) > 0
    row = repository.path / "results/models/tiny/rows/plain/{}/host/fp32/onnxruntime-here"
    verdict = json.loads(Path(str(row).format("chunky"), "verdict.json").read_text())
    assert {"tiny_fill", "prefill/tiny_fill"} <= {x["program"] for x in verdict["gates"]}
    here = rows["chunky", "host", "onnxruntime"]
    assert here["kv_l2_worst"] == rows["chunky", "host", "onnxruntime-here"]["kv_l2_worst"]
    ran = json.loads(Path(str(row).format("cut"), "run.json").read_text())
    assert set(ran["files"]) == {"observations/tiny_chat.npz", "observations/tiny_fill.npz"}
    assert repository.planned(config=config) == {}
    # Another chunk is another prefill graph, and the board runs the row again.
    (repository.path / "parts.yaml").write_text(PARTS.replace("prefill: 8", "prefill: 4"))
    assert repository.planned(config=config) == {
        "export": 1, "check": 1, "run": 1, "verify": 2, "judge": 2, "tabulate": 1
    }  # fmt: skip


def test_the_agents_code_reruns_what_ran_through_it(repository):
    with (repository.path / "workflow/kvgate/board/jobs.py").open("a") as file:
        file.write(CODE)
    assert planned(repository) == {"selftest": 1, "run": 2, "verify": 2, "judge": 2, "tabulate": 1}


def test_another_engines_code_reruns_nothing(repository):
    with (repository.path / "workflow/kvgate/board/lite.py").open("a") as file:
        file.write(CODE)
    assert not {"run", "selftest", "build"} & planned(repository).keys()


def test_how_steps_are_timed_reruns_the_runs(repository):
    edit(repository.path / "tests/workflow/boards.yaml", "steps: 8", "steps: 9")
    assert planned(repository) == {"run": 2, "verify": 2, "judge": 2, "tabulate": 1}


def test_a_board_that_cannot_be_reached_costs_its_rows_and_is_asked_again(repository):
    """A refused port: its rows are blocked, the others go on, and the next run takes up just those."""
    config = repository.path / "tests/workflow/boards.yaml"
    before = config.read_text()
    edit(config, "driver: local", "driver: ssh, address: 127.0.0.1, port: 9")
    done = repository.snakemake(config=CONFIG)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(repository)
    lost = [x for x in rows.values() if x["verdict"] == "blocked"]
    assert {x["backend"] for x in lost} == {"onnxruntime-here"} and len(lost) == 2
    assert all("onnection refused" in x["reason"] for x in lost), lost[0]["reason"]
    again = {"selftest": 1, "run": 2, "verify": 2, "judge": 2, "tabulate": 1}
    assert planned(repository) == again  # nothing changed, and yet
    config.write_text(before)
    done = repository.snakemake(config=CONFIG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {x["verdict"] for x in table(repository).values()} == {"pass"}
    assert planned(repository) == {}


def test_a_board_without_python_blocks_and_is_not_asked_again(repository):
    edit(repository.path / "tests/workflow/boards.yaml", "driver: local", "driver: local, python: no-such-python")
    done = repository.snakemake(config=CONFIG)
    assert done.returncode == 0, done.stdout + done.stderr
    (reason,) = {x["reason"] for x in table(repository).values() if x["verdict"] == "blocked"}
    assert "no-such-python" in reason


def test_one_job_at_a_time_on_a_board(with_boards):
    """By the records' own clock: seconds in the side files, ends by their dates."""
    spans = []
    for path in with_boards.path.glob("results/models/tiny/rows/**/run.json"):
        end = path.stat().st_mtime
        spans.append((end - json.loads(path.with_suffix(".cost.json").read_text())["seconds"], end))
    (_, first_end), (second_start, _) = sorted(spans)
    assert first_end <= second_start + 0.5
