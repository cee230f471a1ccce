"""The store of finished builds: key -> files, content-addressed. Equal work is linked back, not done again.

An entry is results/store/{key[:2]}/{key}/ with its files and manifest.json: the key, and {file: sha256}. Files are
hard-linked both ways, so what a result still holds costs the store nothing; a folder appears whole (renamed) or not at
all.
"""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from kvgate.contract import canonical, sha256_text
from kvgate.jobs import record

_MANIFEST = "manifest.json"
_DAY = 86400.0  # seconds


def key(parts: Mapping[str, object]) -> str:
    """64 hex digits of everything that may change the work's result."""
    return sha256_text(canonical(dict(parts)))


def put(results: Path, key: str, folder: Path, files: Mapping[str, str]) -> None:
    """Link `files` (names below `folder`, to the sha256 that was recorded of them) into the store.

    What is not what was recorded makes no entry. The store only saves time: a disk that is full or read-only is not an
    error here. The end of a sweep prunes it to the config's limit.
    """
    place = _place(results, key)
    part = place.with_name(f".{key}.{os.getpid()}.part")
    try:
        for name, digest in files.items():
            record.link(folder / name, part / name)
            if record.sha256(part / name) != digest:
                raise OSError(f"{name} changed")
        record.write(part / _MANIFEST, {"key": key, "files": dict(files)})
        shutil.rmtree(place, ignore_errors=True)
        part.rename(place)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)


def get(results: Path, key: str, folder: Path) -> bool:
    """Link an entry's files into `folder`. False where there is none, or it is not what was put in under this key.

    An entry that fails is removed: a changed byte in it would be one in every result that links to it.
    """
    place = _place(results, key)
    try:
        manifest = record.held(place / _MANIFEST)
        files: dict[str, str] = manifest["files"]
        if manifest["key"] != key or any(record.sha256(place / name) != digest for name, digest in files.items()):
            raise ValueError("changed")
        os.utime(place)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError):
        drop(results, key)
        return False
    for name in files:
        record.link(place / name, folder / name)
    return True


def drop(results: Path, key: str) -> None:
    shutil.rmtree(_place(results, key), ignore_errors=True)


def entries(results: Path) -> list[tuple[float, int, Path]]:
    """(time of last use, bytes that only the store holds, folder), the longest unused first."""
    found = []
    for place in (results / "store").glob("??/*"):
        if not place.name.startswith("."):
            stats = [f.stat() for f in place.rglob("*") if f.is_file() and f.name != _MANIFEST]
            found.append((place.stat().st_mtime, sum(s.st_size for s in stats if s.st_nlink == 1), place))
    return sorted(found)


def prune(results: Path, limit_gb: float) -> int:
    """Remove the longest unused entries until the store alone holds at most `limit_gb` GB. Returns how many."""
    for part in (results / "store").glob("??/.*.part"):
        if time.time() - part.stat().st_mtime > _DAY:  # left by a killed job
            shutil.rmtree(part, ignore_errors=True)
    found = entries(results)
    total, removed = sum(size for _, size, _ in found), 0
    for _, size, place in found:
        if total <= limit_gb * 1e9:
            break
        if size:
            shutil.rmtree(place, ignore_errors=True)
            total, removed = total - size, removed + 1
    return removed


def main(results: Path, limit_gb: float | None) -> int:
    """Print the store's size; with a limit, prune first."""
    if limit_gb is not None:
        print(f"store: {prune(results, limit_gb)} entries removed")
    found = entries(results)
    alone = sum(size for _, size, _ in found)
    whole = sum(f.stat().st_size for _, _, place in found for f in place.rglob("*") if f.is_file())
    print(f"store: {len(found)} entries, {whole / 1e9:.2f} GB, {alone / 1e9:.2f} GB held by the store alone")
    return 0


def _place(results: Path, key: str) -> Path:
    return results / "store" / key[:2] / key
