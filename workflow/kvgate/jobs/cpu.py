"""Which class of CPU this is: all that numbers may depend on. Standard library only."""

from pathlib import Path

# What a level of x86-64 has beyond the one below it, by the kernel's names.
_LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}
_INFO = Path("/proc/cpuinfo")


def label(info: Path = _INFO) -> str:
    """Vendor and level, e.g. `GenuineIntel x86-64-v3`; `unknown` where the kernel does not tell."""
    known = _first(info)
    if "vendor_id" not in known:
        return "unknown"
    level = "x86-64"
    for name, needs in _LEVELS.items():
        if not set(needs.split()) <= flags(info):
            break
        level = name
    return f"{known['vendor_id']} {level}"


def flags(info: Path = _INFO) -> set[str]:
    return set(_first(info).get("flags", "").split())


def _first(info: Path) -> dict[str, str]:
    """What is said of the first processor."""
    try:
        text = info.read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
