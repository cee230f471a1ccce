"""ask: the bundle of the row to ship is run, with the question as it is."""

import pytest
import synthetic
from kvgate.jobs import record
from kvgate.jobs.job import record_path
from kvgate.jobs.rows import Row
from kvgate.report import ask, ship
from stages.test_tabulate import ERRORS, ROWS, one


def asked(root, prompt="", wanted=("pass", "warn", "behaves")):
    return ask.main(root, "default", [Row(**row) for row in ROWS], wanted, prompt)


@pytest.fixture
def root(tmp_path):
    bundles = {}
    for row in ROWS:
        verdict = one(tmp_path, row, ERRORS.get(row["quant"]))
        folder = ship.folder(verdict, ("pass", "warn", "behaves"))
        if folder:
            program = tmp_path / "bundles/default" / folder / "generate.py"
            program.parent.mkdir(parents=True)
            program.write_text("import sys\nprint(sys.argv)\nsys.exit(7)\n")
            sums = program.with_name("SHA256SUMS")
            sums.write_text(f"{record.sha256(program)}  generate.py\n")
            bundles[f"bundles/default/{folder}"] = record.sha256(sums)
    record.write(tmp_path / record_path("tabulate", {"sweep": "default"}), {"status": "ok", "bundles": bundles})
    return tmp_path


def test_the_best_row_is_asked_as_it_is_typed_and_its_exit_code_kept(root, capfd):
    assert asked(root, 'two words and a "quote"') == 7
    row, answer = capfd.readouterr().out.splitlines()
    assert row.startswith(f"{synthetic.ROW['model']} ") and " fp16 " in row
    assert answer.endswith("""generate.py', 'two words and a "quote"']""")
    assert asked(root) == 7
    assert capfd.readouterr().out.endswith(f"generate.py', '{ship.PROMPT}']\n")


def test_the_next_best_where_the_best_is_gone_or_not_wanted(root, capfd):
    asked(root, wanted=["warn"])
    assert " w4a16 " in capfd.readouterr().out


def test_nothing_to_ask_is_said_in_one_line(tmp_path, capfd):
    assert asked(tmp_path) == 1
    assert capfd.readouterr().err == (
        f"kvgate ask: {tmp_path / 'bundles/default'}: got no bundle, allowed: a sweep that ships one\n"
    )


@pytest.mark.parametrize("name", ["generate.py", "SHA256SUMS"])
def test_an_edited_bundle_is_not_asked(root, capfd, name):
    (program,) = (root / "bundles").rglob("simulator-pass/generate.py")
    with program.with_name(name).open("a") as file:
        file.write("# edited\n")
    asked(root)
    assert " fp16 " not in capfd.readouterr().out


def test_a_changed_graph_does_not_answer(root, capfd):
    path = root / record_path("export", ROWS[0] | {"part": "decode"})
    path.with_name("model.onnx").write_bytes(b"another graph")
    assert asked(root) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("kvgate ask: models/tiny/graphs/") and "model.onnx is not what " in err
