"""tabulate, the table in a terminal, the gate, and which rows get a bundle (what is in one: test_bundle.py)."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic
from kvgate.jobs import record
from kvgate.jobs.job import record_path
from kvgate.jobs.rows import Row
from kvgate.judging import behaviour
from kvgate.report import bundle, ship, table
from kvgate.report.table import gate, main

OF = synthetic.trace()
QUANTS = ("fp16", "w4a16", "w8a8", "broken")
ROWS = [synthetic.ROW | {"quant": q} for q in QUANTS]
ERRORS = {"fp16": 0.0, "w4a16": 0.007, "w8a8": 0.7}


def one(root, row, error, dtype=None):
    results = synthetic.Results(root, row, dtype)
    if error is None:
        results.write("build", {"status": "blocked", "reason": "build: IndexError | in a rule", "findings": []})
    seen = synthetic.observation(OF)
    seen["isolated/layers.1.key"][1] = synthetic.off(seen["isolated/layers.1.key"][1], error or 0)
    results.verify("capital", OF, seen)
    return results.judge()


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch):
    """The checkpoint here has none that transformers could load."""
    made = {"tokenizer.json": None, "chat_template.jinja": None, "special": {}}
    monkeypatch.setattr(bundle, "tokenizer", lambda checkpoint: made)


@pytest.fixture
def root(tmp_path):
    for row in ROWS:
        one(tmp_path, row, ERRORS.get(row["quant"]))
    return tmp_path


def rows(these=ROWS):
    return [Row(**row) for row in these]


def test_one_row_a_tuple_with_every_column(root):
    body = synthetic.tabulated(root, ROWS)
    with (root / "tables/default/acceptance.tsv").open() as file:
        read = list(csv.DictReader(file, delimiter="\t"))
    assert [r["verdict"] for r in read] == ["pass", "warn", "fail", "blocked"]
    assert body["counts"] == {"pass": 1, "warn": 1, "fail": 1, "blocked": 1}
    assert body["rows"] == read
    fail = read[2]
    assert float(fail["kv_l2_worst"]) == pytest.approx(0.7, rel=1e-5)
    place = [fail[f"kv_worst_{x}"] for x in ("layer", "tensor", "position", "history")]
    assert place == ["1", "key", "7", "isolated"]
    assert (fail["top1"], fail["tokens_16"], fail["tokens_end"]) == ("27/27", "1/1", "1/1")
    assert fail["predicted_cycles"] == "36400000"
    assert fail["risks"] == "F1 rank-4 cache: may be misread on a board"
    assert read[3]["reason"] == "build: IndexError | in a rule"
    assert read[3]["kv_l2_worst"] == ""
    assert all(r["reason"] for r in read)


def test_the_dtype_is_the_artifacts_whatever_the_quants_name(root, capsys):
    """A quant named w8a8 with w4a16's arguments."""
    one(root, ROWS[2], 0.7, dtype="w4a16")
    read = synthetic.tabulated(root, ROWS)["rows"]
    assert [(r["quant"], r["dtype"]) for r in read] == [
        ("fp16", "fp16"), ("w4a16", "w4a16"), ("w8a8", "w4a16"), ("broken", ""),
    ]  # fmt: skip
    main(root, "default", rows(), behaviour.SHIPS, {})
    assert re.search(r"(?m)^cpu_managed +w8a8 +w4a16 +fail ", capsys.readouterr().out)


def test_the_markdown_is_rounded_and_has_no_stray_bars(root):
    synthetic.tabulated(root, ROWS)
    lines = (root / "tables/default/acceptance.md").read_text().splitlines()
    assert lines[0] == "# Sweep default: 1 pass, 1 warn, 1 fail, 1 blocked"
    tables = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in tables}) == 1
    assert "| 70.00 % |" in tables[4]
    assert "| 36.4 |" in tables[2]
    assert "| 278.0 |" in tables[2]


def test_green_rows_get_a_bundle(root):
    body = synthetic.tabulated(root, ROWS)
    folder = "bundles/default/tiny/plain/cpu_managed/rk3576/{}/simulator-{}"
    assert list(body["bundles"]) == [folder.format("fp16", "pass"), folder.format("w4a16", "warn")]
    model = root / folder.format("w4a16", "warn") / "model.rknn"
    assert model.read_text() == "artifact w4a16" and model.stat().st_nlink == 2


def test_a_row_that_turns_red_loses_its_bundle_and_other_sweeps_stay(root):
    synthetic.tabulated(root, ROWS)
    synthetic.tabulated(root, ROWS[:1], "other")
    one(root, ROWS[0], 0.7)
    body = synthetic.tabulated(root, ROWS)
    assert [Path(x).parts[-2] for x in body["bundles"]] == ["w4a16"]
    assert [p.name for p in (root / "bundles/default/tiny/plain/cpu_managed/rk3576").iterdir()] == ["w4a16"]
    assert (root / "bundles/other/tiny/plain/cpu_managed/rk3576/fp16/simulator-pass/model.rknn").exists()


def test_the_sweep_says_which_rows_get_one(root):
    assert [Path(x).name for x in synthetic.tabulated(root, ROWS, bundle=("warn",))["bundles"]] == ["simulator-warn"]
    body = synthetic.tabulated(root, ROWS, bundle=("behaves",))
    assert body["bundles"] == {} and not (root / "bundles/default/tiny").exists()
    assert "nothing to ship of tiny on rk3576: no row is behaves; closest: " in body["announce"]
    assert "on rk3576: sweep.bundle is []" in synthetic.tabulated(root, ROWS, bundle=())["announce"]


def test_a_rebuilt_artifact_replaces_the_link(root):
    synthetic.tabulated(root, ROWS)
    built = root / record_path("build", ROWS[0] | {"part": "decode"})
    record.write_bytes(built.with_name("model.rknn"), b"new")
    files = {x: record.sha256(built.with_name(x)) for x in ("model.rknn", "contract.json")}
    record.write(built, record.read(built) | {"files": files})
    synthetic.tabulated(root, ROWS)
    folder = root / "bundles/default/tiny/plain/cpu_managed/rk3576/fp16/simulator-pass"
    assert (folder / "model.rknn").read_bytes() == b"new"


def test_rows_of_onnxruntime_have_bundles_and_are_named_one_by_one(tmp_path):
    rows = [
        synthetic.ROW | {"platform": "host", "quant": "fp32", "backend": "onnxruntime", "strategy": x}
        for x in ("cpu_managed", "fixed_max_blend", "dynamic_concat")
    ]
    for row in rows:
        results = synthetic.Results(tmp_path, row)
        results.verify("capital", OF, synthetic.observation(OF))
        results.built({"status": "ok"})
        assert results.judge()["verdict"] == "pass"
    body = synthetic.tabulated(tmp_path, rows)
    folders = [f"bundles/default/tiny/plain/{row['strategy']}/host/fp32/onnxruntime-pass" for row in rows]
    assert list(body["bundles"]) == folders
    said = body["announce"].splitlines()[-4:]
    what = "fp32 host (onnxruntime), the graph in ONNX Runtime, no NPU"
    place = f"{tmp_path.name}/bundles"
    assert said[0] == f"ship (pass): tiny cpu_managed {what}: {place}{folders[0].removeprefix('bundles')}"
    assert said[1].endswith(f'{folders[0]}/generate.py "What is the capital of France?"')
    assert said[2] == f"  also (pass): tiny fixed_max_blend {what}: {place}{folders[1].removeprefix('bundles')}"
    assert said[3].endswith(folders[2])


def test_equal_work_gives_equal_bytes_wherever_it_lies(root, tmp_path_factory):
    first = synthetic.tabulated(root, ROWS)
    assert str(root) not in str(first)
    other = tmp_path_factory.mktemp("a") / root.name
    root.rename(other)
    assert synthetic.tabulated(other, ROWS) == first


def test_the_end_says_where_to_look_and_what_to_ship(root, capsys):
    assert main(root, "default", rows(), behaviour.SHIPS, {}) == 0
    out = capsys.readouterr().out
    assert "1 pass, 1 warn, 1 fail, 1 blocked" in out
    assert f"see {root}/models/tiny/rows/plain/cpu_managed/rk3576/w8a8/simulator/verdict.json" in out
    assert out.splitlines()[0] == "tiny plain rk3576 simulator"
    assert out.splitlines()[-1] == "2 bundles of tiny on rk3576 are gone: a plain run makes them again"
    said = synthetic.tabulated(root, ROWS)["announce"].splitlines()
    place, ask = f"{root.name}/bundles/default/tiny/plain/cpu_managed/rk3576", '"What is the capital of France?"'
    assert said[-4] == f"ship (pass): tiny cpu_managed fp16 rk3576 (simulator), 278.0 MiB: {place}/fp16/simulator-pass"
    assert said[-3].startswith("  on this PC: ") and said[-3].endswith(
        f" {place}/fp16/simulator-pass/generate.py {ask}"
    )
    assert said[-2] == f"  on a board (rk3576): copy that folder, then in it: python3 generate.py {ask}"
    what = "tiny cpu_managed w4a16 rk3576 (simulator), 278.0 MiB"
    assert said[-1] == f"  also (warn): {what}: {place}/w4a16/simulator-warn"
    assert main(root, "default", rows(), behaviour.SHIPS, {}) == 0
    assert [x.replace(str(root), root.name) for x in capsys.readouterr().out.splitlines()[-4:]] == said[-4:]


def test_the_table_shows_what_there_is(root, capsys):
    (root / record_path("judge", ROWS[2])).unlink()
    main(root, "default", rows(), behaviour.SHIPS, {})
    out = capsys.readouterr().out
    assert "1 pass, 1 warn, 0 fail, 1 blocked, 1 not there yet" in out
    assert "w8a8" not in out
    assert main(root / "none", "default", rows(), behaviour.SHIPS, {}) == 1
    assert "no row is finished yet, 4 planned" in capsys.readouterr().err


def test_the_best_row_is_green_then_small_then_cheap():
    def best(*verdicts):
        return ship.best_row(verdicts)

    cheap, small = made(verdict="pass", size=9, cycles=1), made(verdict="pass", size=8, cycles=9)
    assert best(cheap, small) is small
    assert best(made(verdict="pass", size=8, cycles=10), small) is small
    assert best(made(verdict="pass", size=7, on_cpu=63), small) is small  # boards got scatters on the CPU wrong
    assert best(made(verdict="warn"), cheap) is cheap
    assert best(made(), warn := made(verdict="warn", size=9)) is warn
    assert best(made(behaves=False), red := made(size=9)) is red
    assert best(made(behaves=False), made(verdict="blocked")) is None


def test_where_nothing_ships_the_closest_row_is_named(root):
    def said(these):
        shelf = ship.Shelf(Path("results/bundles/s"), behaviour.SHIPS, ())
        return table.summary(root, table.load(root, these), len(these), shelf)

    red = [row for row in ROWS if row["quant"] in ("w8a8", "broken")]
    assert (
        "nothing to ship of tiny on rk3576: no row is pass or warn or behaves; "
        "closest: tiny cpu_managed w8a8 rk3576 (simulator), logits off by at most 0"
    ) in said(red)
    assert "closest" not in said(ROWS)
    assert said(red[1:]).endswith("no row is pass or warn or behaves")


def made(
    model="tiny",
    weights="plain",
    quant="fp16",
    verdict="fail",
    behaves=True,
    size=1,
    cycles=1,
    platform="rk3576",
    on_cpu=0,
):
    row = synthetic.ROW | {"model": model, "weights": weights, "quant": quant, "platform": platform}
    figures = {"behaviour": {"behaves": behaves, "ratio": 1.02, "top1": 0.96}, "logits_worst": None}
    figures |= {"artifact_bytes": size * 2**20, "cycles": cycles * 10**6, "traffic_bytes": 1, "total_ms": None}
    figures |= {"cpu_operators": {"ScatterND": on_cpu} if on_cpu else {}}
    gates = [{"name": "tokens", "verdict": "warn"}, {"name": "kv_l2", "verdict": verdict}]
    return {"row": row, "verdict": verdict, "reason": "off", "gates": gates, "figures": figures, "findings": []}


def of_models(*verdicts, wanted=behaviour.SHIPS, refused=None):
    """The summary's lines after the counts and the first red row; all bundles that are not refused are there."""
    refused = refused or {}
    there = {ship.folder(v, wanted) for v in verdicts} - refused.keys()
    shelf = ship.Shelf(Path("results/bundles/s"), wanted, there, refused)
    lines = table.summary(Path("results"), verdicts, len(verdicts), shelf).splitlines()
    return [x for x in lines[1:] if "red row" not in x and not x.startswith("  see")]


def test_the_smallest_and_the_fastest_that_behave_are_named_whatever_the_gates():
    said = of_models(
        made(quant="w4a16", behaves=False, size=1),
        made(weights="split_g32", quant="w4a16", size=2, cycles=9),
        made(weights="int8", quant="w8a8", size=3, cycles=5),
        made(size=4, cycles=9),
    )
    end = "(fail): perplexity x 1.020, top-1 96.00 %"
    assert said[:2] == [
        f"smallest of tiny on rk3576 that behaves: split_g32 cpu_managed w4a16 {end}, 2.0 MiB, 9.0 Mcycles",
        f"fastest predicted of tiny on rk3576 that behaves: int8 cpu_managed w8a8 {end}, 3.0 MiB, 5.0 Mcycles",
    ]
    assert said[2].startswith(
        "ship (red by the gates, behaves): tiny split_g32 cpu_managed w4a16 rk3576 (simulator), 2.0 "
    )
    assert said[2].endswith("/split_g32/cpu_managed/rk3576/w4a16/simulator-behaves")


def test_every_model_and_platform_has_its_own_lines_a_chip_s_ship_last():
    said = of_models(
        made(verdict="pass"),
        made("large", verdict="pass"),
        made(platform="rk3588", behaves=False),
        made(platform="host"),
    )
    assert [x.partition(":")[0] for x in said if "that behaves:" not in x] == [
        "nothing to ship of tiny on rk3588",
        "ship (red by the gates, behaves)",
        "  on this PC",
        *("ship (pass)", "  on this PC", "  on a board (rk3576)") * 2,
    ]
    assert " host " in said[said.index(next(x for x in said if x.startswith("ship (red")))]


def test_many_others_are_counted():
    rows = [made(verdict="pass", size=1), *(made(quant=f"q{n}", verdict="warn") for n in range(3)), made(quant="q3")]
    assert of_models(*rows)[-1] == "  4 more (3 warn, 1 behaves): results/bundles/s/tiny/*/*/rk3576"


def test_a_bundle_that_could_not_be_made_is_said_and_the_next_best_row_ships():
    rows = [made(verdict="pass"), made(quant="w8a8", verdict="warn")]
    said = of_models(*rows, refused={ship.folder(rows[0], behaviour.SHIPS): "x is gone; run again"})
    assert "no bundle of tiny cpu_managed fp16 rk3576 (simulator): x is gone; run again" in said
    assert next(x for x in said if x.startswith("ship")).startswith("ship (warn): tiny cpu_managed w8a8 ")


def test_the_interpreter_is_called_from_here_and_no_path_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for python, said in ((tmp_path / ".venv/bin/python", ".venv/bin/python"), ("/usr/bin/python3.11", "python3")):
        monkeypatch.setattr(sys, "executable", str(python))
        assert of_models(made(verdict="pass"))[2].startswith(f"  on this PC: {said} results/bundles/s/tiny/")


@pytest.mark.parametrize(
    ("require", "code", "lines"),
    [
        ([], 1, 3),
        ([{"quant": "fp16"}], 0, 1),
        ([{"quant": ["fp16", "w8a8"]}], 1, 1),
        ([{"quant": "w4a16", "strategy": "cpu_managed"}], 1, 1),
        ([{"quant": "fp16"}, {"quant": "nothing"}], 1, 1),
    ],
)
def test_gate(root, capsys, require, code, lines):
    assert gate(root, rows(), require, {}) == code
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_gate_on_nothing_is_no_pass(root, capsys):
    assert gate(root, [], [], {}) == 1
    (root / record_path("judge", ROWS[0])).unlink()
    assert gate(root, rows(), [{"quant": "fp16"}], {}) == 1
    assert "missing: tiny/plain/cpu_managed/rk3576/fp16/simulator: not judged yet" in capsys.readouterr().out


def test_a_stale_verdict_is_red_in_the_gate_and_marked_in_the_table(root, capsys):
    """Thresholds, code or config changed and nothing ran yet, or --touch was used."""
    synthetic.tabulated(root, ROWS)
    outdated = {record_path("judge", ROWS[0]): "config thresholds"}
    assert gate(root, rows(), [{"quant": "fp16"}], outdated) == 1
    said = capsys.readouterr().out
    assert said == "stale: tiny/plain/cpu_managed/rk3576/fp16/simulator: was pass; config thresholds: run snakemake\n"
    main(root, "default", rows(), behaviour.SHIPS, outdated)
    said = capsys.readouterr().out
    (line,) = [x for x in said.splitlines() if x.startswith("cpu_managed  fp16")]
    assert re.match(r"cpu_managed +fp16 +fp16 +pass \(stale\) ", line)
    assert "0 pass, 1 warn, 1 fail, 1 blocked, 1 stale: a plain run judges them again" in said
    assert "simulator-pass" not in said and "ship (warn): " in said
    main(root, "default", rows(), behaviour.SHIPS, dict.fromkeys((record_path("judge", x) for x in ROWS), "code"))
    said = capsys.readouterr().out
    assert said.count("(stale)") == 4 and "ship" not in said and "red row" not in said


@pytest.mark.parametrize(
    "module",
    ["stages.verify", "stages.judge", "stages.tabulate", "report.table", "judging.explanations", "judging.metrics"],
)
def test_nothing_heavy_is_imported(module):
    code = f"import kvgate.{module}, sys; print(*sys.modules)"
    path = Path(__file__).parents[2] / "workflow"
    out = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(path)}, capture_output=True, text=True)
    loaded = set(out.stdout.split())
    assert f"kvgate.{module}" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime", "rknn"}
    if module in ("stages.tabulate", "report.table", "judging.explanations"):
        assert "numpy" not in loaded
