"""Rerun only what changed, on the real workflow: the expected jobs of every edit are written by hand.

The tiny sweep has two strategies (cpu_managed, fixed_max_blend), two quants (fp16, w8a8), a chat and a text, and two
calibration texts that only w8a8 reads: 23 jobs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from kvgate.contract import canonical
from kvgate.jobs import record

pytestmark = pytest.mark.slow

CONFIG = ("--configfile", "tests/workflow/tiny.yaml")
Edit = Callable[[Path], None]


def append(path: str, text: str) -> Edit:
    def edit(root: Path) -> None:
        with (root / path).open("a") as file:
            file.write(text)

    return edit


def replace(path: str, old: str, new: str) -> Edit:
    def edit(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (root / path).write_text(text.replace(old, new))

    return edit


def version(package: str) -> Edit:
    def edit(root: Path) -> None:
        lock = root / "envs/lock.txt"
        text, count = re.subn(rf"(?m)^{package}==.*$", f"{package}==99.9", lock.read_text())
        assert count == 1
        lock.write_text(text)

    return edit


CODE = "\n\ndef added() -> int:\n    return 1\n"
TEXT = "Another sentence changes what is read here, from the first word to the last one of them.\n"


def write(path: str, text: str) -> Edit:
    return lambda root: (root / path).write_text(text) and None


def touch_everything(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file() and "results" not in path.parts:
            path.touch()


BUNDLE = "results/bundles/tiny/tiny/plain/tiny_cpu_managed/rk3576/fp16/simulator-pass"
ARTIFACT = "results/models/tiny/artifacts/plain/tiny_cpu_managed/rk3576/fp16/decode/model.rknn"


def rewrite(path: str) -> Edit:
    """One byte of a file in the results becomes another; its hard links stay as they are."""

    def edit(root: Path) -> None:
        data = (root / path).read_bytes()
        (root / path).unlink()
        (root / path).write_bytes(bytes([data[0] ^ 1]) + data[1:])

    return edit


ROW = "results/models/tiny/rows/plain/tiny_cpu_managed/rk3576/fp16/simulator"
WEIGHTS = "results/models/tiny/graphs/plain/tiny_cpu_managed/decode/weights.bin"
ONE_STRATEGY = {"build": 2, "verify": 2, "judge": 2, "tabulate": 1}
EDITS: dict[str, tuple[Edit, dict[str, int]]] = {
    "nothing": (lambda root: None, {}),
    "a strategy's graph half": (
        append("workflow/kvgate/strategies/cpu_managed/graph.py", CODE),
        {"export": 1, "check": 1, **ONE_STRATEGY},
    ),
    "a strategy's host half": (
        append("workflow/kvgate/strategies/cpu_managed/host.py", CODE),
        {"check": 1, **ONE_STRATEGY},
    ),
    "a strategy that the sweep has not": (append("workflow/kvgate/strategies/fixed_max_scatter/graph.py", CODE), {}),
    "a quant's argument": (
        replace("config/quants.yaml", "quantized_dtype: w8a8,", "quantized_dtype: w8a8, optimization_level: 2,"),
        ONE_STRATEGY,  # two builds, of one quant
    ),
    "a threshold": (replace("config/thresholds.yaml", "warn: 0.01", "warn: 0.02"), {"judge": 4, "tabulate": 1}),
    "a prompt": (
        write("tests/texts/hi.txt", "ho\n"),
        {"trace": 1, "check": 2, "build": 4, "verify": 4, "judge": 4, "tabulate": 1},
    ),
    "a calibration text": (write("tests/texts/calibration_a.txt", TEXT), {"trace": 1, **ONE_STRATEGY}),
    "a text that nothing reads": (append("config/texts/spare_words.txt", TEXT), {}),
    "the toolkit's version": (version("rknn-toolkit2"), {"build": 4, "verify": 4, "judge": 4, "tabulate": 1}),
    "a linter's version": (version("ruff"), {}),
    "the table's code": (append("workflow/kvgate/stages/tabulate.py", CODE), {"tabulate": 1}),
    "the model's seed": (
        replace("tests/workflow/tiny.yaml", "seed: 0", "seed: 1"),
        {"fetch": 1, "trace": 4, "prepare": 1, "export": 2, "check": 2, "build": 4}
        | {"verify": 4, "judge": 4, "tabulate": 1},
    ),
    "a comment in code that all stages share": (append("workflow/kvgate/contract.py", "\n# why not\n"), {}),
    "a comment in a config": (append("config/quants.yaml", "# why not\n"), {}),
    "touch": (touch_everything, {}),
    "bundles deleted": (lambda root: shutil.rmtree(root / "results/bundles"), {"tabulate": 1}),
    "a bundle edited": (rewrite(f"{BUNDLE}/README.md"), {"tabulate": 1}),
    "an artifact deleted": (
        lambda root: (root / ARTIFACT).unlink(),
        {"build": 1, "verify": 1, "judge": 1, "tabulate": 1},
    ),
    "a verdict edited": (
        replace(f"{ROW}/verdict.json", '"verdict": "pass"', '"verdict": "warn"'),
        {"judge": 1, "tabulate": 1},
    ),
    "metrics edited": (
        replace(f"{ROW}/metrics.json", '"status": "ok"', '"status":  "ok"'),
        {"verify": 1, "judge": 1, "tabulate": 1},
    ),
    "which rows get a bundle": (
        replace("tests/workflow/tiny.yaml", "  isolated: 4", "  isolated: 4\n  bundle: [warn]"),
        {"tabulate": 1},
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_plans_exactly_its_jobs(repository, name):
    edit, expected = EDITS[name]
    edit(repository.path)
    assert repository.planned() == expected


def test_an_edit_with_an_old_date_is_seen(repository):
    EDITS["a threshold"][0](repository.path)
    os.utime(repository.path / "config/thresholds.yaml", (1e9, 1e9))
    assert repository.planned() == EDITS["a threshold"][1]


def test_the_dry_run_says_which_part_of_the_key_changed(repository):
    EDITS["a quant's argument"][0](repository.path)
    said = repository.snakemake("-n").stderr
    assert "kvgate: sweep tiny: 4 rows, 23 jobs, 7 to do" in said
    assert "build: 2 (config quant)" in said
    assert "judge: 2 (what it reads)" in said


def test_a_moved_threshold_runs_and_then_nothing_is_left(repository):
    EDITS["a threshold"][0](repository.path)
    done = repository.snakemake()
    assert done.returncode == 0, done.stderr
    assert repository.planned() == {}


def test_results_dated_in_the_future_lose_nothing(repository):
    """A clock set back, results of another PC: Snakemake would call each new verdict older than its input, and remove
    it."""
    later = time.time() + 1e6
    for n, path in enumerate(repository.results()):
        os.utime(path, (later + n, later + n))
    EDITS["a threshold"][0](repository.path)
    done = repository.snakemake()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kvgate: results were dated in the future: 18 dated in order" in done.stderr
    assert repository.kvgate("audit", *CONFIG).returncode == 0
    assert repository.planned() == {}


def test_the_gate_and_the_table_know_what_is_stale(repository):
    require = "{blocks: [{models: [tiny], strategies: [tiny_cpu_managed], platforms: [rk3576], quants: [fp16]}]}"
    (repository.path / "one.yaml").write_text(f"sweep: {require}\n")
    one = (*CONFIG, "--configfile", "one.yaml")
    assert repository.kvgate("gate", *one).stdout == "gate: 1 required rows pass\n"
    replace("config/thresholds.yaml", "kv_l2: {pass: 0.005", "kv_l2: {pass: 0.0001")(repository.path)
    said = repository.kvgate("gate", *one)
    row = "tiny/plain/tiny_cpu_managed/rk3576/fp16/simulator"
    assert said.returncode == 1
    assert said.stdout == f"stale: {row}: was pass; config thresholds: run snakemake\n"
    assert " pass (stale) " in repository.kvgate("table", *one).stdout
    touched = repository.snakemake("--touch", config="tests/workflow/tiny.yaml one.yaml")
    assert touched.returncode == 0, touched.stderr
    assert repository.kvgate("gate", *one).returncode == 1


def test_what_was_deleted_is_made_again_and_the_printed_command_answers(repository):
    root = repository.path
    before = {p.relative_to(root): record.sha256(p) for p in (root / BUNDLE).rglob("*") if p.is_file()}
    shutil.rmtree(root / "results/bundles")
    (root / ARTIFACT).unlink()
    assert "gone: a plain run makes them again" in repository.kvgate("table", *CONFIG).stdout
    audited = repository.kvgate("audit", *CONFIG)
    assert audited.returncode == 1 and "0 stale, 2 damaged" in audited.stdout
    line = next(x for x in audited.stdout.splitlines() if "acceptance.json: missing or changed: " in x)
    assert line.endswith(BUNDLE.removeprefix("results/"))
    done = repository.snakemake()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "build: 1 (files gone)" in done.stderr and "4 to do" in done.stderr
    assert {p.relative_to(root): record.sha256(p) for p in (root / BUNDLE).rglob("*") if p.is_file()} == before
    assert repository.planned() == {}
    command = next(x for x in done.stderr.splitlines() if "on this PC: " in x).partition(": ")[2]
    assert f" {BUNDLE}/generate.py " in command
    command = command.replace("python3", sys.executable).replace('"What is the capital of France?"', "hi")
    ran = subprocess.run(command, shell=True, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
    assert ran.stderr.startswith("this PC has no NPU: the graph runs in ONNX Runtime, not model.rknn\n")
    assert repository.kvgate("bundle", BUNDLE, "mine", "--with-graph").returncode == 0
    assert subprocess.run([sys.executable, root / "mine/generate.py", "hi"], capture_output=True).returncode == 0


def test_a_diagnosis_of_any_row(repository):
    """Asked for by its path; only then is there an accuracy analysis. A blocked row has one too, without."""
    more = (
        "sweep: {blocks: [{models: [tiny], strategies: [tiny_blend], platforms: [rk3576], quants: [w8a8, refused]}]}\n"
    )
    quant = "mask: -100, calibrate: true, config: {quantized_dtype: w8a8}, hybrid: {'*/no/*': float16}"
    more += f"quants: {{refused: {{{quant}}}}}\n"
    (repository.path / "more.yaml").write_text(more)
    config = "tests/workflow/tiny.yaml more.yaml"
    rows = [f"results/models/tiny/rows/plain/tiny_blend/rk3576/{q}/simulator" for q in ("w8a8", "refused")]
    paths = [f"{row}/diagnosis.json" for row in rows]
    planned = repository.planned("--nolock", *paths, config=config)
    assert planned == {"build": 1, "verify": 1, "judge": 1, "accuracy": 2, "diagnose": 2}
    assert "accuracy" not in repository.planned(config=config)  # a sweep does not ask for any
    done = repository.snakemake(*paths, config=config)
    assert done.returncode == 0, done.stderr
    shown, blocked = (record.read(repository.path / path) for path in paths)
    assert shown["accuracy"]["artifact"] == "equal" and shown["accuracy"]["note"] == ""
    assert shown["accuracy"]["golden"]["kv_l2"] < 1e-5
    assert {x["layer"] for x in shown["operators"]} >= {0, 1} and len(shown["operators"]) == 20
    assert shown["first_operator"]["module"].startswith("layers.0/")
    assert (
        "First operator off by itself: layers.0/" in shown["sentence"]
        and "blocked: hybrid: got pattern" in blocked["sentence"]
    )
    assert "accuracy" not in blocked
    assert repository.planned("--nolock", *paths, config=config) == {}


def test_a_flipped_bit_is_blocked_by_name_and_the_next_run_makes_all_of_it_again(repository):
    """In the weights of one graph, before a quant is added: nothing is built of them, and the store has none of it."""
    root = repository.path
    rewrite(WEIGHTS)(root)
    EDITS["a quant's argument"][0](root)
    done = repository.snakemake()
    assert done.returncode == 0, done.stderr
    verdict = record.read(root / ROW.replace("fp16", "w8a8") / "verdict.json")
    name = WEIGHTS.removeprefix("results/")
    assert verdict["reason"] == f"{name} is not what export wrote; run again: it is made again"
    assert record.read(root / ROW / "verdict.json")["verdict"] == "pass"  # its files were not opened again
    again = repository.snakemake()
    assert again.returncode == 0 and "export: 1 (files changed)" in again.stderr, again.stderr
    assert record.read(root / ROW.replace("fp16", "w8a8") / "verdict.json")["verdict"] != "blocked"
    assert repository.planned() == {}
    assert repository.kvgate("audit", "--deep", *CONFIG).returncode == 0


def test_a_refactoring_compiles_and_simulates_nothing(repository):
    """Code that leaves graphs and observations alone: builds come out of the store."""
    append("workflow/kvgate/prepare/surgery.py", CODE)(repository.path)
    planned = repository.planned()
    assert planned["build"] == 4
    before = {p: p.stat().st_ino for p in (repository.path / "results/models").rglob("model.rknn")}
    assert len(before) == 4
    done = repository.snakemake()
    assert done.returncode == 0, done.stderr
    assert {p: p.stat().st_ino for p in (repository.path / "results/models").rglob("model.rknn")} == before
    assert repository.planned() == {}


def test_a_job_planned_before_an_edit_is_refused(repository):
    path = repository.path / "results/tables/tiny/acceptance.json"
    key = canonical(record.read(path)["key"])
    assert repository.kvgate("tabulate", key).returncode == 0
    append("workflow/kvgate/stages/tabulate.py", CODE)(repository.path)
    done = repository.kvgate("tabulate", key)
    assert done.returncode == 2
    assert "the code changed after this job was planned; run snakemake again" in done.stderr


def test_audit_finds_what_snakemake_cannot_see(repository):
    """A lost .snakemake, and a strategy edited: no metadata tells, the records do."""
    shutil.rmtree(repository.path / ".snakemake")
    EDITS["a strategy's host half"][0](repository.path)
    assert repository.planned() == EDITS["a strategy's host half"][1]
    done = repository.kvgate("audit", "--configfile", "tests/workflow/tiny.yaml")
    assert done.returncode == 1
    assert "23 results planned, 0 missing, 8 stale, 0 damaged" in done.stdout
    done = repository.kvgate("audit", "--discard", "--configfile", "tests/workflow/tiny.yaml")
    assert done.returncode == 0 and "8 removed" in done.stdout
    assert repository.planned() == EDITS["a strategy's host half"][1]


def test_copied_results_in_a_fresh_clone_are_adopted(built, checkout, tmp_path):
    clone = checkout(tmp_path / "a_clone_with_a_longer_name")
    shutil.copytree(built.path / "results", clone.path / "results", copy_function=shutil.copy)
    for n, path in enumerate(reversed(clone.results())):  # the worst order of dates
        os.utime(path, (1e9 + n, 1e9 + n))
    done = clone.kvgate("audit", "--adopt", "--configfile", "tests/workflow/tiny.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "23 dated in order" in done.stdout
    assert clone.planned() == {}
    EDITS["a quant's argument"][0](clone.path)
    assert clone.planned() == EDITS["a quant's argument"][1]


def test_a_damaged_artifact_is_found_by_its_sha256(repository):
    path = next((repository.path / "results/models").rglob("model.rknn"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # a hard link into the store and the other copies
    path.write_bytes(data)
    quick = repository.kvgate("audit", "--configfile", "tests/workflow/tiny.yaml")
    assert quick.returncode == 0
    deep = repository.kvgate("audit", "--deep", "--configfile", "tests/workflow/tiny.yaml")
    assert deep.returncode == 1 and "damaged: " in deep.stdout and "missing or changed: model.rknn" in deep.stdout


def to_do(said: str) -> int:
    return int(re.search(r"jobs, (\d+) to do$", said, re.MULTILINE)[1])


def test_the_count_is_snakemake_s_own(repository):
    """It may run more than our comparison of keys asks for: by dates, or by what another profile triggers on."""
    shutil.rmtree(repository.path / ".snakemake")
    for n, path in enumerate(reversed(repository.results())):  # as a copy may date them
        os.utime(path, (1e9 + n, 1e9 + n))
    said = repository.snakemake("-n").stderr
    assert to_do(said) == sum(repository.planned().values()) > 0
    assert "(snakemake: updated input files)" in said
    assert repository.kvgate("audit", "--adopt", *CONFIG).returncode == 0
    assert to_do(repository.snakemake("-n").stderr) == 0


def test_the_count_under_another_profile_with_an_edited_rule(repository):
    profile = repository.path / "mine"
    profile.mkdir()
    text = (repository.path / "profiles/default/config.yaml").read_text()
    (profile / "config.yaml").write_text(text.replace("[params, mtime, input]", "[params, mtime, input, code]"))
    replace("workflow/rules/judge.smk", 'command("judge")', 'command("judge") + " && true"')(repository.path)
    said = repository.snakemake("-n", "--workflow-profile", "mine").stderr
    assert "kvgate: sweep tiny: 4 rows, 23 jobs, 5 to do" in said
    assert "judge: 4 (snakemake: code has changed since last execution)" in said
    assert to_do(repository.snakemake("-n").stderr) == 0


def test_one_target_counts_its_own_jobs(repository):
    EDITS["a threshold"][0](repository.path)
    row = "results/models/tiny/rows/plain/tiny_blend/rk3576/fp16/simulator/verdict.json"
    done = repository.snakemake(row)
    assert done.returncode == 0 and "kvgate: sweep tiny: 4 rows, 23 jobs, 1 to do" in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("judge ")]
    assert line.endswith(" [1/1]")


def test_one_target_that_reads_nothing_is_held_to_its_key(repository):
    EDITS["the model's seed"][0](repository.path)
    shutil.rmtree(repository.path / ".snakemake")
    said = repository.snakemake("-n", "results/models/tiny/checkpoint/manifest.json").stderr
    assert to_do(said) == 1 and "  fetch: 1 (config source)" in said


def test_what_only_looks_leaves_a_running_sweep_s_countdown_alone(repository):
    EDITS["a threshold"][0](repository.path)
    run = repository.path / "results/.run.json"
    run.write_text("{}")
    for words in (["--dag"], ["--summary"], ["--rulegraph"], ["-n"], ["--list-rules"], ["--unlock"]):
        done = repository.snakemake(*words, "--nolock")
        assert done.returncode == 0, done.stderr
        assert run.read_text() == "{}", words
    assert "digraph" in repository.snakemake("--dag").stdout


def test_the_lines_of_a_run_are_ours(repository):
    """And one line for a job that fails; its command and key stay in snakemake's own log."""
    EDITS["a threshold"][0](repository.path)
    done = repository.snakemake()
    lines = done.stderr.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("kvgate: sweep tiny"))
    assert first == 2  # the profile's name and a word on the file system come before anything of ours is read
    assert lines[first + 1 : first + 3] == ["  judge: 4 (config thresholds)", "  tabulate: 1 (what it reads)"]
    verdicts = [x for x in lines if x.startswith("judge ")]
    assert len(verdicts) == 4 and all(re.search(r": ok, \d+ s \[\d/5", x) for x in verdicts)
    for word in ("Select jobs", "Execute ", "Building DAG", "Complete log", "Elapsed", "Provided"):
        assert word not in done.stderr
    broken = "def run(job):\n    raise KeyError('a bug')\n\n\ndef _unused(job: Job)"
    replace("workflow/kvgate/stages/tabulate.py", "def run(job: Job)", broken)(repository.path)
    done = repository.snakemake()
    assert done.returncode == 1
    (line,) = [x for x in done.stderr.splitlines() if "tabulate" in x and "failed" in x]
    assert line.startswith("tabulate tiny: failed: KeyError: 'a bug'; see results/logs/tables/tiny/acceptance.log")
    assert "Command" not in done.stderr and '"code"' not in done.stderr
    assert "Select jobs" in max((repository.path / ".snakemake/log").iterdir()).read_text()


def test_targets_that_ask_take_a_long_config(checkout, tmp_path):
    """4,000 excludes are more than one argument may hold."""
    clone = checkout(tmp_path / "clone")
    sweep = yaml.safe_load((clone.path / "tests/workflow/tiny.yaml").read_text())["sweep"]
    sweep["blocks"][0]["exclude"] = [{"strategy": "tiny_blend", "platform": "rk3576", "quant": "w8a8"}] * 4000
    (clone.path / "big.yaml").write_text(json.dumps({"sweep": sweep}))
    done = clone.snakemake("audit", config="tests/workflow/tiny.yaml big.yaml")
    assert done.returncode == 0, done.stderr
    assert "audit: sweep tiny: 20 results planned, 20 missing" in done.stdout + done.stderr
