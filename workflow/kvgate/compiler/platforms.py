"""What the toolkit builds for which chip: read while planning, so standard library only.

Measured with rknn-toolkit2 2.5.0: each pair was built. tests/compiler/test_probes.py holds the tables to the toolkit.
"""

from collections.abc import Mapping
from typing import Any

TOOLKIT = "rknn-toolkit2"
MEASURED = "2.5.0"  # the version of this table and of artifact.STACK_WORDS

# `fp16` is the build without quantization; the others are values of the toolkit's `quantized_dtype`.
SUPPORTED: Mapping[str, tuple[str, ...]] = {
    "rk2118": ("fp16",),
    "rk3562": ("fp16", "w8a8", "w8a16", "w16a16i_dfp"),
    "rk3566": ("fp16", "w8a8", "w16a16i_dfp"),
    "rk3568": ("fp16", "w8a8", "w16a16i_dfp"),
    "rk3576": ("fp16", "w8a8", "w4a16", "w16a16i_dfp"),
    "rk3588": ("fp16", "w8a8", "w16a16i_dfp"),
    "rv1103": ("w8a8", "w16a16i_dfp"),
    "rv1103b": ("w8a8",),
    "rv1106": ("w8a8", "w16a16i_dfp"),
    "rv1106b": ("w8a8",),
    "rv1126b": ("fp16", "w8a8", "w4a16", "w16a16i_dfp"),
}

# What a float32 input or output of the graph may be at the artifact's boundary.
BOUNDARY: Mapping[str, tuple[str, ...]] = {
    "fp16": ("float16",),
    "w8a8": ("int8", "float16"),
    "w8a16": ("float16",),
    "w4a16": ("float16",),
    "w16a16i_dfp": ("int16", "float16"),
}

# Keyword arguments of RKNN.config and RKNN.build, without those that the build stage sets itself.
CONFIG_ARGUMENTS = (
    *("mean_values", "std_values", "quantized_dtype", "quantized_algorithm", "quantized_method"),
    *("quantized_hybrid_level", "quant_img_RGB2BGR", "float_dtype", "optimization_level", "remove_weight"),
    *("compress_weight", "inputs_yuv_fmt", "single_core_mode", "dynamic_input", "model_pruning", "op_target"),
    *("quantize_weight", "remove_reshape", "sparse_infer", "mini_rknn", "enable_flash_attention"),
    *("auto_hybrid_cos_thresh", "auto_hybrid_euc_thresh", "memory_plan_strategy", "compute_order"),
    *("compiler_control_file", "output_optimize", "set_op_attr", "sram_prefer", "nbuf_prefer", "check_data"),
    *("stream_op", "disable_rules", "enable_const_share", "enable_rnn_loop", "enable_core0_only_mode"),
    "disable_first_conv",
)
BUILD_ARGUMENTS = ("rknn_batch_size", "auto_hybrid")

# What a hybrid quant may leave tensors at. int8 under w16a16i_dfp builds and gives garbage.
HYBRID: Mapping[str, tuple[str, ...]] = {
    "w8a8": ("float16", "int16"),
    "w4a16": ("float16",),
    "w16a16i_dfp": ("float16",),
}
INTEGER = ("w8a8", "w16a16i_dfp")  # activations too
AUTO_HYBRID = ("w8a8",)  # under w4a16 and w16a16i_dfp it chose nothing, whatever the threshold


def supported(platform: str) -> tuple[str, ...]:
    """The dtypes that build for a platform. Raises ValueError on an unknown platform."""
    if platform not in SUPPORTED:
        raise ValueError(f"platform: got {platform!r}, known: {', '.join(SUPPORTED)}")
    return SUPPORTED[platform]


def dtype(quant: Mapping[str, Any]) -> str:
    """The dtype of a quant's config entry: `fp16` where nothing is quantized."""
    return str(quant.get("config", {}).get("quantized_dtype", "fp16"))
