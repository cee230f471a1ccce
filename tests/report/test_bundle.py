"""Bundles: what is in one, that it is whole and the same each time, and that it runs away from here."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import tinyrow
from kvgate.jobs import hashed, record
from kvgate.report import bundle, bundle_copy
from kvgate.report.bundle import half
from tinyrow import CHIP, HOST, generate

COMMON = {
    "README.md", "SHA256SUMS", "bundle.json", "chat_template.jinja", "generate.py", "generation_config.json",
    "graph_contract.json", "host.npz", "kvgate", "requirements.txt", "serve.py", "tokenizer.json",
    "tokenizer_config.json", "verdict.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return tinyrow.Rows(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def chip(rows):
    return rows.bundle(CHIP)


@pytest.fixture
def host(rows):
    return rows.bundle(HOST)


def bytes_of(folder: Path) -> dict[str, str]:
    files = (x for x in folder.rglob("*") if x.is_file() and x.suffix != ".pyc")
    return {str(x.relative_to(folder)): hashlib.sha256(x.read_bytes()).hexdigest() for x in files}


def turned(verdict: Path, word: str, gate: str = "tokens") -> None:
    """Another verdict, as its gates say."""
    body = record.read(verdict)
    record.write(verdict, body | {"verdict": word, "gates": [*body["gates"], {"name": gate, "verdict": word}]})


def inodes(folder: Path) -> dict[Path, int]:
    return {x: x.stat().st_ino for x in folder.rglob("*")}


def test_a_chip_s_bundle(rows, chip):
    assert {x.name for x in chip.iterdir()} == COMMON | {"model.rknn", "contract.json"}
    assert (chip / "model.rknn").stat().st_nlink == 2
    facts = json.loads((chip / "bundle.json").read_text())
    assert (facts["engine"], facts["platform"], facts["custom_string"]) == ("lite", "rk3576", "x")
    assert facts["end_ids"] == [257] and facts["mask"] == -1e4
    text = (chip / "requirements.txt").read_text()
    assert 'rknn-toolkit-lite2==2.5.0; platform_machine == "aarch64"' in text
    text = (chip / "README.md").read_text()
    for part in ("**pass** in the toolkit's simulator", "36.4", "270.0", "1/1", "F1 a risk", "context, tokens | 48"):
        assert part in text, part
    assert "Red by the gates" not in text
    assert str(rows.results) not in text
    assert (facts["verdict"], facts["ships"]) == ("pass", "pass")
    assert (chip / facts["graph"]).samefile(rows.graph) and not Path(facts["graph"]).is_absolute()


def test_only_what_is_large_and_made_here_is_linked(rows):
    """A checkpoint's files may be the user's own, by a hard link."""
    chip, host = rows.tabulated(rows.judged(CHIP), rows.judged(HOST), sweep="linked")["bundles"]
    for folder, large in ((chip, {"model.rknn"}), (host, {"model.onnx", "weights.bin"})):
        linked = {x.name for x in (rows.results / folder).rglob("*") if x.is_file() and x.stat().st_nlink > 1}
        assert linked - {"host.npz"} == large  # the tables are another bundle's


def test_a_row_that_behaves_says_so_in_its_name_first_lines_and_facts(rows):
    verdict = rows.judged(CHIP)
    body = record.read(verdict)
    gate = body["gates"][0] | {"name": "kv_l2", "verdict": "fail", "text": "K/V delta 1.20 %"}
    figures = body["figures"] | {"behaviour": {"behaves": True, "ratio": 1.02, "top1": 0.96}}
    red = {"verdict": "fail", "reason": "K/V delta 1.20 %", "gates": [*body["gates"], gate], "figures": figures}
    record.write(verdict, body | red)
    (folder,) = rows.tabulated(verdict, sweep="red")["bundles"]
    assert folder.endswith("/fp16/simulator-behaves")
    lines = (rows.results / folder / "README.md").read_text().splitlines()
    assert lines[2].startswith("**Red by the gates, behaves** in the toolkit's simulator, which is no board: ")
    assert "1.020 times" in lines[3] and "96.00 %" in lines[3] and "but for near ties" in lines[3]
    assert lines[4] == "By the gates it is **fail**: K/V delta 1.20 %."
    facts = record.read(rows.results / folder / "bundle.json")
    assert (facts["verdict"], facts["ships"]) == ("fail", "behaves")


def test_a_bundle_of_onnxruntime(host):
    assert {x.name for x in host.iterdir()} == COMMON | {"model.onnx", "weights.bin"}
    assert "which is no board" in (host / "README.md").read_text()
    assert "rknn" not in (host / "requirements.txt").read_text()


def test_the_checksums_are_of_every_file(chip):
    (command,) = [x for x in (chip / "README.md").read_text().splitlines() if x.startswith("sha256sum")]
    assert command == "sha256sum -c SHA256SUMS"  # BusyBox knows neither --quiet nor --strict
    checked = subprocess.run(command.split(), cwd=chip, capture_output=True, text=True)
    assert checked.returncode == 0, checked
    assert len(checked.stdout.splitlines()) == len(bytes_of(chip)) - 1


def test_a_second_time_nothing_is_touched_also_after_a_run(rows, host):
    before = inodes(host)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(host / "kvgate")], check=True)
    rows.bundle(HOST)
    assert before.items() <= inodes(host).items()


def test_equal_rows_give_equal_bytes(rows, host):
    kept = bytes_of(host)
    shutil.rmtree(rows.results / "bundles")
    assert bytes_of(rows.bundle(HOST)) == kept


@pytest.mark.parametrize("name", ["README.md", "host.npz", "tokenizer.json", "bundle.json", "kvgate/contract.py"])
def test_what_was_changed_is_made_again(rows, name):
    folder = rows.bundle(HOST)
    kept = bytes_of(folder)
    (folder / name).unlink()
    if name != "README.md":
        (folder / name).write_bytes(b"{}")
    (folder / "more.txt").touch()
    assert bytes_of(rows.bundle(HOST)) == kept


def test_a_killed_job_s_leftovers_go(rows, host):
    for name in (".onnxruntime-pass.part", ".onnxruntime-pass.old", "onnxruntime", "onnxruntime-warn"):
        (host.parent / name / "kvgate").mkdir(parents=True)
        (host.parent / name / "kvgate/x.py").touch()
    rows.bundle(HOST)
    assert [x.name for x in host.parent.iterdir()] == ["onnxruntime-pass"]


def test_a_row_that_no_longer_passes_loses_its_bundle(rows):
    verdicts = [rows.judged(HOST), rows.judged(CHIP)]
    body = rows.tabulated(*verdicts, sweep="two")
    assert len(body["bundles"]) == 2
    # The tables are the same graph's: on disk once.
    one, two = (rows.results / x / "host.npz" for x in body["bundles"])
    assert one.samefile(two)
    turned(verdicts[1], "warn")
    assert [x.rpartition("/")[2] for x in rows.tabulated(*verdicts, sweep="two")["bundles"]] == [
        "onnxruntime-pass",
        "simulator-warn",
    ]
    turned(verdicts[1], "fail", "nan")
    left = rows.tabulated(*verdicts, sweep="two")["bundles"]
    assert list(left) == [x for x in body["bundles"] if "/host/" in x]
    there = (rows.results / "bundles/two").rglob("bundle.json")
    assert [str(x.parent.relative_to(rows.results)) for x in there] == list(left)


@pytest.mark.parametrize("name", ["model.rknn", "contract.json", "host.npz", "tokenizer.json", "graph_contract.json"])
@pytest.mark.parametrize("change", ["gone", "edited"])
def test_a_file_that_is_not_its_stage_s_is_one_line_and_no_bundle(rows, tmp_path, name, change):
    results = tmp_path / "results"
    shutil.copytree(rows.results, results, ignore=shutil.ignore_patterns("bundles"))
    other = copy(rows)
    other.results = results
    verdict = other.judged(CHIP)
    stage = {"host.npz": "export", "graph_contract.json": "export", "tokenizer.json": "fetch"}.get(name, "build")
    file = other.job(stage, {}, [], **CHIP).folder / name.removeprefix("graph_")
    file.write_bytes(file.read_bytes() + b" ") if change == "edited" else file.unlink()
    body = other.tabulated(verdict)
    said = f"is not what {stage} wrote; run again: it is made again" if change == "edited" else "is gone; run again"
    ((row, why),) = body["refused"].items()
    assert row.endswith("/fp16/simulator-pass") and body["bundles"] == {} and body["again"]
    assert why.startswith(f"{file.relative_to(results)} {said}")
    assert f"no bundle of tiny {rows.strategy} fp16 rk3576 (simulator): {why}" in body["announce"]
    assert not [x for x in results.glob("bundles/**/*") if x.is_file()]


def test_what_was_edited_deleted_or_cut_is_told(rows, host):
    (folder,), sha = [str(host.relative_to(rows.results))], record.sha256(host / "SHA256SUMS")
    known = {folder: sha}
    assert bundle.broken(rows.results, known) == []
    assert bundle.broken(rows.results, {folder: "0" * 64}) == [folder]
    for name in ("README.md", "kvgate/contract.py", "bundle.json", "SHA256SUMS", "verdict.json"):
        kept = (host / name).read_bytes()
        (host / name).write_bytes(kept[:-2] + b"x\n")
        assert bundle.broken(rows.results, known) == [folder], name
        (host / name).unlink()
        assert bundle.broken(rows.results, known) == [folder], name
        (host / name).write_bytes(kept)
    assert bundle.broken(rows.results, known) == []
    shutil.rmtree(host)
    assert bundle.broken(rows.results, known) == [folder]


def test_a_large_file_that_was_edited_is_told_and_one_that_lies_still_is_not_read(rows, host, monkeypatch):
    monkeypatch.setattr(hashed, "LARGE", 0)
    monkeypatch.setattr(hashed, "_TICK", -1)
    known, path = {str(host.relative_to(rows.results)): record.sha256(host / "SHA256SUMS")}, host / "host.npz"
    assert bundle.broken(rows.results, known) == []
    kept, dates = path.read_bytes(), path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(bytes([kept[1000] ^ 1]))
    os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    assert bundle.broken(rows.results, known) == list(known)
    path.write_bytes(kept)
    assert bundle.broken(rows.results, known) == []
    with monkeypatch.context() as m:
        m.setattr(hashed.record, "sha256", lambda path: pytest.fail(f"{path} was read again"))
        assert bundle.whole(rows.results, "none") == set()
        assert hashed.sha256(path, rows.results)


def test_tables_that_moved_to_another_row_are_not_taken_from_where_they_lay(rows, tmp_path):
    """Two rows swap their graphs: each bundle has the tables of its own."""
    one, two = rows.bundle(HOST), tmp_path / "other"
    made = bundle.Made(tables={"x": one / "host.npz"})
    verdict = record.read(rows.judged(HOST))
    bundle._replace(one, bundle.RowFiles(rows.results, verdict, one), made)
    assert "x" not in made.tables
    bundle._replace(two, bundle.RowFiles(rows.results, verdict, two), made)
    assert (two / "host.npz").samefile(one / "host.npz")


def test_what_runs_on_a_board_is_python_3_9_and_needs_numpy_alone(chip):
    allowed = {"kvgate", "numpy", "rknnlite", "onnxruntime", "tokenizers", "jinja2"} | sys.stdlib_module_names
    for path in chip.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {x.split(".")[0] for x in names} <= allowed, path
            assert not isinstance(node, ast.Match), path


def test_tables_in_float16(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "embedding": rng.normal(size=(50, 8)).astype(np.float32),
        "turn.0": np.eye(8, dtype=np.float32)[::-1].copy(),
        "ids": np.arange(70_000, dtype=np.int64),
        "large": np.float32([1, 1e6]),
        "tiny": rng.normal(size=9).astype(np.float32) * np.float32(1e-7),
        "zero": np.zeros(3, np.float32),
    }
    np.savez(tmp_path / "host.npz", **arrays)
    data = half(tmp_path / "host.npz")
    assert data == half(tmp_path / "host.npz")
    (tmp_path / "half.npz").write_bytes(data)
    with np.load(tmp_path / "half.npz") as file:
        found = dict(file)
    kinds = {name: str(array.dtype) for name, array in found.items()}
    assert kinds == {
        "embedding": "float16", "turn.0": "float16", "ids": "int64", "large": "float32", "tiny": "float32",
        "zero": "float16",
    }  # fmt: skip
    for name in ("turn.0", "ids", "large", "tiny", "zero"):
        assert np.array_equal(found[name], arrays[name])
    assert np.abs(found["embedding"] - arrays["embedding"]).max() < 2e-3


def test_the_reference_s_tokenizer_is_taken_not_its_file(rows, monkeypatch):
    """Where transformers makes another tokenizer of the checkpoint's files, the traces are of that one."""
    folder = rows.job("fetch", {}, []).folder
    assert (rows.bundle(HOST) / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    real = bundle.tokenizer(folder)
    other = real | {"tokenizer.json": real["tokenizer.json"].replace("<|unknown|>", "<|other|>")}
    monkeypatch.setattr(bundle, "tokenizer", lambda checkpoint: other)
    shutil.rmtree(rows.results / "bundles")
    assert (rows.bundle(HOST) / "tokenizer.json").read_text() == other["tokenizer.json"]
    shutil.rmtree(rows.results / "bundles")


def test_it_generates_the_reference_s_tokens_away_from_here(rows, host, tmp_path):
    moved = tmp_path / "a folder" / "moved"
    shutil.copytree(host, moved)
    ids = ",".join(map(str, rows.prompt))
    ran = generate(moved, "--ids", ids, "--max-tokens", str(len(rows.generated)))
    assert ran.returncode == 0, ran.stderr
    assert [int(x) for x in ran.stdout.split()] == rows.generated
    assert ran.stderr.startswith(f"{len(rows.prompt)} + {len(rows.generated)} tokens (length): the first after")
    assert bytes_of(moved) == bytes_of(host)  # nothing was written into it
    lines = "import sys\nfor x in sys.modules.values():\n    print(getattr(x, '__file__', None), file=sys.stderr)\n"
    program = (moved / "generate.py").read_text().replace("sys.exit(", lines + "sys.exit(")
    (moved / "spy.py").write_text(program)
    spied = generate(moved, "--ids", ids, "--max-tokens", "1", program="spy.py").stderr
    assert f"{moved}/kvgate/serving/generate.py" in spied and f"{Path(bundle.__file__).parent}/" not in spied


def test_a_chip_s_bundle_on_a_pc(rows, chip):
    words = ("--backend", "onnxruntime", "--graph", str(rows.graph), "--max-tokens", "12")
    ran = generate(chip, "Hi", *words)
    assert (ran.returncode, ran.stdout) == (0, rows.trace["text"] + "\n"), ran.stderr
    assert generate(chip, "-", *words, input="Hi\n\n").stdout == ran.stdout
    assert generate(chip, "Hi", "--max-tokens", "12", "--graph", str(rows.graph)).stdout == ran.stdout


def test_on_a_pc_without_a_word_the_graph_is_found_and_that_is_said(rows, chip):
    ran = generate(chip, "Hi", "--max-tokens", "12")
    assert (ran.returncode, ran.stdout) == (0, rows.trace["text"] + "\n"), ran.stderr
    assert ran.stderr.splitlines()[0] == "this PC has no NPU: the graph runs in ONNX Runtime, not model.rknn"
    assert ran.stderr.count("\n") == 2
    ran = generate(chip, "Hi", "--graph", "/nowhere")
    assert ran.returncode == 1 and "got no model.onnx in /nowhere" in ran.stderr.splitlines()[1]


def test_a_copy_with_its_graph_runs_away_from_here(rows, chip, tmp_path, capsys):
    kept, into = bytes_of(chip), tmp_path / "mine"
    assert bundle_copy.main(chip, into, with_graph=True) == 0
    assert capsys.readouterr().out.startswith(f"{into}: ")
    assert {x.name for x in (into / "graph").iterdir()} == {"model.onnx", "weights.bin", "contract.json"}
    assert all(x.stat().st_nlink == 1 for x in into.rglob("*") if x.is_file())
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=into, capture_output=True).returncode == 0
    assert bytes_of(chip) == kept
    rest = {k: v for k, v in bytes_of(into).items() if not k.startswith("graph/")}
    assert {k for k in kept if rest.pop(k) != kept[k]} == {"bundle.json", "SHA256SUMS"} and not rest
    shutil.copytree(into, tmp_path / "further/away")
    ran = generate(tmp_path / "further/away", "Hi", "--max-tokens", "12")
    assert (ran.returncode, ran.stdout) == (0, rows.trace["text"] + "\n"), ran.stderr
    with pytest.raises(bundle.Refused, match="exists, allowed"):
        bundle_copy.main(chip, into, with_graph=True)


def test_a_plain_copy_is_the_bundle_and_a_damaged_one_is_refused(rows, chip, tmp_path):
    bundle_copy.main(chip, tmp_path / "a", with_graph=False)
    assert bytes_of(tmp_path / "a") == bytes_of(chip)
    shutil.copytree(chip, tmp_path / "b")
    (tmp_path / "b/README.md").write_text("x")
    with pytest.raises(bundle.Refused, match=r"README\.md: got another content than its checksum"):
        bundle_copy.main(tmp_path / "b", tmp_path / "c", with_graph=False)
    shutil.copy(chip / "README.md", tmp_path / "b/README.md")
    with pytest.raises(bundle.Refused, match="got no graph, allowed: a bundle where it was made"):
        bundle_copy.main(tmp_path / "b", tmp_path / "c", with_graph=True)
    with pytest.raises(bundle.Refused, match=r"got no bundle\.json"):
        bundle_copy.main(tmp_path, tmp_path / "c", with_graph=False)
    assert not (tmp_path / "c").exists() and not list(tmp_path.glob(".c*"))


LITE = """
import os, sys
import numpy, onnxruntime

class RKNNLite:
    \"\"\"A stand-in for the vendor's class: the graph in ONNX Runtime.\"\"\"

    def __init__(self, verbose=False):
        self.fails = int(os.environ.get("FAILS", "-1"))

    def load_rknn(self, path):
        assert path.endswith("model.rknn")
        return 0

    def init_runtime(self, core_mask=0):
        print("W RKNN: on stdout")
        if os.environ.get("REFUSES"):
            print("E RKNN: RKNN init failed. error code: RKNN_ERR_DEVICE_UNAVAILABLE", file=sys.stderr)
            return -1
        self.session = onnxruntime.InferenceSession(os.environ["GRAPH"])
        return 0

    def get_sdk_version(self):
        return "  API: 2.5.0 (x)\\n  DRV: rknn_server: 2.5.0 driver: 0.9.8"

    def inference(self, inputs, data_format=None):
        names = [x.name for x in self.session.get_inputs()]
        assert set(data_format) == {"nchw"}
        self.fails -= 1
        if self.fails == 0:
            os.write(2, b"E RKNN: [12:00:00.000] failed to submit!, op id: 1\\n")
        return self.session.run(None, dict(zip(names, inputs)))

    def release(self):
        pass
"""


@pytest.fixture
def board(chip, tmp_path):
    """The chip's bundle where a stand-in for rknnlite is installed."""
    shutil.copytree(chip, tmp_path / "board")
    (tmp_path / "board/rknnlite").mkdir()
    (tmp_path / "board/rknnlite/__init__.py").touch()
    (tmp_path / "board/rknnlite/api.py").write_text(LITE)
    return tmp_path / "board"


def test_the_vendor_s_package_is_driven_as_the_agent_drives_it(rows, board, monkeypatch):
    graph = {"GRAPH": str(rows.graph / "model.onnx")}
    monkeypatch.setattr(tinyrow, "bare", lambda bare=tinyrow.bare: bare() | graph)
    ran = generate(board, "Hi", "--max-tokens", "12")
    assert (ran.returncode, ran.stdout) == (0, rows.trace["text"] + "\n"), ran.stderr
    assert ran.stderr.count("\n") == 1
    shown = generate(board, "Hi", "--max-tokens", "12", "--show-runtime")
    assert "W RKNN: on stdout" in shown.stderr and shown.stdout == ran.stdout
    graph["FAILS"] = "25"
    ran = generate(board, "Hi")
    assert ran.returncode == 1
    assert ran.stderr == "generate: the runtime said: E RKNN: [12:00:00.000] failed to submit!, op id: 1\n"
    graph["REFUSES"] = "1"
    ran = generate(board, "Hi")
    assert ran.returncode == 1 and "RKNN_ERR_DEVICE_UNAVAILABLE" in ran.stderr and ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "rknn-toolkit-lite2: No module named 'rknnlite'"),
        (("--backend", "onnxruntime"), "got no model.onnx in"),
        (("--backend", "lite", "--graph", "/nowhere"), "got /nowhere, allowed: with --backend onnxruntime only"),
        (("--bundle", "/nowhere"), "/nowhere/bundle.json: No such file"),
    ],
)
def test_what_cannot_be_opened_is_one_line(chip, tmp_path, words, line):
    shutil.copytree(chip, tmp_path / "moved")  # away from the graph
    ran = generate(tmp_path / "moved", "Hi", *words)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert ran.stderr.startswith("generate: ") and line in ran.stderr


def test_a_graph_of_another_bundle_is_refused(rows, chip, tmp_path):
    shutil.copytree(rows.graph, tmp_path / "graph")
    contract = json.loads((rows.graph / "contract.json").read_text())
    (tmp_path / "graph/contract.json").write_text(json.dumps(contract | {"vocabulary": 7}))
    ran = generate(chip, "Hi", "--backend", "onnxruntime", "--graph", str(tmp_path / "graph"))
    assert ran.returncode == 1 and "is the contract of another graph" in ran.stderr


@pytest.mark.parametrize("name", ["host.npz", "kvgate/contract.py", "graph_contract.json"])
def test_a_bundle_that_was_cut_short_is_refused(host, tmp_path, name):
    shutil.copytree(host, tmp_path / "b")
    path = tmp_path / "b" / name
    path.write_bytes(path.read_bytes()[:-1] + (b"" if name != "kvgate/contract.py" else b"\n\n"))
    ran = generate(tmp_path / "b", "Hi")
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1, ran.stderr
