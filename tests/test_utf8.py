"""Texts are UTF-8 whatever the locale: every file that is opened as text, and every command's output, says so."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import kvgate
import pytest

PACKAGE = Path(kvgate.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}


def silent(source: str) -> list[int]:
    """Lines with a call that reads or writes text in the locale's encoding."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(k.arg == "encoding" for k in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        mode = [x.value for x in node.args if isinstance(x, ast.Constant) and x.value in ("r", "w", "a", "r+", "w+")]
        as_text = any(k.arg == "text" for k in node.keywords) and name in ("run", "Popen", "check_output")
        if name in ("read_text", "write_text") or (name == "open" and mode) or as_text:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[str(x.relative_to(PACKAGE)) for x in SOURCES])
def test_no_text_is_in_the_locale_s_encoding(path):
    assert silent(path.read_text(encoding="utf-8")) == []


def test_such_a_call_is_found():
    assert silent("p.read_text()\np.open('w')\nrun(x, text=True)\np.open('rb')\np.write_text(x, encoding='utf-8')") == [
        1,
        2,
        3,
    ]


def test_a_prompt_is_the_same_text_under_another_locale(tmp_path):
    (tmp_path / "prompt.txt").write_text("Grüße, 北京, naïve café", encoding="utf-8")
    code = (
        "import pathlib, sys; from kvgate.stages.trace import _text; print(ascii(_text(pathlib.Path(sys.argv[1]), '')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "prompt.txt")]
    said = [
        subprocess.run(command, env=os.environ | env, capture_output=True, encoding="utf-8", check=True).stdout
        for env in (ASCII, {"PYTHONUTF8": "1"})
    ]
    assert said[0] == said[1] == ascii("Grüße, 北京, naïve café") + "\n"
