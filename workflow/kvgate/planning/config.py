"""The config: read from YAML, filled with the schema's defaults, held to the schema. Every error is one line.

Stands before every run, so nothing heavy is imported here.
"""

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import yaml

from kvgate.jobs import keys
from kvgate.planning.entries import Config
from kvgate.planning.module_facts import constants, modules

KINDS = ("models", "weights", "strategies", "quants", "programs", "thresholds", "boards")
MEASURES = "judging/measures"
SCHEMA = Path(__file__).parents[2] / "schemas" / "config.schema.yaml"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ConfigError(Exception):
    """A mistake in the config: one line that says where, what was got, and what is allowed."""


def load(base: Path, override: Mapping[str, Any]) -> Config:
    """The whole config of a repository at `base`: config/*.yaml with `override` over it, defaults filled in.

    `override` is what the workflow's own config has (config.yaml, --configfile, --config). Raises ConfigError.
    """
    merged: dict[str, Any] = {}
    for name in ("config", *KINDS):
        read = _read(base, f"config/{name}.yaml")
        merged |= read if name == "config" else {name: read}
    for key, value in override.items():
        merged[key] = (_models if key == "models" else _over)(merged.get(key), value)
    _check_plain(merged, "")
    _validate(merged)
    return cast(Config, merged)  # by the schema: tests/planning/test_entries.py


def override(files: list[Path], text: str) -> dict[str, Any]:
    """What Snakemake's own config would be: the files of --configfile, then JSON over them, as keys.pack has it.

    Raises ConfigError.
    """
    merged: Any = {}
    for path in files:
        merged = _over(merged, _read(Path(), str(path)))
    return _over(merged, keys.unpack(text)) if text else merged


def _read(base: Path, path: str) -> dict[str, Any]:
    try:
        read = yaml.load((base / path).read_text(encoding="utf-8"), _LOADER)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no YAML: {' '.join(str(error).split())}") from None
    if read is not None and not isinstance(read, dict):
        raise ConfigError(f"{path}: got {type(read).__name__}, allowed: keys and values")
    return read or {}


def _over(below: Any, above: Any) -> Any:
    """Dicts merge, everything else is replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _over(below.get(key), value) for key, value in above.items()}
    return above


def _models(below: Any, above: Any) -> Any:
    """Models merge as everything does, but for one whose source says its `kind`: that is another model.

    Its checksum, licence and context are not those of the entry that it replaces.
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {name: entry if _has_kind(entry) else _over(below.get(name), entry) for name, entry in above.items()}


def _has_kind(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("source"), dict) and "kind" in entry["source"]


def _check_plain(value: Any, where: str) -> None:
    """What YAML makes of an unquoted number, date or `.nan` may be nothing that a key can hold. Raises ConfigError."""
    if isinstance(value, dict):
        for name, part in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{where or 'config'}: got the name {name}, allowed: a text, in quotes")
            _check_plain(part, f"{where}.{name}".lstrip("."))
    elif isinstance(value, list):
        for n, part in enumerate(value):
            _check_plain(part, f"{where}[{n}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: got {value}, allowed: a finite number")
    elif not isinstance(value, str | int | float | None):
        raise ConfigError(f"{where}: got the {type(value).__name__} {value}, allowed: a text, in quotes")


def full_schema() -> dict[str, Any]:
    """The schema of the config with the limits of every measure (judging/measures) among `thresholds`."""
    schema: dict[str, Any] = yaml.load(SCHEMA.read_text(encoding="utf-8"), _LOADER)
    thresholds = schema["properties"]["thresholds"]
    own: dict[str, Any] = {}
    for name in modules(MEASURES):
        own |= deepcopy(constants(MEASURES, name).get("THRESHOLDS", {}))
    thresholds["properties"] = own | thresholds["properties"]
    thresholds["required"] = [key for key, part in thresholds["properties"].items() if "default" not in part]
    return schema


def _validate(config: dict[str, Any]) -> None:
    """Fill the schema's defaults in, then hold the config to it. Raises ConfigError with the first error."""
    schema = full_schema()
    _fill(config, schema, schema["$defs"])
    import jsonschema

    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(config), key=lambda e: str(list(e.path)))
    if errors:
        raise ConfigError(_one_line(errors[0]))


def _fill(value: Any, schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Put the schema's defaults into `value`, as deep as it goes."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[1]] | {k: v for k, v in schema.items() if k != "$ref"}
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name not in value and "default" in part:
                value[name] = deepcopy(part["default"])
            if name in value:
                _fill(value[name], part, definitions)
        further = schema.get("additionalProperties")
        if isinstance(further, dict):
            for name in value.keys() - schema.get("properties", {}).keys():
                _fill(value[name], further, definitions)
    elif isinstance(value, list) and "items" in schema:
        for item in value:
            _fill(item, schema["items"], definitions)


def _one_line(error: Any) -> str:
    where = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in error.absolute_path).lstrip(".") or "config"
    got = json.dumps(error.instance, ensure_ascii=False, default=str)
    got = got if len(got) <= 60 else got[:57] + "..."
    rule, wanted = error.validator, error.validator_value
    if "allowed" in error.schema:  # where the rules alone would not say it
        return f"{where}: got {got}, allowed: {error.schema['allowed']}"
    if rule == "additionalProperties":
        known = ", ".join(sorted(error.schema.get("properties", {})))
        unknown = ", ".join(sorted(str(k) for k in error.instance if k not in error.schema.get("properties", {})))
        return f"{where}: got the unknown key {unknown}, known: {known}"
    if rule == "required":
        missing = ", ".join(k for k in wanted if k not in error.instance)
        return f"{where}: lacks {missing}"
    allowed = {
        "enum": lambda: "known: " + ", ".join(map(str, wanted)),
        "type": lambda: f"allowed: {wanted if isinstance(wanted, str) else ' or '.join(wanted)}",
        "minimum": lambda: f"allowed: at least {wanted}",
        "minItems": lambda: f"allowed: at least {wanted} entries",
        "exclusiveMaximum": lambda: f"allowed: below {wanted}",
        "pattern": lambda: f"allowed: {wanted}",
        "maximum": lambda: f"allowed: at most {wanted}",
        "uniqueItems": lambda: "allowed: every entry once",
    }.get(rule, lambda: error.message.splitlines()[0])()
    return f"{where}: got {got}, {allowed}"
