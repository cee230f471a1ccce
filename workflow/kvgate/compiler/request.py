"""What the parent asks of the toolkit's process. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.perturb=255"


class Failure(Exception):
    """An expected failure: the toolkit refused, or its simulator did. One line."""


@dataclass(frozen=True)
class Request:
    """Paths are absolute; the current folder is for files that the toolkit drops. JSON both ways by asdict."""

    graph: str
    contract: str
    tables: str  # host.npz
    artifact: str  # the .rknn to write
    result: str  # the result's JSON
    observations: str  # folder of {program}.npz
    platform: str
    dtype: str  # of the quant, as in platforms.SUPPORTED
    config: Mapping[str, Any]  # keyword arguments of RKNN.config
    build: Mapping[str, Any]  # keyword arguments of RKNN.build
    dataset: str | None  # calibration list; its paths are relative to itself
    custom: str  # the artifact's custom string
    mask: float  # additive mask value
    programs: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # {name: {"trace": path, "histories": [..]}}
    isolated: int = 16
    hybrid: Mapping[str, str] = field(default_factory=dict)  # tensor name pattern: dtype
    headroom: float = 1  # by which calibrated ranges are wider than what was seen
    parent: int = 0  # process id; the child dies with it. 0: does not
    progress: int = 2  # file descriptor
    memory: int = 0  # bytes of private memory the process may have; 0: no limit
