"""sha256 of files, remembered: whatever moves a file makes it read again, and nothing else does."""

import multiprocessing
import os
from pathlib import Path

import pytest
from kvgate.jobs import hashed, record


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files count as large, and as settled when they are written."""
    monkeypatch.setattr(hashed, "LARGE", 0)
    monkeypatch.setattr(hashed, "_TICK", -1)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read."""
    seen: list[Path] = []
    real = record.sha256
    monkeypatch.setattr(hashed.record, "sha256", lambda path: seen.append(path) or real(path))
    return seen


def made(folder: Path) -> Path:
    path = folder / "a.bin"
    path.write_bytes(b"one content")
    return path


def test_what_lies_still_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    path = made(tmp_path)
    assert len({hashed.sha256(path, tmp_path) for _ in range(3)}) == 1 and len(reads) == 1
    assert hashed.fresh(path, tmp_path) and len(reads) == 2  # by content, whatever is remembered


def swap(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"two content")


def edit(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"two")


def edit_with_the_old_date(path: Path) -> None:
    dates = path.stat()
    edit(path)
    os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))


@pytest.mark.parametrize("change", [swap, edit, edit_with_the_old_date])
def test_another_content_of_the_same_size_is_seen(tmp_path: Path, change) -> None:
    path = made(tmp_path)
    before = hashed.sha256(path, tmp_path)
    change(path)
    assert hashed.sha256(path, tmp_path) == record.sha256(path) != before


def test_a_hard_link_is_the_same_file(tmp_path: Path, reads: list[Path]) -> None:
    path = made(tmp_path)
    os.link(path, tmp_path / "b.bin")
    assert hashed.sha256(path, tmp_path) == hashed.sha256(tmp_path / "b.bin", tmp_path)
    assert len(reads) == 1


def test_what_was_written_just_now_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dates of a file that is written twice within a tick of the clock are the same."""
    monkeypatch.setattr(hashed, "_TICK", 10**12)
    hashed.sha256(made(tmp_path), tmp_path)
    assert not (tmp_path / hashed.FOLDER).exists()


def test_a_memory_that_cannot_be_read_or_written_costs_time_only(tmp_path: Path) -> None:
    path = made(tmp_path)
    hashed.sha256(path, tmp_path)
    (note,) = (tmp_path / hashed.FOLDER).iterdir()
    for text in ("", "1 2 3", note.read_text()[:-70], "x y z"):
        note.write_text(text)
        assert hashed.sha256(path, tmp_path) == record.sha256(path)
    (tmp_path / "full").write_text("a file where the folder should be")
    assert hashed.sha256(path, tmp_path / "full") == record.sha256(path)


def test_many_at_once(tmp_path: Path) -> None:
    path = made(tmp_path)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.starmap(hashed.fresh, [(path, tmp_path)] * 40)
    assert found == [record.sha256(path)] * 40
    (note,) = (tmp_path / hashed.FOLDER).iterdir()
    assert note.read_text().endswith(found[0])
