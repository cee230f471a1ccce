"""config/README.md, rendered from the schema: `python -m kvgate.planning.config_page` prints it, a test compares."""

import sys
from typing import Any

from kvgate.planning.config import full_schema

_FILES = {
    "models": "models.yaml",
    "weights": "weights.yaml",
    "strategies": "strategies.yaml",
    "quants": "quants.yaml",
    "programs": "programs.yaml",
    "boards": "boards.yaml",
    "thresholds": "thresholds.yaml",
}


def render() -> str:
    """The page in Markdown: every key with its type, default, limits and meaning."""
    schema = full_schema()
    lines = [
        "# Configuration",
        "",
        "Rendered from workflow/schemas/config.schema.yaml and the measures' limits by",
        "`python -m kvgate.planning.config_page`; do not edit.",
        "",
        "`config.yaml` holds the sweep, the other files one kind of thing each, by name. What you give with",
        "`--configfile` or `--config` goes over them: dictionaries merge, everything else is replaced.",
        "Unknown keys are errors.",
    ]
    for name, part in schema["properties"].items():
        where = _FILES.get(name, "config.yaml")
        lines += ["", f"## `{name}` ({where})", "", part["description"], ""]
        further = part.get("additionalProperties")
        body = _resolve(further, schema) if isinstance(further, dict) else part
        lines += _keys(body, schema)
        for key, value in body.get("properties", {}).items():
            items = _resolve(value.get("items", {}), schema)
            if items.get("properties") and items is not value.get("items"):
                lines += ["", f"Each entry of `{key}`:", "", *_keys(items, schema)]
    return "\n".join(lines).rstrip() + "\n"


def _keys(body: dict[str, Any], schema: dict[str, Any], within: str = "") -> list[str]:
    """Rows of a table; `within`: what stands before the names of keys that lie in another one."""
    properties = body.get("properties", {})
    if not properties:
        return []
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, raw in properties.items():
        part = _resolve(raw, schema)
        default = "required" if key in body.get("required", []) else _default(part)
        rows.append(f"| `{within}{key}` | {_type(part)} | {default} | {part['description']} |")
        items = part.get("items", {})
        rows += _keys(part, schema, f"{within}{key}.")[2:]
        rows += [] if "$ref" in items else _keys(items, schema, f"{within}{key}[].")[2:]  # a reference: see render
    return rows


def _resolve(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in part:
        return part
    return schema["$defs"][part["$ref"].rsplit("/", 1)[1]] | {k: v for k, v in part.items() if k != "$ref"}


def _default(part: dict[str, Any]) -> str:
    return f"`{part['default']}`" if "default" in part else ""


def _type(part: dict[str, Any]) -> str:
    if "enum" in part:
        return ", ".join(f"`{x}`" for x in part["enum"])
    kind = part.get("type", "")
    text = kind if isinstance(kind, str) else " or ".join(kind)
    if text == "array" and isinstance(part.get("items"), dict):
        text = f"list of {', '.join(map(str, part['items'].get('enum', []))) or part['items'].get('type', 'objects')}"
    limits = [f"{word} {part[rule]}" for rule, word in _LIMITS.items() if rule in part]
    return " ".join([text, *limits])


_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}

if __name__ == "__main__":
    sys.stdout.write(render())
