"""Python 3.9 with numpy 1.19, as boards with Debian 11 have it, on this machine's processor."""

from pathlib import Path

import oldest
import pytest
from system import debian

pytestmark = pytest.mark.system
LIBRARIES = (  # what numpy and ctypes are linked to
    *("libblas.so.3", "liblapack.so.3", "libgfortran.so.5", "libquadmath.so.0"),
    "libffi.so.7",
)


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    try:
        made = debian.made("python39", lambda into: debian.unpack(into, "bullseye", "amd64", "python3,python3-numpy"))
    except debian.Missing as why:
        pytest.skip(f"Debian's Python 3.9: {why}")
    own, folder = made / "usr/lib/x86_64-linux-gnu", tmp_path / "libraries"
    folder.mkdir()  # these alone: the rest is this machine's, newer and compatible
    for name in LIBRARIES:
        (folder / name).symlink_to(next(own.rglob(name)))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    return str(made / "usr/bin/python3.9")


def test_it_takes_all_that_a_board_gets(python, tmp_path: Path):
    assert oldest.takes(python, tmp_path / "taken"), "numpy was not there"
