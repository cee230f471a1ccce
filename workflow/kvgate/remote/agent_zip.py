"""The agent as one file: a zip app of the import closure of what runs on a board. The same bytes for the same sources.

It runs as `python3 -u agent.pyz WORK`; what it is, is in kvgate/board/agent.py.
"""

import io
import zipfile
from functools import cache
from pathlib import Path

from kvgate.board.environment import ENGINES
from kvgate.jobs import digest

_MAIN = "import sys\nfrom kvgate.board.agent import main\nsys.exit(main(sys.argv))\n"
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip knows


@cache
def build(engine: str, strategy: str) -> bytes:
    """The zip with one engine and one strategy's host half (empty: none). Raises ValueError on an unknown one."""
    return pack(digest.closure(f"{digest.PACKAGE}.{name}" for name in roots(engine, strategy)))


def roots(engine: str, strategy: str) -> tuple[str, ...]:
    """The modules that a board runs, below the package, without what they import. Raises ValueError."""
    if engine not in ENGINES:
        raise ValueError(f"engine: got {engine!r}, known: {', '.join(ENGINES)}")
    halves = [f"strategies.{strategy}.host"] if strategy else []
    return "board.agent", "board.child", ENGINES[engine].partition(".")[2], *halves


def pack(modules: dict[str, Path]) -> bytes:
    """Zip modules by dotted name, with the packages that they lie in."""
    files = {"__main__.py": _MAIN.encode()} | tree(modules)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:  # stored: zlib's versions differ in their bytes
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _DATE)
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, files[name])
    return buffer.getvalue()


def tree(modules: dict[str, Path]) -> dict[str, bytes]:
    """Modules by dotted name as files of a folder, with the packages that they lie in."""
    files: dict[str, bytes] = {}
    for name in modules:
        files |= {f"{folder}/__init__.py": b"" for folder in map(str, Path(*name.split(".")).parents) if folder != "."}
    for name, path in modules.items():
        files[name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")] = path.read_bytes()
    return files
