from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvgate.planning import config, config_page


def test_the_page_is_what_the_schema_says():
    assert (Path(__file__).parents[2] / "config/README.md").read_text() == config_page.render()


def declared(part: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key that a schema declares: its path and what is said of it. `$defs` count as where they stand."""
    if isinstance(part, dict):
        for key, body in part.get("properties", {}).items():
            yield f"{at}.{key}", body
        for name, value in part.items():
            yield from declared(value, f"{at}.{name}".replace(".properties.", "."))


def undescribed(schema: dict[str, Any]) -> list[str]:
    return [path for path, body in declared(schema) if not str(body.get("description", "")).strip()]


def test_every_key_is_described():
    """In the schema, a reference where it stands, and on the page with what is said of it."""
    schema, page = config.full_schema(), config_page.render()
    assert undescribed(schema) == []
    missing = [path for path, body in declared(schema) if body["description"] not in page]
    assert missing == []
    assert [row for row in page.splitlines() if row.startswith("| `") and row.endswith("|  |")] == []


def test_a_key_without_a_description_is_seen():
    schema = config.full_schema()
    del schema["properties"]["thresholds"]["properties"]["kv_l2"]["description"]
    step = schema["$defs"]["weights"]["properties"]["steps"]["items"]
    del step["properties"]["options"]["properties"]["by"]["description"]
    schema["properties"]["timing"]["properties"]["steps"]["description"] = " "
    assert set(undescribed(schema)) == {".thresholds.kv_l2", ".timing.steps", ".$defs.weights.steps.items.options.by"}
