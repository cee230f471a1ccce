"""A key's way to a command and back, what differs between two, and the states of files in them."""

import json
import os

from hypothesis import given
from hypothesis import strategies as st
from kvgate.contract import canonical
from kvgate.jobs import keys, record


def test_changes_name_the_part_and_what_in_it():
    key = canonical({"code": {"digest": "1"}, "versions": {"numpy": "1", "rknn-toolkit2": "2"}, "config": {}})
    recorded = json.loads(key)
    assert keys.changes(key, recorded) == []
    assert keys.changes(key, None) == ["new"]
    recorded["versions"]["rknn-toolkit2"] = "1"
    recorded["code"]["digest"] = "0"
    assert keys.changes(key, recorded) == ["code", "versions rknn-toolkit2"]


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=200), max_size=5), st.integers(0, 4000))
def test_a_key_travels_unchanged(parts, repeat):
    key = canonical({"parts": parts, "long": ["abcdefgh"] * repeat})
    argument = keys.pack(key)
    assert keys.unpack(argument) == json.loads(key)
    assert len(argument.encode()) < 128 * 1024


def test_a_large_file_is_told_by_all_of_it(tmp_path):
    """Also where the date is set back: the ctime cannot be."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(3 << 20))
    before = keys.file_state(path, tmp_path)
    path.touch()
    assert keys.file_state(path, tmp_path) == before == record.sha256(path)
    dates = path.stat()
    for place in (0, 100_001, 2_000_001, (3 << 20) - 1):  # between the blocks that were once looked at
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))
        assert keys.file_state(path, tmp_path) == record.sha256(path) != before
    assert keys.file_state(tmp_path / "none", tmp_path) == "unreadable: No such file or directory"
