"""The agent's store: only what has its checksum is there, whatever came on the way."""

import errno
import hashlib
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvgate.board import files

DATA = bytes(range(256)) * 40
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path):
    return files.Store(tmp_path / "files")


def test_arrives_in_chunks_and_goes_on_where_it_stopped(store, tmp_path):
    assert not store.put(SHA, len(DATA), 0, DATA[:100])
    later = files.Store(store.folder)  # the next agent
    assert later.present({SHA: len(DATA)}) == ([], {SHA: 100})
    assert later.put(SHA, len(DATA), 100, DATA[100:])
    assert later.present({SHA: len(DATA)}) == ([SHA], {})
    later.link(SHA, tmp_path / "job" / "trace" / "x.npz")
    assert (tmp_path / "job" / "trace" / "x.npz").read_bytes() == DATA
    assert later.folder.stat().st_mode & 0o777 == 0o700


def test_offset_zero_starts_over(store):
    store.put(SHA, len(DATA), 0, b"wrong")
    assert store.put(SHA, len(DATA), 0, DATA)


def test_an_empty_file(store):
    sha = hashlib.sha256(b"").hexdigest()
    assert store.put(sha, 0, 0, b"")
    assert store.present({sha: 0}) == ([sha], {})


@pytest.mark.parametrize(("offset", "data"), [(50, b"x"), (150, b"x"), (100, DATA), (-100, b"x")])
def test_a_hole_an_overlap_or_too_much_is_refused(store, offset, data):
    store.put(SHA, len(DATA), 0, DATA[:100])
    with pytest.raises(files.FileError, match="offset: got") as error:
        store.put(SHA, len(DATA), offset, data)
    assert error.value.kind == "io"


def test_other_content_is_removed_and_can_come_again(store):
    with pytest.raises(files.FileError, match="sha256: got") as error:
        store.put(SHA, len(DATA), 0, DATA[:-1] + b"!")
    assert error.value.kind == "checksum" and not list(store.folder.iterdir())
    assert store.put(SHA, len(DATA), 0, DATA)


def test_what_changed_on_the_disk_is_not_there_any_more(store):
    store.put(SHA, len(DATA), 0, DATA)
    path = store.folder / SHA
    path.chmod(0o600)
    path.write_bytes(DATA[:-1] + b"!")
    os.utime(path, ns=(0, 0))
    assert store.present({SHA: len(DATA)}) == ([], {})
    assert not path.exists()


def test_is_hashed_once(store, monkeypatch):
    store.put(SHA, len(DATA), 0, DATA)
    monkeypatch.setattr(files, "sha256", lambda path: pytest.fail("hashed again"))
    assert files.Store(store.folder).present({SHA: len(DATA)}) == ([SHA], {})


def test_a_disk_that_fills_up(store, monkeypatch):
    """The rest of the file is dropped without a word, then it may come again."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    store.put(SHA, len(DATA), 0, DATA[:100])
    with monkeypatch.context() as patch, pytest.raises(files.FileError, match=r"needs 0\.0 MiB, .* free") as error:
        patch.setattr(os, "fsync", full)
        store.put(SHA, len(DATA), 100, DATA[100:])
    assert error.value.kind == "no_space" and not list(store.folder.iterdir())
    assert not store.put(SHA, len(DATA), 200, DATA[200:])
    assert store.put(SHA, len(DATA), 0, DATA)


def disk(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, free))  # type: ignore[attr-defined]


def test_no_space_is_said_before_anything_is_written(store, monkeypatch):
    disk(monkeypatch, 1 << 20)
    with pytest.raises(files.FileError, match=r"needs 10240\.0 MiB and 16\.0 to spare, 1\.0 MiB free") as error:
        store.put(SHA, 10 << 30, 0, b"")
    assert error.value.kind == "no_space" and not list(store.folder.iterdir())


def test_what_was_used_longest_ago_makes_room(store, monkeypatch):
    old = []
    for n in range(3):
        data = bytes([n]) * 1000
        old.append(hashlib.sha256(data).hexdigest())
        store.put(old[-1], 1000, 0, data)
        os.utime(store.folder / (old[-1] + ".ok"), (n, n))
    later = files.Store(store.folder)
    later.present({old[0]: 1000})
    disk(monkeypatch, files._SPARE + len(DATA) - 500)
    assert later.put(SHA, len(DATA), 0, DATA)
    assert sorted(x.name for x in store.folder.iterdir() if not x.suffix) == sorted([old[0], old[2], SHA])
    disk(monkeypatch, 0)
    with pytest.raises(files.FileError):  # all that is left is wanted, or too small
        later.put("0" * 64, len(DATA), 0, DATA)
    assert (store.folder / old[2]).exists()


@pytest.mark.parametrize("sha", ["../" + "0" * 61, "0" * 63, "A" * 64, 7, None])
def test_a_name_that_is_no_checksum(store, sha):
    with pytest.raises(files.FileError, match="sha256: got"):
        store.put(sha, 1, 0, b"x")
    with pytest.raises(files.FileError, match="sha256: got"):
        store.present({sha: 1})
    with pytest.raises(files.FileError, match="sha256: got"):
        store.link(sha, store.folder / "x")


@given(st.text() | st.sampled_from(["../x", "/x", "a/../b", "a//b", ".x", "a/.b", "a/", "", "a\n", "-x/y", "a b"]))
def test_names_stay_inside_the_job(name):
    try:
        files.safe_name(name)
    except files.FileError:
        return
    parts = name.split("/")
    assert name.isascii() and all(p and not p.startswith(".") and "\n" not in p for p in parts)


@pytest.mark.parametrize("name", ["model.rknn", "trace/capital_2.npz", "model.onnx.data", "a-b/c"])
def test_usual_names(name):
    assert files.safe_name(name) == name
