"""Debian packages unpacked into a folder of the tests' cache, made once. Not a test itself.

The cache is tests/.cache or the folder KVGATE_TEST_CACHE.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

CACHE = Path(os.environ.get("KVGATE_TEST_CACHE") or Path(__file__).parents[1] / ".cache").resolve()
_MINUTES = 10 * 60  # seconds for a download


class Missing(Exception):
    """What the machine lacks, in one line."""


def made(name: str, make: Callable[[Path], None]) -> Path:
    """The cache's folder of this name; `make` fills it where it is not there yet. Raises Missing."""
    done = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_dir():
            part = CACHE / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(done)
    return done


def unpack(into: Path, release: str, machine: str, packages: str) -> None:
    """The base system and `packages`, not configured: no program of theirs has to run for it. Raises Missing."""
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise Missing("no debootstrap, or not root")
    fetched = into.with_suffix(".fetched")
    shutil.rmtree(fetched, ignore_errors=True)
    command = ["debootstrap", "--foreign", f"--arch={machine}", "--variant=minbase", f"--include={packages}", release]
    run([*command, str(fetched), *_mirror(release)])
    into.mkdir()
    for package in sorted(fetched.glob("var/cache/apt/archives/*.deb")):
        run(["dpkg-deb", "-x", str(package), str(into)])
    shutil.rmtree(fetched)


def run(command: list[str]) -> None:
    """Raises Missing with the last line that it said."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_MINUTES)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        words = f"{error.stdout or ''}\n{error.stderr or ''}".split("\n")
        raise Missing(f"{command[0]}: {next((x for x in reversed(words) if x.strip()), error)}") from None


def _mirror(release: str) -> list[str]:
    """The archive that this machine installs from, if it has the release."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"],
        capture_output=True,
        text=True,
    )
    return [uri for uri, _, found in (x.partition(" ") for x in listed.stdout.splitlines()) if found == release][:1]
