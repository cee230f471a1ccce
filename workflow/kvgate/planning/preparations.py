"""What an entry of weights.yaml may ask of its modules, checked while planning: they are read, not imported."""

import ast
from functools import cache
from typing import Any

from kvgate.compiler import platforms
from kvgate.jobs.entries.quant import Quant
from kvgate.jobs.entries.weights import Weights
from kvgate.planning.config import ConfigError
from kvgate.planning.module_facts import constants, parsed

HOOKS = ("checkpoint", "heads", "turn", "linear", "matrices")
_PATTERNS = ("only", "skip")  # options of every module with `linear`, see kvgate.prepare.hooks


def check(name: str, entry: Weights) -> None:
    """Raises ConfigError on an option that a step has not, and where its statistics would have no texts."""
    for n, step in enumerate(entry["steps"]):
        known = options(step["name"])
        for option in step["options"]:
            if option not in known:
                raise ConfigError(
                    f"weights.{name}.steps[{n}].options: {step['name']} got the unknown option {option}, "
                    f"known: {', '.join(known) or 'none'}"
                )
        if constants("weights", step["name"]).get("STATISTICS") and not entry["calibrate"]:
            raise ConfigError(f"weights.{name}: {step['name']} reads the calibration texts, lacks calibrate: true")


def check_fit(where: str, name: str, entry: Weights, family: str | None, quant: tuple[str, Quant] | None) -> None:
    """Raises ConfigError where a step does not know the model's family or makes no sense for the quant.

    family: None where it is not known yet. quant: its name and entry; None where nothing is compiled.
    """
    for step in entry["steps"]:
        what, facts = f"{where}: weights {name}: {step['name']}", constants("weights", step["name"])
        if family and family not in facts.get("FAMILIES", (family,)):
            raise ConfigError(f"{what} got a {family}, known: {', '.join(facts['FAMILIES'])}")
        if quant:
            _check_quant(what, facts, step["options"].get("group", 0), *quant)


def _check_quant(what: str, facts: dict[str, Any], group: int, name: str, quant: Quant) -> None:
    dtype, settings = platforms.dtype(quant), quant["config"]
    if dtype not in facts.get("DTYPES", (dtype,)):
        raise ConfigError(f"{what} is for {', '.join(facts['DTYPES'])}, quant {name} is {dtype}")
    missing = set(facts.get("DISABLE", ())) - set(settings.get("disable_rules", ()))
    if missing:
        raise ConfigError(f"{what} needs config.disable_rules {sorted(missing)} in quant {name}")
    missing = set(facts.get("HYBRID", ())) - set(quant["hybrid"])
    if missing:
        raise ConfigError(f"{what} needs hybrid {sorted(missing)} in quant {name}")
    method = settings.get("quantized_method", "channel").removeprefix("group")
    wanted = int(method) if method.isdigit() else 0
    if "DTYPES" in facts and group != wanted:
        raise ConfigError(f"{what} got group {group}, quant {name} has {wanted} (0: a whole channel)")


@cache
def options(name: str) -> list[str]:
    """The options of a module of weights/: its hooks' keyword arguments, by name."""
    found: set[str] = set()
    for node in parsed("weights", name).body:
        if isinstance(node, ast.FunctionDef) and node.name in HOOKS:
            defaults = len(node.args.defaults)
            given = [*node.args.args[len(node.args.args) - defaults :], *node.args.kwonlyargs]
            found |= {x.arg for x in given} | set(_PATTERNS if node.name == "linear" else ())
    return sorted(found)
