"""A bundle on an emulated board: its programs on Python of aarch64, with the vendor's real lite package and with ours.

The artifact is a script of the double of the C runtime, whose rule says which tokens must come.
"""

import json

import numpy as np
import pytest
import tinyrow
from kvgate.contract import Contract
from kvgate.serving.context import Context, Options, Run
from kvgate.strategies.cpu_managed.host import Host
from system import double, rows

pytestmark = pytest.mark.system
PROMPT, TOKENS = [3, 1, 4, 1, 5], 6


@pytest.fixture(scope="module")
def board(emulated, runtime64):
    return emulated(runtime=runtime64)


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    return tinyrow.Rows(tmp_path_factory.mktemp("bundle"))


def bundled(row, *lines):
    contract = Contract.from_json((row.graph / "contract.json").read_text())
    row.artifact = double.artifact(contract, *lines, custom="x").encode()
    return row.bundle(tinyrow.CHIP)


def generate(board, bundle, ids, engine):
    words = ("--ids", ",".join(map(str, ids)), "--backend", engine, "--max-tokens", str(TOKENS))
    return board.run("-I", str(bundle / "generate.py"), *words)


@pytest.mark.parametrize("engine", ["lite", "native"])
def test_tokens_are_what_the_artifact_computes(board, row, engine):
    bundle = bundled(row)
    contract = Contract.from_json((bundle / "graph_contract.json").read_text())
    tables = dict(np.load(bundle / "host.npz"))
    context = Context(rows.Rule(contract), Host(contract, tables, -1e4), [257])
    wanted = list(context.generate(PROMPT, Options(TOKENS), Run(len(PROMPT))))
    ran = generate(board, bundle, PROMPT, engine)
    assert ran.returncode == 0, ran.stderr
    assert [int(x) for x in ran.stdout.split()] == wanted and len(set(wanted)) > 1


@pytest.mark.parametrize(
    ("line", "engine", "said"),
    [
        ("say run 4 E RKNN: [12:00:00.000] failed to submit!, op id: 3", "lite", "failed to submit"),
        ("say run 4 E RKNN: [12:00:00.000] failed to submit!, op id: 3", "native", "failed to submit"),
        ("code init 0 -6", "lite", "RKNN_ERR_MODEL_INVALID"),
    ],
)
def test_what_the_runtime_says_is_one_line(board, row, line, engine, said):
    ran = generate(board, bundled(row, line), PROMPT, engine)
    assert ran.returncode == 1 and said in ran.stderr, ran.stderr
    assert ran.stderr.startswith("generate: ") and ran.stderr.count("\n") == 1, ran.stderr


def test_a_board_of_another_chip(emulated, runtime64, row):
    ran = generate(emulated(platform="rk3588", runtime=runtime64), bundled(row), PROMPT, "lite")
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("generate: platform: got rockchip,rk3588") and "allowed: rockchip,rk3576" in ran.stderr


def test_a_board_without_a_tokenizer(board, row):
    ran = board.run("-I", str(bundled(row) / "serve.py"))
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1
    assert "serve: text: needs the Python package tokenizers" in ran.stderr


# As serve.py does it: the runtime is opened, stepped and closed in a thread that is not the first one.
IN_A_THREAD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from kvgate.serving import bundled, serve, worker
from kvgate.serving.context import Options, Run
from kvgate.serving.terminal import Terminal
folder = Path(sys.argv[1])
args = serve.parser(folder).parse_args(["--backend", sys.argv[2]])
terminal = Terminal()
made = worker.Worker(lambda: bundled.open_context(args, bundled.Bundle(folder), terminal), 1)
made.start()
ids = [int(x) for x in sys.argv[3].split(",")]
for n in range(2):
    job = made.submit(lambda context, stopped: context.generate(ids, Options(int(sys.argv[4])), Run(len(ids)), stopped))
    terminal.out.write(" ".join(str(x) for x in job.pieces(1) if x is not None) + "\\n")
terminal.out.flush()
terminal.say("closed: {}".format(made.stop(20)))
"""


@pytest.mark.parametrize("engine", ["lite", "native"])
def test_the_thread_of_a_server_gets_the_same_tokens(board, row, engine):
    bundle = bundled(row)
    wanted = [int(x) for x in generate(board, bundle, PROMPT, engine).stdout.split()]
    ran = board.run("-I", "-c", IN_A_THREAD, str(bundle), engine, ",".join(map(str, PROMPT)), str(TOKENS))
    assert ran.returncode == 0 and ran.stderr.splitlines()[-1:] == ["closed: True"], ran.stderr
    assert [[int(x) for x in line.split()] for line in ran.stdout.splitlines()] == [wanted, wanted]
    assert len(wanted) == TOKENS


def test_the_core_mask_that_is_taken_is_said(board, row):
    bundle = bundled(row)
    words = ("--ids", "1,2", "--max-tokens", "1", "--core-mask", "0_1_2")
    ran = board.run("-I", str(bundle / "generate.py"), *words)
    assert ran.returncode == 0 and "core_mask: core mask: got 7, the lite package" in ran.stderr
    assert json.loads((bundle / "bundle.json").read_text())["engine"] == "lite"
