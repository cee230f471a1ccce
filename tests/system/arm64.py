"""A board's user space without a board: Debian's arm64 packages and the vendor's lite package under qemu-user.

Not a test itself.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from system import debian
from system.debian import CACHE, Missing

QEMU = "qemu-aarch64-static"
RELEASE, PYTHON = "bookworm", "3.11"  # the lite package's wheel is made for this Python
PACKAGES = "python3,python3-numpy,python3-psutil,python3-ruamel.yaml"
LITE = "rknn-toolkit-lite2==2.5.0"


@functools.cache
def base() -> Path:
    """The folder with Python, numpy and the lite package, all for arm64. Raises Missing."""
    if shutil.which(QEMU) is None:
        raise Missing(f"no {QEMU}")
    return debian.made("arm64", _fill)


def _fill(into: Path) -> None:
    debian.unpack(into, RELEASE, "arm64", PACKAGES)
    libraries = into / "usr/lib/aarch64-linux-gnu"  # links that the packages' scripts would have made
    for name in ("blas", "lapack"):
        (libraries / f"lib{name}.so.3").symlink_to(f"{name}/lib{name}.so.3")
    _lite(into / "usr/lib/python3/dist-packages")


def _lite(into: Path) -> None:
    wheels = CACHE / "wheels"
    target = ["--platform", "manylinux2014_aarch64", "--python-version", PYTHON, "--only-binary", ":all:"]
    debian.run([sys.executable, "-m", "pip", "download", "--no-deps", *target, "--dest", str(wheels), LITE])
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, into, "zip")


class Board:
    """One board's file system: that of `base`, with its own device tree, runtime and home.

    python: a program that is this board's Python, also for what it starts by `sys.executable`.
    """

    def __init__(self, path: Path, platform: str = "rk3576", runtime: Path | None = None) -> None:
        """runtime: a library for /usr/lib/librknnrt.so."""
        self.path = path
        # Only what a program needs: the emulator takes a path that is not here from the machine itself.
        path.mkdir(parents=True, exist_ok=True)
        (path / "lib").symlink_to(base() / "lib")
        _links(base() / "usr", path / "usr", ["lib", "bin"])
        for name in ("lib", "bin"):
            _links(base() / "usr" / name, path / "usr" / name, [])
        self.write("proc/device-tree/compatible", f"rockchip,{platform}-evb1-v10\0rockchip,{platform}\0")
        self.write("proc/device-tree/model", f"kvgate double of a board with {platform}\0")
        self.write("dev/dri/renderD129", "")
        if runtime is not None:
            shutil.copy(runtime, path / "usr/lib/librknnrt.so")
        self.python = path / "usr/bin/board-python"
        # -0: Python then takes this script for its own program.
        self.python.write_text(f'#!/bin/sh\nexec {QEMU} -0 "$0" -L {path} {base()}/usr/bin/python{PYTHON} "$@"\n')
        self.python.chmod(0o755)

    def write(self, name: str, text: str) -> None:
        """A file of the board, in the place of the machine's own."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run the board's Python."""
        return subprocess.run(
            [str(self.python), *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=120,
        )


def _links(source: Path, into: Path, without: list[str]) -> None:
    """Link every entry of `source` into the new folder `into`; those of `without` become folders."""
    into.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.name not in without:
            (into / entry.name).symlink_to(entry)
