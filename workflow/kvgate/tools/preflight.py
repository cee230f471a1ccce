"""What this machine offers, in one line, and why the toolkit cannot run here, if so.

Standard library only, and no syntax of a late Python at run time: make runs this file by itself, with whatever Python
there is, before it installs anything.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

MEMORY = 6.0  # GB: a build of the default model takes 3.9 at its peak, the system and the workflow the rest
GLIBC = (2, 28)  # the oldest that the locked wheels (manylinux_2_28) start on
PACKAGES = ("rknn-toolkit2", "torch", "transformers", "onnx", "onnxruntime", "snakemake")


@dataclass(frozen=True)
class Machine:
    system: str  # `Linux`, `Darwin`
    processor: str  # `x86_64`, `aarch64`
    python: str
    glibc: str  # `2.36`; empty where the C library is another one
    avx2: bool  # without it artifacts work, but their bytes are this processor's own
    memory: float  # GB
    disk: float  # GB free
    versions: Mapping[str, str]  # installed packages; `missing` where not


def machine(folder: Path = Path()) -> Machine:
    """Read this machine; `folder`: whose disk."""
    return Machine(
        platform.system(),
        platform.machine(),
        platform.python_version(),
        platform.libc_ver()[1] if platform.libc_ver()[0] == "glibc" else "",
        "avx2" in _text(Path("/proc/cpuinfo")).split(),
        memory() / 1e9,
        shutil.disk_usage(folder).free / 1e9,
        {name: _version(name) for name in PACKAGES},
    )


def lines(found: Machine | None = None) -> list[str]:
    """The facts, one line."""
    m = found or machine()
    versions = ", ".join(f"{name} {version}" for name, version in m.versions.items())
    return [
        f"{m.system} {m.processor}, {m.memory:.1f} GB memory, {m.disk:.0f} GB disk free, "
        f"AVX2 {'yes' if m.avx2 else 'no'}, glibc {m.glibc or 'none'}, Python {m.python}, {versions}"
    ]


def problem(found: Machine | None = None) -> str | None:
    """One line where the toolkit cannot run here: what was got, what is needed. None where nothing is in the way."""
    m = found or machine()
    missing = [name for name, version in m.versions.items() if version == "missing"]
    if missing and not machine_problem(m):
        return f"packages: got no {', '.join(missing)}, needed: those of envs/lock.txt (make installs them)"
    return machine_problem(m)


def machine_problem(m: Machine) -> str | None:
    """As `problem`, before anything is installed."""
    if m.system != "Linux" or m.processor not in ("x86_64", "AMD64"):
        return f"machine: got {m.system} on {m.processor}, needed: Linux on x86_64, where the toolkit runs"
    if not m.python.startswith("3.11."):
        return f"Python: got {m.python}, needed: 3.11 (what envs/lock.txt was resolved for)"
    if _numbers(m.glibc) < GLIBC:
        return f"C library: got glibc {m.glibc or 'none'}, needed: glibc {GLIBC[0]}.{GLIBC[1]} or newer"
    if m.memory < MEMORY:
        return f"memory: got {m.memory:.1f} GB, needed: {MEMORY:.0f} GB (a build peaks at 3.9 GB)"
    return None


def memory_limit(text: str) -> float:
    """Bytes of a cgroup's memory.max; infinite where there is none."""
    text = text.strip()
    return float(text) if text.isdigit() else float("inf")


def memory() -> float:
    """Bytes that this process may use: the machine's, or its container's if that is less."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0.0
    return min(float(whole), memory_limit(_text(Path("/sys/fs/cgroup/memory.max"))))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in version.split(".") if x.isdigit())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    found = machine_problem(machine())
    sys.exit(f"kvgate preflight: {found}" if found else 0)
