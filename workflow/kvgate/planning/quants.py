"""What a quant's entry may ask of the toolkit, checked while planning: nothing heavy is imported."""

import re
from collections.abc import Mapping

from kvgate.compiler import platforms
from kvgate.jobs.entries.quant import Quant
from kvgate.planning.config import ConfigError

_THRESHOLDS = ("auto_hybrid_cos_thresh", "auto_hybrid_euc_thresh")


def check(name: str, entry: Quant) -> None:
    """Raises ConfigError on an argument that the toolkit has not, or that it would ignore or get wrong."""
    where = f"quants.{name}"
    _arguments(f"{where}.config", entry["config"], platforms.CONFIG_ARGUMENTS)
    _arguments(f"{where}.build", entry["build"], platforms.BUILD_ARGUMENTS)
    quantizes = "quantized_dtype" in entry["config"]
    if quantizes and not entry["calibrate"]:
        raise ConfigError(f"{where}.config.quantized_dtype: quantizes, lacks calibrate: true")
    if entry["calibrate"] and not quantizes:
        raise ConfigError(f"{where}.calibrate: calibrates, lacks config.quantized_dtype")
    auto = bool(entry["build"].get("auto_hybrid"))
    for key in _THRESHOLDS:
        if key in entry["config"] and not auto:
            raise ConfigError(f"{where}.config.{key}: does nothing alone, lacks build.auto_hybrid: true")
    steps = "hybrid" if entry["hybrid"] else "headroom" if entry["headroom"] != 1 else ""
    if steps and entry["build"]:  # the toolkit's two steps take no such arguments
        raise ConfigError(f"{where}: got {steps} and build.{next(iter(entry['build']))}, allowed: one of them")
    if entry["hybrid"] or auto:
        _mixed(where, entry, auto)
    if entry["headroom"] != 1:
        _headroom(where, entry)


def _arguments(where: str, got: Mapping[str, object], known: tuple[str, ...]) -> None:
    for key in got:
        if key not in known:
            raise ConfigError(f"{where}: got the unknown argument {key}, known: {', '.join(sorted(known))}")


def _headroom(where: str, entry: Quant) -> None:
    dtype = platforms.dtype(entry)
    if dtype not in platforms.INTEGER:
        allowed = f"{' or '.join(platforms.INTEGER)} (elsewhere activations are float)"
        raise ConfigError(f"{where}.headroom: got quantized_dtype {dtype}, allowed: {allowed}")


def _mixed(where: str, entry: Quant, auto: bool) -> None:
    """Of a quant that leaves some tensors at another dtype."""
    what, dtype = f"{where}.build.auto_hybrid" if auto else f"{where}.hybrid", platforms.dtype(entry)
    if auto:
        if dtype not in platforms.AUTO_HYBRID:
            allowed = " or ".join(platforms.AUTO_HYBRID)
            raise ConfigError(f"{what}: got quantized_dtype {dtype}, allowed: {allowed} (elsewhere it changes nothing)")
        return
    if dtype not in platforms.HYBRID:
        raise ConfigError(f"{what}: got quantized_dtype {dtype}, allowed: {', '.join(platforms.HYBRID)}")
    for pattern, wanted in entry["hybrid"].items():
        if wanted not in platforms.HYBRID[dtype]:
            allowed = " or ".join(platforms.HYBRID[dtype])
            raise ConfigError(f"{what}: got {wanted} for {pattern}, allowed under {dtype}: {allowed}")
        for part in pattern.split("|"):
            limit = part.rpartition(":")[2]
            if limit.startswith(">") and not re.fullmatch(r">\d+(\.\d+)?", limit):
                raise ConfigError(f"{what}: got the limit {limit!r} in {pattern!r}, allowed: a number, as in '>32'")
