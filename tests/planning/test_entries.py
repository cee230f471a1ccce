"""The types of the config are the schema's: every key, whether it is always there, its type and its allowed values."""

import importlib
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
import yaml
from kvgate.jobs.entries import board, model, program, quant, strategy, weights
from kvgate.planning import config, entries, sweep
from kvgate.planning.module_facts import constants

BASE = Path(__file__).parents[2]
SCHEMA = yaml.safe_load((BASE / "workflow/schemas/config.schema.yaml").read_text())
JSON = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
# Whose keys are not the schema's: the toolkit's arguments; a kind of source's own.
OPEN = (quant.Config, quant.Build, model.Source)


def resolved(part: dict[str, Any]) -> dict[str, Any]:
    return SCHEMA["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part


def wrong(where: str, kind: Any, part: dict[str, Any]) -> list[str]:
    """What a type and a part of the schema do not agree on."""
    part = resolved(part)
    if is_typeddict(kind):
        return [] if kind in OPEN else _keys(where, kind, part)
    if get_origin(kind) in (Union, UnionType):
        named = {JSON[type(get_args(x)[0]) if get_origin(x) is Literal else get_origin(x) or x] for x in get_args(kind)}
        return [] if named == set(part["type"]) else [f"{where}: {named}, the schema has {part['type']}"]
    if get_origin(kind) is Literal:
        return [] if set(get_args(kind)) == set(part["enum"]) else [f"{where}: the schema has {part['enum']}"]
    if get_origin(kind) is list and part.get("items"):
        return wrong(f"{where}[]", get_args(kind)[0], part["items"])
    if get_origin(kind) is dict and isinstance(part.get("additionalProperties"), dict):
        return wrong(where, get_args(kind)[1], part["additionalProperties"])
    known = part.get("type", "string" if "enum" in part else None)
    return [] if JSON[get_origin(kind) or kind] == known else [f"{where}: {kind}, the schema has {known}"]


def _keys(where: str, kind: Any, part: dict[str, Any]) -> list[str]:
    hints, known = get_type_hints(kind), part["properties"]
    found = [f"{where}: {name} is in one alone" for name in sorted(hints.keys() ^ known.keys())]
    there = {name for name, of in known.items() if name in part.get("required", ()) or "default" in of}
    found += [f"{where}: {name}: always there in one alone" for name in sorted(there ^ kind.__required_keys__)]
    return found + [
        x for name in sorted(hints.keys() & known.keys()) for x in wrong(f"{where}.{name}", hints[name], known[name])
    ]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("strategy", strategy.Strategy),
        ("quant", quant.Quant),
        ("weights", weights.Weights),
        ("program", program.Program),
        ("board", board.Board),
        ("model", model.Model),
        ("block", entries.Block),
        ("pattern", entries.Pattern),
    ],
)
def test_a_type_of_an_entry_is_the_schemas(name, kind):
    assert wrong(name, kind, SCHEMA["$defs"][name]) == []


def test_the_type_of_the_whole_config_is_the_schemas():
    """Of the files' entries too: what config.load gives is taken for this type without another look."""
    assert wrong("config", entries.Config, SCHEMA) == []


@pytest.mark.parametrize(
    "kind, part, text",
    [
        (int, {"type": "number"}, "x: "),
        (Literal["a"], {"enum": ["a", "b"]}, "x: "),
        (int | str, {"type": ["integer", "array"]}, "x: "),
        (list[int], {"type": "array", "items": {"type": "string"}}, "x[]: "),
        (board.Timing, {"properties": {"steps": {"type": "integer", "default": 8}}}, "x: warmup is in one alone"),
        (program.Program, SCHEMA["$defs"]["program"] | {"required": ["kind", "text"]}, "x: tokens: always there"),
    ],
)
def test_what_differs_is_seen(kind, part, text):
    assert wrong("x", kind, part)[0].startswith(text)


@pytest.mark.parametrize("kind", sweep.modules("sources"))
def test_the_type_of_a_source_has_the_keys_that_planning_lets_through(kind):
    facts, found = constants("sources", kind), importlib.import_module(f"kvgate.sources.{kind}").Source
    assert found.__required_keys__ == {"kind", *facts["REQUIRED"]}
    assert found.__optional_keys__ == facts["OPTIONAL"].keys()


def test_the_shipped_configs_are_what_the_types_say():
    """Not by the schema: the values themselves."""
    for name in ("config", "quality", "parts", "wide", "demo", "bench"):
        files = [] if name == "config" else [BASE / f"config/{name}.yaml"]
        assert misfits(config.load(BASE, config.override(files, "")), entries.Config, "") == []


def misfits(value: Any, kind: Any, where: str) -> list[str]:
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        missing = [f"{where}: lacks {x}" for x in sorted(kind.__required_keys__ - value.keys())]
        return missing + [
            x for name in value.keys() & hints.keys() for x in misfits(value[name], hints[name], f"{where}.{name}")
        ]
    of, parts = get_origin(kind), get_args(kind)
    if of in (Union, UnionType):
        return [] if any(not misfits(value, x, where) for x in parts) else [f"{where}: {value!r}"]
    if of is Literal:
        return [] if value in parts else [f"{where}: {value!r}"]
    if of is list:
        return [x for n, item in enumerate(value) for x in misfits(item, parts[0], f"{where}[{n}]")]
    if of is dict:
        return [x for name, item in value.items() for x in misfits(item, parts[1], f"{where}.{name}")]
    fits = kind is object or type(value) in ((int, float) if kind is float else (kind,))
    return [] if fits else [f"{where}: {value!r}"]
