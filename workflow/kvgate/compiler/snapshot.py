"""What the toolkit's accuracy analysis left, as data: a row an operator, with its errors and its tensor's figures.

Errors are normalized L2 against the toolkit's own float32 run of the fused graph (`golden`). `accumulated`: with the
inputs that the operators before it gave; `isolated`: with golden inputs, so that it is the operator's own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np

from kvgate.compiler.analysis import SNAPSHOT
from kvgate.compiler.dtypes import BITS, FLOAT16
from kvgate.compiler.hybrid import ranges_file
from kvgate.compiler.log import bare
from kvgate.jobs import record

Array = np.ndarray
T = TypeVar("T")
DECIMALS = 1e-5  # of a distance in the toolkit's text
CHANNELS = 16  # fewer have no outlier
_NUMBER = r"(nan|-?inf|[-+.\deE]+)"
_ROW = re.compile(rf"^\[(\S+)\] (.+?)\s+{_NUMBER} \| {_NUMBER}\s+{_NUMBER} \| {_NUMBER}\s*$")


def parsed(path: Path, parse: Callable[[Path], T], *errors: type[Exception]) -> T:
    """What `parse` makes of a file of the toolkit's. Raises Blocked where it cannot: missing, or of another form.

    errors: what `parse` raises then, beside OSError, EOFError and ValueError.
    """
    known: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, *errors)
    try:
        return parse(path)
    except known as why:
        text = " ".join(bare((isinstance(why, OSError) and why.strerror) or str(why)).split())
        raise record.Blocked(f"accuracy analysis: {path.name}: {text}") from None


@dataclass(frozen=True)
class Line:
    """A line of error_analysis.txt. Cosines; euclidean distances as they are, not normalized."""

    operator: str
    tensor: str
    accumulated: tuple[float, float]  # cosine, distance
    isolated: tuple[float, float]


def lines(text: str) -> list[Line]:
    """Raises ValueError where no line fits: another toolkit writes another table."""
    found = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        if match := _ROW.match(line):
            numbers = [float(x) for x in match.groups()[2:]]
            found.append(Line(match[1], match[2].strip(), (numbers[0], numbers[1]), (numbers[2], numbers[3])))
    if not found:
        raise ValueError("got no line of an operator with four errors")
    return found


@dataclass(frozen=True)
class Node:
    """An operator of the fused graph, which has the names of the dumped tensors."""

    name: str
    inputs: tuple[str, ...]


class Range(TypedDict):
    """Of a tensor; scale and zero where its integers have one of each."""

    dtype: str
    low: float
    high: float
    scale: float | None
    zero: int | None


class Figures(TypedDict, total=False):
    """Of a tensor that both runs dumped, see `measure`. None: no number of JSON's, or no integers."""

    golden: list[float | None]  # its smallest and largest value in float32
    overflow: int  # values that float16 has not
    sorted_l2: float | None
    channels: float | None
    outside: float | None  # share of float32's values outside the range
    clipped_l2: float | None
    saturated: float | None  # share of the simulator's values at the range's ends


class Errors(Figures):
    """Of an operator: its errors, its tensor's range and figures."""

    accumulated_cosine: float | None
    isolated_cosine: float | None
    accumulated_l2: float | None
    isolated_l2: float | None
    dtype: str | None
    low: float | None
    high: float | None
    scale: float | None


class Row(Errors):
    """An operator: what it is, where, and its errors."""

    operator: str
    tensor: str  # what it gives
    module: str  # of the model; empty where it is of none
    layer: int | None
    cpu: bool
    inputs: list[str] | None  # None: the fused graph does not say


@dataclass(frozen=True)
class Snapshot:
    """Raises Blocked where a file of the toolkit's is missing or cannot be read."""

    folder: Path  # the child's
    graph: str  # the ONNX file that was analysed
    hybrid: Mapping[str, str] = field(default_factory=dict)  # the build record's: {tensor: dtype}
    headroom: float = 1.0  # by which the build changed the ends of the ranges in the list

    @cached_property
    def lines(self) -> list[Line]:
        return parsed(
            self.folder / SNAPSHOT / "error_analysis.txt", lambda path: lines(path.read_text(encoding="utf-8"))
        )

    @cached_property
    def files(self) -> dict[str, str]:
        """Dump of each tensor; the toolkit changes letters of names that files cannot have."""
        text = parsed(self.folder / SNAPSHOT / "map_name_to_file.txt", Path.read_text)
        pairs = (line.rsplit(None, 1) for line in text.splitlines() if line.rstrip().endswith(".txt"))
        return {name.strip(): f"{file.removesuffix('.txt')}.npy" for name, file in pairs}

    def tensor(self, name: str, run: str) -> Array | None:
        """float32, in the compiler's own layout. run: `golden` or `simulator`. None where it was not dumped."""
        path = self.folder / SNAPSHOT / run / "npy" / self.files.get(name, "")
        return parsed(path, np.load) if path.is_file() else None

    @cached_property
    def ranges(self) -> dict[str, Range]:
        """Of each tensor with one for the whole of it; empty where there is no list."""
        import yaml

        path = self.folder / ranges_file(self.graph)
        if not path.is_file():
            return {}
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        read = parsed(path, lambda path: yaml.load(path.read_text(encoding="utf-8"), loader), yaml.YAMLError)
        # The list is from before a hybrid build's tensors were chosen: by patterns, which the list names then, or by
        # the toolkit. Its log, and so the build's record, has all of those in float16 and none in int16.
        chosen = (read["custom_quantize_layers"] or {}) | dict(self.hybrid)
        found: dict[str, Range] = {}
        # The scales in the list are still the calibration's: the second step makes its own from the ends.
        for name, entry in read["quantize_parameters"].items():
            # An output that became float16 has no conversion left: `key.0.out_int8` is then `key.0.out` itself.
            dtype = chosen.get(name) or chosen.get(_outside(name))
            span = _range(entry | {"dtype": dtype, "scale": [], "zero_point": []} if dtype else entry)
            if span and span["scale"]:
                span["scale"] *= self.headroom
            if span:
                found[name] = span
        return found

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """The fused graph's operators by what they give; empty where it was not written."""
        import onnx
        from google.protobuf.message import DecodeError

        path = self.folder / f"{Path(self.graph).stem}.model"
        if not path.is_file():
            return {}
        model = parsed(path, lambda path: onnx.load(str(path), load_external_data=False), DecodeError)
        return {out: Node(node.name, tuple(node.input)) for node in model.graph.node for out in node.output}

    def operators(self, cpu: Sequence[str], owners: Mapping[str, str], layers: Mapping[str, int]) -> list[Row]:
        """All rows in the order of the graph, each tensor's once.

        cpu: names of the operators that the compiler left to the CPU. owners: the exported graph's tensors to the names
        of their operators, which hold the modules' paths. layers: its inputs and outputs that belong to a layer.
        """
        dumped = {line.tensor for line in self.lines}
        left = {part for name in cpu for part in (name, _plain(name))}
        found: dict[str, Row] = {}
        for line in self.lines:
            node = self.nodes.get(line.tensor)
            # The tensor's name first: a sum fused to the product before it has that one's.
            names = [line.tensor, node.name if node else "", owners.get(_prefix(line.tensor, owners), "")]
            module = next((path for name in names if (path := path_of(name))), "")
            layer = layer_of(module)
            if layer is None:
                layer = layers.get(_prefix(line.tensor, layers))
            inputs = [x for x in node.inputs if x in dumped] if node else None
            found[line.tensor] = {
                "operator": line.operator,
                "tensor": line.tensor,
                "module": module,
                "layer": layer,
                "cpu": any(part in left for name in names for part in (name, name.split("#")[0])),
                "inputs": inputs,
                **self._errors(line),
            }
        return list(found.values())

    def _errors(self, line: Line) -> Errors:
        golden, got = self.tensor(line.tensor, "golden"), self.tensor(line.tensor, "simulator")
        span = self.ranges.get(line.tensor) or self._converted(line.tensor)
        errors: Errors = {
            "accumulated_cosine": finite(line.accumulated[0]),
            "isolated_cosine": finite(line.isolated[0]),
            "accumulated_l2": None,
            "isolated_l2": None,
            "dtype": span["dtype"] if span else None,
            "low": span["low"] if span else None,
            "high": span["high"] if span else None,
            "scale": span["scale"] if span else None,
        }
        if golden is None or got is None or golden.shape != got.shape:
            return errors
        norm = float(np.linalg.norm(golden.astype(np.float64)))
        errors["accumulated_l2"] = finite(_over(float(np.linalg.norm(got.astype(np.float64) - golden)), norm))
        # The text has five decimals: at least this much, so that a tensor of tiny values is not off by rounding it.
        errors["isolated_l2"] = finite(_over(max(line.isolated[1] - DECIMALS / 2, 0.0), norm))
        return {**errors, **measure(golden, got, span)}

    def _converted(self, name: str) -> Range | None:
        """A boundary tensor made integers is in the list under its own name, as the float that it is outside."""
        entry, dtype = self.ranges.get(_outside(name)), name.rpartition("_")[2]
        if not entry or entry["dtype"] == "float16":  # a hybrid build left it so
            return entry
        low, high = min(entry["low"], 0.0), max(entry["high"], 0.0)
        scale = (high - low) / (2 ** BITS[dtype] - 1)
        zero = round(-(2 ** (BITS[dtype] - 1)) - low / scale) if scale else 0
        return {**entry, "dtype": dtype, "scale": scale or None, "zero": zero}


def measure(golden: Array, got: Array, span: Range | None) -> Figures:
    """Figures of a tensor: what float32 holds (golden), what the simulator made of it (got), its range (span)."""
    true, seen = golden.astype(np.float64), got.astype(np.float64)
    norm = float(np.linalg.norm(true))
    body: Figures = {
        "golden": [finite(float(true.min())), finite(float(true.max()))],
        "overflow": int(np.count_nonzero(~(np.abs(true) <= FLOAT16)) + np.count_nonzero(~np.isfinite(seen))),
        # The same values in another order: 0 where sorting makes them equal.
        "sorted_l2": finite(_over(float(np.linalg.norm(np.sort(seen, None) - np.sort(true, None))), norm)),
        "channels": _channels(true),
        "outside": None,
        "clipped_l2": None,
        "saturated": None,
    }
    if span and span["scale"]:
        low, high = span["low"], span["high"]
        body["outside"] = finite(float(np.mean((true < low) | (true > high))))
        body["clipped_l2"] = finite(_over(float(np.linalg.norm(true - np.clip(true, low, high))), norm))
        half = 2 ** (BITS[span["dtype"]] - 1)
        zero, scale = span["zero"], span["scale"]
        assert zero is not None  # integers with a scale have one
        bottom, top = (-half - zero) * scale, (half - 1 - zero) * scale
        near = scale / 2
        body["saturated"] = finite(float(np.mean((seen <= bottom + near) | (seen >= top - near))))
    return body


def _channels(array: Array) -> float | None:
    """The largest channel's peak over the median one's; a channel is what rank 4 has second and other ranks last."""
    axis = 1 if array.ndim == 4 else array.ndim - 1
    if not array.ndim or array.shape[axis] < CHANNELS:
        return None
    peaks = np.abs(array).max(axis=tuple(i for i in range(array.ndim) if i != axis))
    middle = float(np.median(peaks))
    return finite(float(peaks.max()) / middle) if middle else None


def _range(entry: Mapping[str, Any]) -> Range | None:
    """An entry of the toolkit's list; None where it has no range for the whole tensor."""
    if len(entry.get("min", ())) != 1:
        return None
    one = {name: (entry.get(name) or [None])[0] for name in ("min", "max", "scale", "zero_point")}
    integer = entry["dtype"] in BITS
    scale = one["scale"] if integer else None
    return {"dtype": entry["dtype"], "low": one["min"], "high": one["max"], "scale": scale, "zero": one["zero_point"]}


def _outside(name: str) -> str:
    """The boundary tensor that a tensor made integers is outside: `key.0_int8` -> `key.0`; empty where it is none."""
    base, _, dtype = name.rpartition("_")
    return base if dtype in BITS else ""


def path_of(name: str) -> str:
    """`/model/model/layers.0/mlp/up_proj/MatMul#2` -> `layers.0/mlp/up_proj`; empty where it is no path."""
    if not name.startswith("/"):
        return ""
    parts = name.strip("/").split("/")[:-1]
    while len(parts) > 1 and parts[0] == "model":
        parts = parts[1:]
    return "/".join(parts)


def layer_of(module: str) -> int | None:
    match = re.search(r"(?:^|/)(?:layers|h|blocks?)[._](\d+)(?:/|$)", module)
    return int(match[1]) if match else None


def _prefix(tensor: str, names: Mapping[str, Any]) -> str:
    """The longest name that the tensor's begins with: the toolkit appends to names (`key.0_int8`, `logits_mm`)."""
    return next((tensor[:k] for k in range(len(tensor), 0, -1) if tensor[:k] in names and _ends(tensor[k:])), "")


def _ends(rest: str) -> bool:
    return not rest or rest[0] in "_-#"


def _plain(name: str) -> str:
    """The exported operator's name out of the compiler's: `MatMul#2_ConvAdd`, `MatMul_3_2sdpa`."""
    return re.split(r"#|_\d?[a-z]+$", name)[0]


def _over(distance: float, norm: float) -> float:
    if norm:
        return distance / norm
    return 0.0 if distance == 0 else float("inf")


def finite(value: float) -> float | None:
    """Four digits; None for what JSON cannot hold."""
    return float(f"{value:.4g}") if np.isfinite(value) else None
