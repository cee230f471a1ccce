"""A config turned into rows, its references and what must fit together checked. Every error is one line.

Stands before every run, so nothing heavy is imported here.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvgate.checkpoint import refusals
from kvgate.compiler import platforms
from kvgate.jobs.entries.model import Model, Source
from kvgate.jobs.entries.strategy import Strategy
from kvgate.jobs.rows import DECODE, HOST_PLATFORM, HOST_QUANT, ONNXRUNTIME, PREFILL, SIMULATOR, Row
from kvgate.planning import preparations, programs, quants
from kvgate.planning.config import ConfigError
from kvgate.planning.entries import Block, Config
from kvgate.planning.module_facts import cacheless, constants, modules


def rows(config: Config, base: Path) -> list[Row]:
    """The rows of the sweep in the config's order, all references checked. Raises ConfigError."""
    _check_references(config, base)
    _check_used(config, base)
    found: dict[Row, int] = {}
    for n, block in enumerate(config["sweep"]["blocks"]):
        product = list(_product(block, config))
        for m, pattern in enumerate(block["exclude"]):
            if not any(row.matches(pattern) for row in product):
                raise ConfigError(f"sweep.blocks[{n}].exclude[{m}]: got {pattern}, which takes no tuple away")
        for row in product:
            if any(row.matches(pattern) for pattern in block["exclude"]):
                continue
            if row in found:
                name = "/".join(list(row.wildcards().values())[:-1])
                raise ConfigError(f"sweep.blocks[{n}]: defines {name} again, which sweep.blocks[{found[row]}] has")
            _check_tuple(f"sweep.blocks[{n}]", config, row, base)
            found[row] = n
    if not found:
        raise ConfigError("sweep.blocks: got no tuple at all, allowed: at least one that no exclude takes away")
    return list(found)


def context_limit(config: Config, model: str, base: Path) -> int | None:
    """The most tokens the model takes, by its entry and its config.json where one is at hand; None: not known yet."""
    entry = config["models"][model]
    found = (entry.get("context"), refusals.limit(hub_config(entry, base)))
    return min((x for x in found if x is not None), default=None)


def hub_config(entry: Model, base: Path) -> dict[str, Any]:
    """The model's config.json where the source has it at hand while planning (a folder, a random model), else {}."""
    source = entry["source"]
    config, path = source.get("config"), source.get("path")
    if isinstance(config, dict):
        return config
    if source["kind"] == "folder" and isinstance(path, str):
        try:
            found = json.loads((base / path / "config.json").read_text(encoding="utf-8"))
        except OSError:
            return {}
        except ValueError as error:
            raise ConfigError(f"{path}/config.json: is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{path}/config.json: got {type(found).__name__}, allowed: keys and values")
        return found
    return {}


def check_target(config: Config, wildcards: dict[str, str]) -> None:
    """Whether the config has what the path of a target names. Raises ConfigError."""
    known: dict[str, Collection[str]] = {
        "model": config["models"],
        "weights": config["weights"],
        "form": ("recipe", "plain"),
        "strategy": config["strategies"],
        "part": (DECODE, PREFILL),
        "platform": (*platforms.SUPPORTED, HOST_PLATFORM),
        "quant": (*config["quants"], HOST_QUANT),
        "backend": (SIMULATOR, ONNXRUNTIME, *config["boards"]),
        "program": config["programs"],
        "sweep": (config["sweep"]["name"],),
    }
    for column, name in wildcards.items():
        _known(f"target: {column}", name, known[column])


def _product(block: Block, config: Config) -> Iterator[Row]:
    columns = (block[name] for name in ("models", "weights", "strategies", "platforms", "quants"))
    for model, weights, strategy, platform, quant in itertools.product(*columns):
        for backend in backends(config, platform):
            yield Row(model, weights, strategy, platform, quant, backend)


def backends(config: Config, platform: str) -> list[str]:
    """What runs a tuple of a platform: the sweep's backends that can. The host's graphs always run in ONNX Runtime."""
    found = [ONNXRUNTIME] if platform == HOST_PLATFORM else []
    for name in config["sweep"]["backends"]:
        if (platform != HOST_PLATFORM) if name == SIMULATOR else (config["boards"][name]["platform"] == platform):
            found.append(name)
    return found


def _known(where: str, got: str, known: Collection[str]) -> None:
    if got not in known:
        raise ConfigError(f"{where}: got {got!r}, known: {', '.join(sorted(known))}")


def _all_known(where: str, got: list[str], known: Collection[str]) -> None:
    for n, name in enumerate(got):
        _known(f"{where}[{n}]", name, known)


def _check_references(config: Config, base: Path) -> None:
    """Every name in the config can be one and exists; every text file is there and says something."""
    for kind in ("models", "weights", "strategies", "quants", "programs"):
        for name in config[kind]:
            _check_name(kind, name)
    _check_name("sweep.name", config["sweep"]["name"])
    for name, model in config["models"].items():
        _known(f"models.{name}.source.kind", model["source"]["kind"], modules("sources"))
        _check_source(f"models.{name}.source", model["source"])
    for name, weights in config["weights"].items():
        for n, step in enumerate(weights["steps"]):
            _known(f"weights.{name}.steps[{n}].name", step["name"], modules("weights"))
        preparations.check(name, weights)
    for name, strategy in config["strategies"].items():
        _known(f"strategies.{name}.module", strategy["module"], modules("strategies"))
        _check_prefill(f"strategies.{name}.prefill", strategy)
        _check_layers(f"strategies.{name}.layers", strategy)
    for name, quant in config["quants"].items():
        quants.check(name, quant)
    for n, block in enumerate(config["sweep"]["blocks"]):
        where = f"sweep.blocks[{n}]"
        _all_known(f"{where}.models", block["models"], config["models"])
        _all_known(f"{where}.weights", block["weights"], config["weights"])
        _all_known(f"{where}.strategies", block["strategies"], config["strategies"])
        _all_known(f"{where}.platforms", block["platforms"], (*platforms.SUPPORTED, HOST_PLATFORM))
        _all_known(f"{where}.quants", block["quants"], (*config["quants"], HOST_QUANT))
    for name, limits in config["thresholds"].items():
        if isinstance(limits, dict) and "pass" in limits and limits["pass"] > limits["warn"]:
            raise ConfigError(
                f"thresholds.{name}.pass: got {limits['pass']:g}, allowed: at most warn, {limits['warn']:g}"
            )
    _check_boards(config)
    runs = [name for name, program in config["programs"].items() if program["kind"] != "calibration"]
    texts = [name for name, program in config["programs"].items() if program["kind"] == "calibration"]
    _all_known("sweep.programs", config["sweep"]["programs"], runs)
    _all_known("calibration.texts", config["calibration"]["texts"], texts)
    programs.check(config, base)


def _check_name(where: str, name: str) -> None:
    """Names are parts of paths and of file names on boards."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", str(name)):
        raise ConfigError(f"{where}: got the name {name!r}, allowed: letters, digits, _ . + -")


def _check_source(where: str, source: Source) -> None:
    """The keys are those of its kind."""
    of_kind = constants("sources", source["kind"])
    known = of_kind["REQUIRED"] | of_kind["OPTIONAL"] | {"kind": ""}
    for key in of_kind["REQUIRED"]:
        if key not in source:
            raise ConfigError(f"{where}: lacks {key}, which kind {source['kind']} needs")
    for key, value in source.items():
        _known(where, key, list(known))
        form = known[key]
        if form and not (isinstance(value, str) and re.fullmatch(form, value)):
            raise ConfigError(f"{where}.{key}: got {value!r}, allowed: {'a text' if form == '.+' else form}")


def _check_boards(config: Config) -> None:
    boards = config["boards"]
    for name, entry in boards.items():
        where = f"boards.{name}"
        _known(f"{where}.driver", entry["driver"], modules("remote/drivers"))
        _known(f"{where}.platform", entry["platform"], [*platforms.SUPPORTED, HOST_PLATFORM])
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name) or name in (SIMULATOR, ONNXRUNTIME):
            raise ConfigError(f"{where}: got the name {name!r}, allowed: small letters, digits, _ . - and no backend's")
        stands_in = entry["engine"] == ONNXRUNTIME
        if stands_in != (entry["platform"] == HOST_PLATFORM) or stands_in != name.startswith(ONNXRUNTIME):
            raise ConfigError(
                f"{where}: got engine {entry['engine']} on {entry['platform']}, allowed: onnxruntime on host, with a "
                "name that begins with onnxruntime (it is no board), else a chip and an engine for it"
            )
        if entry["driver"] != "local" and not entry["address"]:
            raise ConfigError(f"{where}: lacks address, which driver {entry['driver']} needs")
    for n, name in enumerate(config["sweep"]["backends"]):
        _known(f"sweep.backends[{n}]", name, [SIMULATOR, *boards])


def _check_prefill(where: str, entry: Strategy) -> None:
    tokens = entry["prefill"]
    if tokens == 1 or tokens > entry["capacity"]:
        raise ConfigError(f"{where}: got {tokens}, allowed: 0, or 2 to the capacity, {entry['capacity']}")
    if tokens and entry["form"] == "exporter":
        raise ConfigError(f"{where}: got {tokens} with form exporter, allowed: 0: such a graph takes one token a step")


def _check_layers(where: str, entry: Strategy) -> None:
    """A piece is of our own graph, and takes the cache of its own layers."""
    layers = entry["layers"]
    if layers and (entry["form"] == "exporter" or entry["packing"] == "model"):
        what = "form exporter" if entry["form"] == "exporter" else "packing model"
        raise ConfigError(f"{where}: got {layers} with {what}, allowed: 0: one piece")


def devices(config: Config) -> list[list[str]]:
    """The boards' names, those of one device together."""
    found: dict[tuple, list[str]] = {}
    for name, entry in config["boards"].items():
        found.setdefault((entry["driver"], entry["address"], entry["port"]), []).append(name)
    return list(found.values())


def _check_used(config: Config, base: Path) -> None:
    """What the sweep names is there; a board that no tuple is built for would be left out without a word."""
    for model in dict.fromkeys(x for block in config["sweep"]["blocks"] for x in block["models"]):
        source: Mapping[str, object] = config["models"][model]["source"]
        for key in constants("sources", str(source["kind"]))["LOCAL"]:
            if key in source and not (base / str(source[key])).exists():
                where = f"models.{model}.source.{key}"
                raise ConfigError(f"{where}: got {source[key]!r}, allowed: what is there, seen from the repository")
    built = sorted({platform for block in config["sweep"]["blocks"] for platform in block["platforms"]})
    for n, name in enumerate(config["sweep"]["backends"]):
        if name != SIMULATOR and config["boards"][name]["platform"] not in built:
            platform = config["boards"][name]["platform"]
            raise ConfigError(f"sweep.backends[{n}]: {name} is a {platform}, the sweep builds for: {', '.join(built)}")


def _check_tuple(where: str, config: Config, row: Row, base: Path) -> None:
    """What must fit together: platform and quant, capacity and model, programs and capacity, calibration."""
    strategy, capacity = config["strategies"][row.strategy], config["strategies"][row.strategy]["capacity"]
    if (row.platform == HOST_PLATFORM) != (row.quant == HOST_QUANT):
        raise ConfigError(f"{where}: got quant {row.quant} on platform {row.platform}, allowed: fp32 on host only")
    if row.platform != HOST_PLATFORM:
        supported, dtype = platforms.supported(row.platform), platforms.dtype(config["quants"][row.quant])
        if dtype not in supported:
            raise ConfigError(
                f"{where}: quant {row.quant} is {dtype}, which {row.platform} has not; "
                f"supported: {', '.join(supported)}"
            )
        if cacheless(strategy):
            raise ConfigError(f"{where}: strategy {row.strategy} recomputes, allowed: platform host only")
    _check_weights(where, config, row, base)
    hub = hub_config(config["models"][row.model], base)
    why = refusals.refusal(hub) if hub else None
    if why:
        raise ConfigError(f"{where}: model {row.model}: {why}")
    limit = context_limit(config, row.model, base)
    if limit is not None and capacity > limit:
        why = " (in longer texts its rotary embedding is another one)" if refusals.changes(hub) else ""
        raise ConfigError(
            f"{where}: strategy {row.strategy} has capacity {capacity}, "
            f"model {row.model} takes at most {limit} tokens{why}"
        )
    entries = config["programs"]
    texts = [
        x for name in config["sweep"]["programs"] if (x := entries[name])["kind"] == "text"
    ]  # a chat may end early
    isolated = max((x["tokens"] for x in texts if "isolated" in x["histories"]), default=0)
    if isolated < capacity:
        raise ConfigError(
            f"{where}: strategy {row.strategy} has capacity {capacity}, which no text of the sweep fills: "
            f"got at most {isolated} isolated tokens"
        )
    calibrates = row.platform != HOST_PLATFORM and config["quants"][row.quant]["calibrate"]
    if calibrates:
        programs.check_calibration(where, config, row.strategy, row.quant)
    if limit is not None:
        reads = calibrates or config["weights"][row.weights]["calibrate"]
        programs.check_context(where, config, row.model, limit, reads)


def _check_weights(where: str, config: Config, row: Row, base: Path) -> None:
    entry, strategy = config["weights"][row.weights], config["strategies"][row.strategy]
    if entry["calibrate"] and not config["calibration"]["texts"]:
        raise ConfigError(f"{where}: weights {row.weights} calibrate, calibration.texts: got [], allowed: at least one")
    if entry["steps"] and strategy["form"] == "exporter":
        raise ConfigError(
            f"{where}: strategy {row.strategy} exports the checkpoint as it is, "
            f"got weights {row.weights}, allowed: weights without steps"
        )
    family = hub_config(config["models"][row.model], base).get("model_type")
    quant = None if row.platform == HOST_PLATFORM else (row.quant, config["quants"][row.quant])
    preparations.check_fit(where, row.weights, entry, family, quant)
