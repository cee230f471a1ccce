"""What a user's config makes of the shipped one."""

from pathlib import Path

import pytest
from kvgate.planning import config

BASE = Path(__file__).parents[2]
SHIPPED = "smollm2-135m"


def models(**entries):
    return config.load(BASE, {"models": entries})["models"]


def test_another_source_is_another_model():
    """Nothing of the shipped entry is its: no checksum, licence, package, context or memory."""
    assert {"sha256", "licence"} <= models()[SHIPPED]["source"].keys() and "context" in models()[SHIPPED]
    mine = {"kind": "folder", "path": "checkpoints/mine"}
    found = models(**{SHIPPED: {"source": dict(mine)}})
    assert found[SHIPPED] == {"source": mine, "build_mb": 4500}
    assert found["gemma3-270m"] == models()["gemma3-270m"]
    package = {"kind": "package", "name": "other", "version": "1", "file": "x.gguf"}
    assert models(**{SHIPPED: {"source": package}})[SHIPPED]["source"] == package


@pytest.mark.parametrize("change", [{"context": 512}, {"source": {"version": "0.1.3"}}])
def test_keys_without_a_kind_change_the_shipped_entry(change):
    found, shipped = models(**{SHIPPED: change})[SHIPPED], models()[SHIPPED]
    assert found["source"] == shipped["source"] | change.get("source", {})
    assert found["context"] == change.get("context", shipped["context"])
