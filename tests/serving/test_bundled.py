"""Bundles that cannot be opened: one line on the user's stderr, whatever is wrong with them."""

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tinyrow
from graphs import Model
from kvgate.board.engine import EngineError
from kvgate.serving import bundled
from kvgate.serving.bundled import Bundle, Refused
from kvgate.serving.context import Options, Run
from system import double


@pytest.fixture
def broken(bundle, tmp_path):
    """A copy that may be damaged, with damage that sizes do not show."""
    shutil.copytree(bundle, tmp_path / "b")

    def damage(name, change):
        path = tmp_path / "b" / name
        path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
        return tmp_path / "b"

    return damage


def flipped(data):
    half = len(data) // 2
    return data[:half] + bytes([data[half] ^ 0xFF]) * 9 + data[half + 9 :]


def zeroed(data):
    return bytes(len(data))


def short(data):
    return data[:-50]


@pytest.mark.parametrize("name", ["tokenizer.json", "host.npz", "bundle.json", "graph_contract.json", "model.onnx"])
@pytest.mark.parametrize("change", [flipped, zeroed, short, None], ids=["flipped", "zeroed", "short", "gone"])
def test_a_damaged_file_is_one_line(broken, name, change):
    ran = tinyrow.generate(broken(name, change), "Hi")
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1), ran
    assert ran.stderr.startswith("generate: ") and len(ran.stderr) > 30 and "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{}",
        b"null",
        b'"x"',
        b"\xff",
        b'{"version": 1}',
        b'{"version": 1, "contract_digest": 5}',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("name", ["bundle.json", "graph_contract.json"])
def test_json_that_is_another_one(broken, name, data):
    with pytest.raises(Refused) as caught:
        Bundle(broken(name, lambda old: data))
    assert str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["row", "special", "end_ids", "engine", "platform", "mask", "sizes", "artifact"])
@pytest.mark.parametrize("value", [None, 7, []])
def test_facts_of_another_kind(broken, name, value):
    folder = broken("bundle.json", lambda old: json.dumps({**json.loads(old), name: value}).encode())
    if name == "end_ids" and value == []:
        Bundle(folder)  # a model that never ends by itself
    elif name == "mask" and value == 7:
        ran = tinyrow.generate(folder, "Hi")
        assert (ran.returncode, ran.stderr.count("\n")) == (1, 1) and "mask value: got 7.0" in ran.stderr
    else:
        with pytest.raises(Refused, match=f"{name}: got (null|a number|a list), allowed: "):
            Bundle(folder)


def test_end_ids_are_token_ids(broken):
    folder = broken("bundle.json", lambda old: json.dumps({**json.loads(old), "end_ids": ["</s>"]}).encode())
    with pytest.raises(Refused, match=r'end_ids: got \["</s>"\], allowed: token ids'):
        Bundle(folder)


@pytest.mark.parametrize(
    "how",
    [
        "raise OSError('librknnrt.so: cannot open shared object file')",
        "raise AttributeError('undefined symbol')",
        "raise SystemError('initialization failed')",
        "raise SystemExit('unsupported')",
        "raise SystemExit(-1)",
        "raise ImportError('no rknn')",
        "raise RuntimeError",
        "class RKNNLite:\n    def __init__(self, **options): raise ValueError('no NPU\\nhere')",
        "class RKNNLite:\n    def __init__(self, **options): exit(-1)",
        "RKNNLite = None",
        "1 +",
    ],
)
def test_a_vendor_s_package_that_cannot_be_imported_is_one_line(rows, tmp_path, how):
    chip = rows.bundle(tinyrow.CHIP)
    shutil.copytree(chip, tmp_path / "chip")
    (tmp_path / "chip/rknnlite").mkdir()
    (tmp_path / "chip/rknnlite/__init__.py").touch()
    (tmp_path / "chip/rknnlite/api.py").write_text("print('noise')\n" + how + "\n")
    for word in ("--ids=1", "--chat") if how == "raise RuntimeError" else ("Hi",):
        ran = tinyrow.generate(tmp_path / "chip", word)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1), ran
        assert ran.stderr.startswith("generate: ") and len(ran.stderr) > 25
    rows.bundle(tinyrow.HOST)


def test_a_file_of_the_code_that_is_gone_is_one_line(broken):
    ran = tinyrow.generate(broken("kvgate/board/printed.py", None), "Hi")
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert ran.stderr.startswith("generate: ") and "printed" in ran.stderr


def test_a_graph_s_contract_that_is_no_contract(bundle, tmp_path):
    (tmp_path / "model.onnx").touch()
    for data in (b"[]", b"{", b"\xff", b"null"):
        (tmp_path / "contract.json").write_bytes(data)
        ran = tinyrow.generate(bundle, "Hi", "--graph", str(tmp_path))
        assert ran.returncode == 1 and "is the contract of another graph" in ran.stderr and ran.stderr.count("\n") == 1


# A prompt in chunks, by the C runtime itself


TOKENS = 8
SILENT = types.SimpleNamespace(errors=list, heed=lambda: None, say=lambda text: None)


@pytest.fixture
def native(rows, tmp_path, monkeypatch):
    """Opens a chip's bundle with a prefill part on doubles of the runtime, one an artifact, that compute its graph."""
    made = Model(rows.results, "tiny")
    parts = {"": made.export("cpu_managed", capacity=tinyrow.CAPACITY)}
    parts["prefill"] = made.prefill("cpu_managed", capacity=tinyrow.CAPACITY, tokens=TOKENS)
    folder = tmp_path / "native"
    shutil.copytree(rows.bundle(tinyrow.CHIP), folder)
    facts = json.loads((folder / "bundle.json").read_text())
    built = double.build(tmp_path / "librknnrt.so")
    libraries = {}
    for place, graph in parts.items():
        (folder / place).mkdir(exist_ok=True)
        text = double.artifact(graph.contract, stored=double.Stored("float32"), custom="x")
        (folder / place / "model.rknn").unlink(missing_ok=True)
        (folder / place / "model.rknn").write_text(text)
        (folder / place / "graph_contract.json").write_text(graph.contract.to_json() + "\n")
        libraries[place] = double.Library(Path(shutil.copy(built, tmp_path / f"{place}.so")))
        libraries[place].compute(graph.contract, graph.engine.step)
    facts["sizes"]["model.rknn"] = (folder / "model.rknn").stat().st_size
    told = {"graph": "no", "custom_string": "x", "contract_digest": parts["prefill"].contract.digest}

    def opened(**change):
        (folder / "bundle.json").write_text(json.dumps(facts | change))
        paths = iter([str(x.path) for x in libraries.values()])
        monkeypatch.setattr("kvgate.board.native._installed", lambda: next(paths))
        return Bundle(folder).context("native", None, "auto", SILENT)

    yield opened, {"prefill": told}, libraries, folder
    rows.bundle(tinyrow.HOST)


def test_native_reads_a_prompt_in_chunks(native, rows):
    """What it says is what it says token by token, in every turn of a conversation."""
    opened, part, libraries, _ = native
    ids = [int(x) for x in np.load(rows.job("trace", {}, [], program="full").folder / "trace.npz")["tokens"][:30]]
    alone = opened(parts={})
    wanted = [list(alone.generate(ids[:n], Options(5), Run(n))) for n in (20, 30, 9)]
    alone.close()
    for library in libraries.values():
        library.forget()
    context = opened(parts=part)
    steps, reused = [], []
    for n, tokens in zip((20, 30, 9), wanted, strict=True):
        run = Run(n)
        before = [x.calls("run") for x in libraries.values()]
        assert list(context.generate(ids[:n], Options(5), run)) == tokens
        steps.append([x.calls("run") - y for x, y in zip(libraries.values(), before, strict=True)])
        reused.append(run.reused)
    assert [x.problems for x in libraries.values()] == [[], []]
    # Of decode the prompt's last token, or two, and all but the last of those that were made.
    ones = [len(tokens) - 1 + n for tokens, n in zip(wanted, (1, 2, 1), strict=True)]
    assert reused == [0, 20, 8] and steps == [[ones[0], 3], [ones[1], 1], [ones[2], 0]]
    context.close()
    assert [x.live for x in libraries.values()] == [0, 0]


def test_a_part_of_another_row_is_refused_by_name(native, rows):
    opened, part, _, folder = native
    other = Model(rows.results, "tiny").prefill("cpu_managed", capacity=tinyrow.CAPACITY + 1, tokens=TOKENS).contract
    (folder / "prefill/graph_contract.json").write_text(other.to_json())
    part["prefill"]["contract_digest"] = other.digest
    with pytest.raises(Refused, match=r"native: prefill: cache: got Cache\(capacity=49.*allowed: Cache\(capacity=48"):
        opened(parts=part)


# The command line


@pytest.mark.parametrize("words", [["Hü 漢"], ["Hi", "--system", "ü"], ["--chat", "ü"]])
def test_arguments_are_utf_8_whatever_the_locale(bundle, words):
    command = [sys.executable, str(bundle / "generate.py"), *words, "--max-tokens", "4"]
    usual = subprocess.run(command, capture_output=True, env=tinyrow.bare(), input=b"")
    latin = tinyrow.bare() | {"PYTHONUTF8": "0", "LC_ALL": "de_DE.ISO-8859-1", "PYTHONCOERCECLOCALE": "0"}
    other = subprocess.run(command, capture_output=True, env=latin, input=b"")
    assert usual.returncode == other.returncode == 0 and usual.stdout == other.stdout, other.stderr


def test_an_argument_s_bytes_are_what_counts(monkeypatch):
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("latin-1"))
    assert bundled.text("Ã¼") == "ü"
    with pytest.raises(bundled.argparse.ArgumentTypeError, match="UTF-8"):
        bundled.text("ü")


def test_threads_and_memory_reach_the_context(rows, bundle, monkeypatch):
    seen = {}

    class Session(onnxruntime.InferenceSession):
        def __init__(self, path, options, providers):
            seen["threads"] = options.intra_op_num_threads
            super().__init__(path, options, providers=providers)

    monkeypatch.setattr("onnxruntime.InferenceSession", Session)
    for words, threads, keep in (([], len(os.sched_getaffinity(0)), 64), (["--threads", "3", "--keep", "5"], 3, 5)):
        parser = bundled.argparse.ArgumentParser()
        bundled.options(parser, bundle)
        terminal = type("Terminal", (), {"errors": lambda self: [], "heed": lambda self: None})()
        context = bundled.open_context(parser.parse_args(words), Bundle(bundle), terminal)
        assert seen["threads"] == threads and context.kept.limit == keep << 20


def test_errors_are_named_unless_they_are_made_for_people():
    for error, wanted in (
        (Refused("a\nb"), "a b"), (EngineError("kind", "text"), "text"), (ValueError("v"), "v"),
        (KeyError("row"), "KeyError: 'row'"), (RuntimeError(), "RuntimeError"), (SystemExit(-1), "SystemExit: -1"),
    ):  # fmt: skip
        assert bundled.one_line(error) == wanted
