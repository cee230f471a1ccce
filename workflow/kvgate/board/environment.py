"""What the machine is and how it is clocked: versions, clocks, governors, temperatures, memory; and pinning clocks.

Everything is read from files below `root` (tests give a tree of their own); what cannot be read is None, with the
reason under its name in `why`. Frequencies in Hz, temperatures in degrees Celsius, sizes in bytes.
Standard library only, Python 3.9.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata, util
from pathlib import Path
from typing import Any

ENGINES = {
    "lite": "kvgate.board.lite",
    "native": "kvgate.board.native",
    "onnxruntime": "kvgate.board.ort",
}
RUNTIMES = ("usr/lib/librknnrt.so", "usr/lib64/librknnrt.so", "usr/lib/aarch64-linux-gnu/librknnrt.so")
_DRIVERS = ("sys/kernel/debug/rknpu/version", "proc/rknpu/version", "sys/module/rknpu/version")
_PINNED = "performance"


def record(root: Path = Path("/")) -> dict[str, Any]:
    """All of it. `state` is the part that changes during a run."""
    tree = _Tree(root)
    compatible = tree.text("compatible", "proc/device-tree/compatible")
    body = {
        "board": tree.text("board", "proc/device-tree/model"),
        "compatible": compatible.split("\0") if compatible else None,
        "kernel": tree.text("kernel", "proc/sys/kernel/osrelease"),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": tree.package("numpy", "numpy"),
        "toolkit_lite": tree.package("toolkit_lite", "rknn-toolkit-lite2"),
        "runtime": tree.runtime(),
        "driver": tree.number("driver", *_DRIVERS),
    }
    changing = state(root)
    return {**body, **changing, "why": {**tree.why, **changing["why"]}}


def state(root: Path = Path("/")) -> dict[str, Any]:
    """Clocks, temperatures and memory now. `clock_state` is one text: rows are ranked together where it is equal."""
    tree = _Tree(root)
    devices = _devices(root)
    clocks = {name: tree.clock(name, *devices[name]) if name in devices else None for name in ("npu", "ddr")}
    for name, clock in clocks.items():
        if clock is None:
            tree.why[name] = "no {} in /sys/class/devfreq".format(_DEVICES[name])
    cpus = {name: tree.clock(name, *place) for name, place in devices.items() if name not in clocks}
    if not cpus:
        tree.why["cpus"] = "nothing in /sys/devices/system/cpu/cpufreq"
    return {
        **clocks,
        "cpus": cpus or None,
        "clock_state": " ".join(_state(name, clock) for name, clock in {**clocks, **cpus}.items()),
        "temperatures": tree.temperatures(),
        "memory": {"total_bytes": tree.memory("MemTotal"), "available_bytes": tree.memory("MemAvailable")},
        "why": tree.why,
    }


def available(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping (MemAvailable)."""
    return _Tree(root).memory("MemAvailable")


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed for lack of memory."""
    match = re.search(r"^oom_kill (\d+)$", _Tree(root).text("oom", "proc/vmstat") or "", re.MULTILINE)
    return int(match.group(1)) if match else None


def engines(root: Path = Path("/")) -> dict[str, dict[str, str]]:
    """For each engine inside the agent: {"version"} or {"error"}. Loads none of them."""
    tree, found = _Tree(root), {}  # type: tuple[_Tree, dict[str, dict[str, str]]]
    for name, module in ENGINES.items():
        if util.find_spec(module) is None:
            continue
        if util.find_spec("numpy") is None:
            found[name] = {"error": "Python package numpy is not installed"}
        elif name == "native":
            version = tree.runtime()
            found[name] = {"error": tree.why["runtime"]} if version is None else {"version": version}
        else:
            module, package = ("rknnlite", "rknn-toolkit-lite2") if name == "lite" else ("onnxruntime",) * 2
            if util.find_spec(module) is None:
                found[name] = {"error": "Python package {} is not installed".format(package)}
            else:
                found[name] = {"version": tree.package(name, package) or ""}
    return found


def versions_differ(runtime: str | None, toolkit: str | None, what: str) -> str:
    """One line where major.minor of two versions are known and differ, else nothing. what: whose the second is."""
    a, b = (re.search(r"(\d+\.\d+)\.\d+", text or "") for text in (runtime, toolkit))
    if a and b and a.group(1) != b.group(1):
        return "runtime: got version {}, {}: {}".format(a.group(0), what, b.group(0))
    return ""


class Clocks:
    """Pins the governors of NPU, memory and CPUs to `performance`, which stays at the highest frequency allowed.

    saved: what to restore, on disk before anything is changed: if this process is killed, the next one restores.
    """

    def __init__(self, saved: Path, root: Path = Path("/")) -> None:
        self.saved, self.root = saved, root

    def pin(self) -> list[str]:
        """Returns one line for each governor that could not be set; never asks for more rights."""
        files = {name: place[0] / place[1] for name, place in _devices(self.root).items()}
        problems = ["{}: no such clock".format(name) for name in _DEVICES if name not in files]
        now = {name: _read(file) for name, file in files.items()}
        problems += [why for text, why in now.values() if text is None]
        old = {name: text for name, (text, _) in now.items() if text not in (None, _PINNED)}
        if not old:
            return problems
        part = self.saved.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump({**self._saved(), **old}, file)  # what could not be restored before is still to be restored
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.saved)
        return problems + [x for name in old for x in _set(files[name], _PINNED)]

    def restore(self) -> list[str]:
        """Set back what `pin` changed, unless someone else has changed it since. Returns one line for each failure."""
        old = self._saved()
        if not old:
            return []
        problems: list[str] = []
        # Names, not paths: a changed file cannot lead a write elsewhere.
        for name, place in _devices(self.root).items():
            file = place[0] / place[1]
            if name in old and _read(file)[0] == _PINNED:
                problems += _set(file, str(old[name]))
        if not problems:
            self.saved.unlink()
        return problems

    def _saved(self) -> dict[str, Any]:
        """Governors by the clock's name; nothing where there is no such file, or not this program's."""
        try:
            old = json.loads(self.saved.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return old if isinstance(old, dict) else {}


_DEVICES = {"npu": "*npu*", "ddr": "*dmc*"}
_Device = tuple  # folder, name of its governor file, prefix of its frequency files, Hz a unit


def _devices(root: Path) -> dict[str, _Device]:
    """`npu`, `ddr` and the CPU policies that this machine has."""
    found: dict[str, _Device] = {}
    for name, pattern in _DEVICES.items():
        for folder in sorted((root / "sys/class/devfreq").glob(pattern))[:1]:
            found[name] = (folder, "governor", "", 1)
    for folder in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        found[folder.name] = (folder, "scaling_governor", "scaling_", 1000)
    return found


def _state(name: str, clock: dict[str, Any] | None) -> str:
    governor, high = (clock["governor"], clock["max_hz"]) if clock else (None, None)
    return "{}={}@{}".format(name, governor or "?", "?" if high is None else round(high / 1e6))


def _read(path: Path) -> tuple[str | None, str]:
    """The file's text without NULs and blanks at its end, or None and why."""
    try:
        return path.read_bytes().decode(errors="replace").rstrip("\0\n "), ""
    except OSError as error:
        return None, "{}: {}".format(path, error.strerror)


def _set(path: Path, governor: str) -> list[str]:
    try:
        path.write_text(governor, encoding="utf-8")
    except OSError as error:
        return ["{}: got {}, wanted {!r}".format(path, error.strerror, governor)]
    now = _read(path)[0]
    return [] if now == governor else ["{}: got {!r}, wanted {!r}".format(path, now, governor)]


class _Tree:
    """Reads below a root and keeps the reasons of what could not be read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.why: dict[str, str] = {}

    def text(self, name: str, *paths: str) -> str | None:
        """Of the first path that can be read."""
        reasons = []
        for path in paths:
            text, why = _read(self.root / path)
            if text is not None:
                return text
            reasons.append(why)
        # A file that is there and closed says more than one that is not there.
        self.why[name] = next((x for x in reasons if "No such file" not in x), reasons[0])
        return None

    def number(self, name: str, *paths: str) -> str | None:
        """A version number inside a text."""
        text = self.text(name, *paths)
        if text is None:
            return None
        match = re.search(r"\d+\.\d+\.\d+", text)
        if match is None:
            self.why[name] = "no version in {!r}".format(text[:80])
        return match.group(0) if match else None

    def package(self, name: str, package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            self.why[name] = "Python package {} is not installed".format(package)
            return None

    def runtime(self) -> str | None:
        """The version inside librknnrt.so, which is not loaded for it."""
        for path in (self.root / x for x in RUNTIMES):
            try:
                with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    match = re.search(rb"librknnrt version: (\d+\.\d+\.\d+)", data)
                    if match:
                        return match.group(1).decode()
                self.why["runtime"] = "{}: has no version in it".format(path)
                return None
            except (OSError, ValueError):  # an empty file cannot be mapped
                continue
        self.why["runtime"] = "no librknnrt.so in {}".format(", ".join("/" + str(Path(x).parent) for x in RUNTIMES))
        return None

    def clock(self, name: str, folder: Path, governor: str, prefix: str, unit: int) -> dict[str, Any]:
        return {
            "device": folder.name,
            "governor": self._value(name + ".governor", folder / governor),
            "hz": self._hertz(name + ".hz", folder / (prefix + "cur_freq"), unit),
            "min_hz": self._hertz(name + ".min_hz", folder / (prefix + "min_freq"), unit),
            "max_hz": self._hertz(name + ".max_hz", folder / (prefix + "max_freq"), unit),
        }

    def _value(self, name: str, path: Path) -> str | None:
        text, why = _read(path)
        if text is None:
            self.why[name] = why
        return text

    def _hertz(self, name: str, path: Path, unit: int) -> int | None:
        text = self._value(name, path)
        if text is None or not text.isdigit():
            self.why.setdefault(name, "no number in {!r}".format(text))
            return None
        return int(text) * unit

    def temperatures(self) -> dict[str, float | None] | None:
        zones = sorted((self.root / "sys/class/thermal").glob("thermal_zone*"))
        if not zones:
            self.why["temperatures"] = "nothing in /sys/class/thermal"
            return None
        return dict(self._zones(zones))

    def _zones(self, zones: Iterable[Path]) -> Iterable[tuple[str, float | None]]:
        for zone in zones:
            name = _read(zone / "type")[0] or zone.name
            text = self._value("temperatures." + name, zone / "temp")
            try:
                yield name, int(text or "") / 1000
            except ValueError:
                self.why.setdefault("temperatures." + name, "no number in {!r}".format(text))
                yield name, None

    def memory(self, field: str) -> int | None:
        text = self.text("memory", "proc/meminfo") or ""
        match = re.search(r"^{}: +(\d+) kB$".format(field), text, re.MULTILINE)
        if match is None:
            self.why.setdefault("memory", "no {} in /proc/meminfo".format(field))
        return int(match.group(1)) * 1024 if match else None
