"""The store of finished builds: whole entries, verified on the way out, a size limit."""

import os
from pathlib import Path

import pytest
from kvgate.jobs import record, store

FILES = ["model.rknn", "observations/a.npz"]


def put(results: Path, key: str, folder: Path) -> None:
    """As a build puts what its record lists."""
    store.put(results, key, folder, {name: record.sha256(folder / name) for name in FILES})


def made(results: Path, name: str, text: str = "x") -> Path:
    folder = results / name
    (folder / "observations").mkdir(parents=True)
    for file in FILES:
        (folder / file).write_text(text * 1000 + file)
    return folder


def key(n: int) -> str:
    return store.key({"n": n})


def test_put_and_get(tmp_path: Path) -> None:
    folder = made(tmp_path, "one")
    assert not store.get(tmp_path, key(1), tmp_path / "two")
    put(tmp_path, key(1), folder)
    assert store.get(tmp_path, key(1), tmp_path / "two")
    for file in FILES:
        assert (tmp_path / "two" / file).read_text() == (folder / file).read_text()
        assert (tmp_path / "two" / file).samefile(folder / file)  # one copy on disk


def test_the_key_is_of_everything() -> None:
    parts = {"graph": {"model.onnx": "1"}, "quant": {"mask": -100}}
    assert store.key(parts) == store.key({"quant": {"mask": -100}, "graph": {"model.onnx": "1"}})
    assert store.key(parts) != store.key({**parts, "quant": {"mask": -100.5}})


@pytest.mark.parametrize("file", FILES)
def test_a_changed_byte_is_noticed(tmp_path: Path, file: str) -> None:
    put(tmp_path, key(1), made(tmp_path, "one"))
    place = tmp_path / "store" / key(1)[:2] / key(1)
    data = bytearray((place / file).read_bytes())
    data[500] ^= 1
    (place / file).write_bytes(data)
    assert not store.get(tmp_path, key(1), tmp_path / "two")
    assert not (tmp_path / "two").exists() and not place.exists()
    put(tmp_path, key(1), made(tmp_path, "again"))  # and made anew, it serves
    assert store.get(tmp_path, key(1), tmp_path / "two")


@pytest.mark.parametrize("file", ["model.rknn", "manifest.json"])
def test_a_lost_file_is_noticed(tmp_path: Path, file: str) -> None:
    put(tmp_path, key(1), made(tmp_path, "one"))
    (tmp_path / "store" / key(1)[:2] / key(1) / file).unlink()
    assert not store.get(tmp_path, key(1), tmp_path / "two")


def test_prune_takes_the_longest_unused(tmp_path: Path) -> None:
    for n in range(4):
        folder = made(tmp_path, str(n))
        put(tmp_path, key(n), folder)
        place = tmp_path / "store" / key(n)[:2] / key(n)
        os.utime(place, (n, n))
        if n != 1:  # results still hold entry 1: to remove it would free nothing
            for file in FILES:
                (folder / file).unlink()
    assert store.get(tmp_path, key(0), tmp_path / "used")  # now the last one used
    for file in FILES:
        (tmp_path / "used" / file).unlink()
    each = sum(size for _, size, _ in store.entries(tmp_path)) / 3
    assert store.prune(tmp_path, 2 * each / 1e9) == 1
    assert [store.get(tmp_path, key(n), tmp_path / "out") for n in range(4)] == [True, True, False, True]


def test_prune_to_nothing_spares_what_results_still_link_to(tmp_path: Path) -> None:
    for n in range(3):
        folder = made(tmp_path, str(n))
        put(tmp_path, key(n), folder)
        for file in FILES:
            (folder / file).unlink()
        os.utime(tmp_path / "store" / key(n)[:2] / key(n), (n, n))
    put(tmp_path, key(9), made(tmp_path, "new"))
    assert store.prune(tmp_path, 0.0) == 3
    assert [p.name for _, _, p in store.entries(tmp_path)] == [key(9)]


def test_a_store_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    put(tmp_path, key(1), made(tmp_path, "one"))
    assert not store.get(tmp_path, key(1), tmp_path / "two")


def test_leftovers_of_a_killed_job_do_not_count(tmp_path: Path) -> None:
    put(tmp_path, key(1), made(tmp_path, "one"))
    part = tmp_path / "store" / key(2)[:2] / f".{key(2)}.123.part"
    part.mkdir(parents=True)
    (part / "model.rknn").write_text("half")
    assert not store.get(tmp_path, key(2), tmp_path / "two")
    assert len(store.entries(tmp_path)) == 1
    store.prune(tmp_path, 1.0)
    assert part.exists()  # perhaps another job is writing it
    os.utime(part, (0, 0))
    store.prune(tmp_path, 1.0)
    assert not part.exists()


def test_main_prints_sizes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    put(tmp_path, key(1), made(tmp_path, "one"))
    assert store.main(tmp_path, None) == 0
    assert "1 entries" in capsys.readouterr().out
    for file in FILES:
        (tmp_path / "one" / file).unlink()
    assert store.main(tmp_path, 0.0) == 0
    assert "1 entries removed" in capsys.readouterr().out


def test_record_link_replaces(tmp_path: Path) -> None:
    """get over an older result: the old file goes, the store's stays whole."""
    put(tmp_path, key(1), made(tmp_path, "one"))
    old = made(tmp_path, "two", "y")
    assert store.get(tmp_path, key(1), old)
    assert (old / FILES[0]).read_text().startswith("x")
    record.write_bytes(old / FILES[0], b"new")  # results are renamed over, never written into
    assert store.get(tmp_path, key(1), tmp_path / "three")


@pytest.mark.parametrize("file", FILES)
def test_what_is_not_what_was_recorded_makes_no_entry(tmp_path: Path, file: str) -> None:
    folder = made(tmp_path, "one")
    files = {name: record.sha256(folder / name) for name in FILES}
    with (folder / file).open("r+b") as opened:
        opened.write(b"y")
    store.put(tmp_path, key(1), folder, files)
    assert not store.get(tmp_path, key(1), tmp_path / "two") and store.entries(tmp_path) == []


def test_an_entry_under_another_key_is_refused(tmp_path: Path) -> None:
    """Valid by itself: another row's artifact, moved or copied there."""
    put(tmp_path, key(1), made(tmp_path, "one"))
    other = tmp_path / "store" / key(2)[:2] / key(2)
    other.parent.mkdir(exist_ok=True)
    (tmp_path / "store" / key(1)[:2] / key(1)).rename(other)
    assert not store.get(tmp_path, key(2), tmp_path / "two")
    assert not other.exists() and not (tmp_path / "two").exists()


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, "one")
    put(tmp_path, key(1), folder)
    place = tmp_path / "store" / key(1)[:2] / key(1)
    (place / FILES[0]).unlink()
    (place / FILES[0]).write_text("another")
    text = (place / "manifest.json").read_text()
    text = text.replace(record.sha256(folder / FILES[0]), record.sha256(place / FILES[0]))
    (place / "manifest.json").write_text(text)
    assert not store.get(tmp_path, key(1), tmp_path / "two")
