"""Bundles that cannot be opened: one line on the user's stderr, whatever is wrong with them."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import tinyrow
from kvgate.board.engine import EngineError
from kvgate.serving import bundled
from kvgate.serving.bundled import Bundle, Refused


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

    class Session:
        def __init__(self, path, options, providers):
            seen["threads"] = options.intra_op_num_threads

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
