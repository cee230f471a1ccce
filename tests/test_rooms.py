"""The rooms of the package: which of them may import which, so that none leans on one that comes after it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kvgate
import pytest

PACKAGE = Path(kvgate.__file__).parent
SHARED = {"contract", "observe"}  # modules at the top that every room may use
# What a room may import besides; `stages`, `tools` and the command line stand above all others.
ALLOWED = {
    "strategies": set(),
    "jobs": {"strategies"},
    "engines": {"jobs"},
    "board": {"strategies"},
    "serving": {"board", "strategies"},
    "checkpoint": {"jobs", "serving"},  # of serving: the day that chat templates are told
    "sources": {"checkpoint", "jobs"},
    "prepare": {"checkpoint", "jobs"},
    "weights": {"checkpoint", "prepare"},
    "export": {"checkpoint", "jobs", "prepare", "strategies"},
    "compiler": {"engines", "jobs", "strategies"},
    "judging": {"compiler", "jobs", "strategies"},
    "remote": {"board", "jobs", "judging"},
    "report": {"board", "checkpoint", "jobs", "judging", "remote", "serving"},
    "planning": {"checkpoint", "compiler", "jobs", "judging", "remote", "report", "sources"},
}
ABOVE = {"stages", "tools", "__main__"}


def imports(path: Path) -> set[str]:
    """The rooms, or modules at the top, that a module imports from kvgate."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvgate":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {x.name.split(".")[1] for x in node.names if x.name.startswith("kvgate.")}
    return found


def wrong(room: str, paths: list[Path]) -> list[str]:
    allowed = ALLOWED[room] | SHARED | {room}
    return [f"{path.name}: {x}" for path in paths for x in sorted(imports(path) - allowed)]


def test_every_room_is_known():
    rooms = {x.parent.name for x in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(ALLOWED) | ABOVE - {"__main__"}
    assert {x.stem for x in PACKAGE.glob("*.py")} == SHARED | {"__init__", "__main__"}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_what_its_rule_allows(room):
    assert wrong(room, sorted((PACKAGE / room).rglob("*.py"))) == []


def test_the_rules_make_no_circle():
    assert list(TopologicalSorter(ALLOWED).static_order())


@pytest.mark.parametrize(
    "line", ["from kvgate.report import table", "from kvgate import planning", "import kvgate.stages.fetch"]
)
def test_what_breaks_a_rule_is_seen(tmp_path, line):
    path = tmp_path / "x.py"
    path.write_text(line)
    assert len(wrong("jobs", [path])) == 1


@pytest.mark.parametrize("room", [*ALLOWED, "stages", "tools"])
def test_a_room_says_what_it_is_for(room):
    assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")))
