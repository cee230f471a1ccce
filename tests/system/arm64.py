"""A board's user space without a board: Debian's arm64 packages and the vendor's lite package under qemu-user.

What it needs is put together once, in tests/.cache or the folder KVGATE_TEST_CACHE. Not a test itself.
"""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path(os.environ.get("KVGATE_TEST_CACHE") or Path(__file__).parents[1] / ".cache").resolve()
QEMU = "qemu-aarch64-static"
RELEASE, PYTHON = "bookworm", "3.11"  # the lite package's wheel is made for this Python
PACKAGES = "python3,python3-numpy,python3-psutil,python3-ruamel.yaml"
LITE = "rknn-toolkit-lite2==2.5.0"
_MINUTES = 10 * 60  # seconds for a download


class Missing(Exception):
    """What the machine lacks, in one line."""


@functools.cache
def base() -> Path:
    """The folder with Python, numpy and the lite package, all for arm64. Raises Missing."""
    done = CACHE / "arm64"
    if shutil.which(QEMU) is None:
        raise Missing(f"no {QEMU}")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_dir():
            part = CACHE / "arm64.part"
            shutil.rmtree(part, ignore_errors=True)
            _debian(part)
            _lite(part / "usr/lib/python3/dist-packages")
            part.rename(done)
    return done


def _debian(into: Path) -> None:
    """The packages, unpacked and not configured: no program of theirs has to run for it."""
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise Missing("no debootstrap, or not root")
    fetched = CACHE / "debootstrap"
    shutil.rmtree(fetched, ignore_errors=True)
    command = ["debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", f"--include={PACKAGES}", RELEASE]
    _run([*command, str(fetched), *_mirror()])
    into.mkdir()
    for package in sorted(fetched.glob("var/cache/apt/archives/*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(into)])
    shutil.rmtree(fetched)
    libraries = into / "usr/lib/aarch64-linux-gnu"  # links that the packages' scripts would have made
    for name in ("blas", "lapack"):
        (libraries / f"lib{name}.so.3").symlink_to(f"{name}/lib{name}.so.3")


def _mirror() -> list[str]:
    """The archive that this machine installs from, if it has the release."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"],
        capture_output=True,
        text=True,
    )
    return [uri for uri, _, release in (x.partition(" ") for x in listed.stdout.splitlines()) if release == RELEASE][:1]


def _lite(into: Path) -> None:
    wheels = CACHE / "wheels"
    target = ["--platform", "manylinux2014_aarch64", "--python-version", PYTHON, "--only-binary", ":all:"]
    _run([sys.executable, "-m", "pip", "download", "--no-deps", *target, "--dest", str(wheels), LITE])
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, into, "zip")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_MINUTES)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        words = f"{error.stdout or ''}\n{error.stderr or ''}".split("\n")
        raise Missing(f"{command[0]}: {next((x for x in reversed(words) if x.strip()), error)}") from None


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
