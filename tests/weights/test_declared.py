"""Every preparation is what kvgate.prepare.preparation declares: its hooks to mypy, its constants to their types."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
from kvgate import weights
from kvgate.planning import preparations
from kvgate.prepare.preparation import HOOKS, Capabilities, capabilities
from mypy import api

ROOT = Path(__file__).parents[2]
MODULES = sorted(x.name for x in pkgutil.iter_modules(weights.__path__))
WRONG = {
    "checkpoint": "def checkpoint(model: object) -> int:\n    return 1",
    "heads": "def heads(layer: object, tensors: object, peak: object) -> int:\n    return 1",
    "turn": "def turn(size: str) -> str:\n    return size",
    "linear": "def linear(name: str, weight: object, gram: object) -> str:\n    return name",
    "matrices": "def matrices(weights: object) -> dict[str, object]:\n    return {}",
}


def hooks(name: str) -> list[str]:
    module = importlib.import_module(f"kvgate.weights.{name}")
    return [hook for hook in HOOKS if hasattr(module, hook)]


def test_every_module_satisfies_its_protocols_and_wrong_ones_do_not(tmp_path):
    right = [(f"kvgate.weights.{name}", hook) for name in MODULES for hook in hooks(name)]
    for hook, text in WRONG.items():
        (tmp_path / f"wrong_{hook}.py").write_text(f"{text}\n")
    lines = ["from kvgate.prepare import preparation as p"]
    for n, (module, hook) in enumerate([*right, *((f"wrong_{hook}", hook) for hook in WRONG)]):
        lines += [f"import {module}", f"x{n}: p.{HOOKS[hook].__name__} = {module}"]
    (tmp_path / "declared.py").write_text("\n".join(lines) + "\n")
    files = [str(x) for x in sorted(tmp_path.glob("*.py"))]
    found, _, _ = api.run(["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary", *files])
    errors = {line.partition(": error: ")[0] for line in found.splitlines() if ": error: " in line}
    last = len(lines)
    wanted = {f"{tmp_path / 'declared.py'}:{last - 2 * n}" for n in range(len(WRONG))}
    assert {x if x.startswith("/") else str(ROOT / x) for x in errors} == wanted, found


@pytest.mark.parametrize("name", MODULES)
def test_its_constants_have_their_types_and_its_options_are_known_to_planning(name):
    module = importlib.import_module(f"kvgate.weights.{name}")
    for field, kind in Capabilities.__annotations__.items():
        value, default = getattr(capabilities(module), field), getattr(Capabilities(), field)
        told = type(default) if default is not None else (tuple, type(None))
        assert isinstance(value, told), (field, kind)
    given = {
        x.name
        for hook in hooks(name)
        for x in inspect.signature(getattr(module, hook)).parameters.values()
        if x.default is not x.empty
    }
    assert given <= set(preparations.options(name))


def test_planning_knows_the_same_hooks():
    assert tuple(HOOKS) == preparations.HOOKS
