"""An entry of quants.yaml. Standard library only."""

from typing import Literal, TypedDict


class Config(TypedDict, total=False):
    """Arguments of RKNN.config that are read here; any other of platforms.CONFIG_ARGUMENTS may stand beside them."""

    quantized_dtype: str
    quantized_algorithm: str
    quantized_method: str  # `channel`, or `group` and its size
    disable_rules: list[str]
    auto_hybrid_cos_thresh: float
    auto_hybrid_euc_thresh: float


class Build(TypedDict, total=False):
    """Arguments of RKNN.build that are read here; any other of platforms.BUILD_ARGUMENTS may stand beside them."""

    auto_hybrid: bool


class Quant(TypedDict):
    mask: float  # the additive mask's value
    calibrate: bool
    config: Config
    build: Build
    hybrid: dict[str, Literal["float16", "int16"]]  # by pattern
    headroom: float  # how much wider than what the calibration saw
