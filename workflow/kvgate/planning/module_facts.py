"""What modules say of themselves in constants, read without importing them: planning stands before every run."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

from kvgate.jobs.entries.strategy import Decode

_PACKAGE = Path(__file__).parents[1]


@cache
def constants(folder: str, name: str) -> dict[str, Any]:
    """The constants in capitals of a module: literals, and what it takes from its neighbours (`fold.FAMILIES`)."""
    found = {}
    for node in parsed(folder, name).body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        key, value = node.targets[0].id, node.value
        if not key.isupper() or key.startswith("_"):
            continue
        if isinstance(value, ast.Call):  # made when it is imported: no literal
            continue
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            found[key] = constants(folder, value.value.id)[value.attr]
        else:
            found[key] = ast.literal_eval(value)
    return found


@cache
def parsed(folder: str, name: str) -> ast.Module:
    return ast.parse((_PACKAGE / folder / f"{name}.py").read_text(encoding="utf-8"))


def modules(folder: str) -> list[str]:
    """The names that a folder of the package offers: its modules, or its sub-folders with a host half."""
    if folder == "strategies":
        return sorted(p.parent.name for p in (_PACKAGE / folder).glob("*/host.py"))
    return sorted(p.stem for p in (_PACKAGE / folder).glob("*.py") if p.stem != "__init__")


def cacheless(strategy: Decode) -> bool:
    """Whether a strategy's entry keeps nothing between steps."""
    return bool(constants(f"strategies/{strategy['module']}", "host").get("CACHELESS"))
