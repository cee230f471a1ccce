"""Records are whole or absent, and equal for equal content."""

import json
import os

import pytest
from kvgate.jobs import record


def test_equal_content_gives_equal_bytes(tmp_path):
    record.write(tmp_path / "a.json", {"b": 1, "a": [1.5]})
    record.write(tmp_path / "b.json", {"a": [1.5], "b": 1})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert record.read(tmp_path / "a.json") == {"a": [1.5], "b": 1}


def test_nan_is_refused_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    record.write(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        record.write(path, {"a": float("nan")})
    assert record.read(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        record.write_bytes(tmp_path / "x" / "a.bin", b"1")
    assert not list((tmp_path / "x").iterdir())


def test_a_link_replaces_what_was_there(tmp_path):
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    record.link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").samefile(tmp_path / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_an_edited_record_is_not_believed(tmp_path):
    """By an editor, by a tool that writes JSON its own way, or without its seal."""
    path = tmp_path / "a.json"
    record.write(path, {"verdict": "fail", "n": [1, 2.5], "text": "ä"})
    kept = path.read_bytes()
    assert record.held(path) == record.read(path) == {"verdict": "fail", "n": [1, 2.5], "text": "ä"}
    body = json.loads(kept)
    for data in (
        kept.replace(b"fail", b"pass"),
        kept + b"\n",
        json.dumps(body | {"verdict": "pass"}, indent=1, sort_keys=True).encode(),
        json.dumps(body, indent=2).encode(),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="it was edited"):
            record.read(path)
    del body["sealed"]
    path.write_text(json.dumps(body))
    assert record.read(path) == body  # a file of JSON, and no record
    with pytest.raises(ValueError, match="got no seal"):
        record.held(path)


def test_a_doubt_stays_until_it_is_settled(tmp_path):
    path = tmp_path / "a.json"
    record.write(path, {})
    assert record.held(path) == {} and not record.doubted(path)
    record.doubt(path)
    assert record.doubted(path)
    record.settle(path)
    record.settle(path)
    assert not record.doubted(path)
    record.doubt(tmp_path / "none" / "a.json")  # the finding is told by the job that made it
