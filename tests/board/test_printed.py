"""Lines that the vendor's package and runtimes print, as seen under emulation and in public threads."""

import os
from pathlib import Path

import pytest
import rig
from kvgate.board import printed

INIT = """E Catch exception when init runtime!
E Traceback (most recent call last):
  File "rknn_lite.py", line 177, in init_runtime
    self.rknn_runtime.build_graph(self.rknn_data, self.load_model_in_npu, self.rknn_user_key)
  File "rknnlite/api/rknn_runtime.py", line 965, in rknnlite.api.rknn_runtime.RKNNRuntime.build_graph
Exception: RKNN init failed. error code: {}
"""


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        (INIT.format("RKNN_ERR_FAIL"), "", "RKNN init failed. error code: RKNN_ERR_FAIL"),
        (INIT.format("RKNN_ERR_MODEL_INVALID"), "", "RKNN init failed. error code: RKNN_ERR_MODEL_INVALID"),
        (
            INIT.format("RKNN_ERR_INCOMPATILE_PRE_COMPILE_MODEL"),
            "version_mismatch",
            "RKNN init failed. error code: RKNN_ERR_INCOMPATILE_PRE_COMPILE_MODEL",
        ),
        (
            INIT.format("RKNN_ERR_TARGET_PLATFORM_UNMATCH"),
            "platform",
            "RKNN init failed. error code: RKNN_ERR_TARGET_PLATFORM_UNMATCH",
        ),
        (INIT.format("RKNN_ERR_MALLOC_FAIL"), "memory", "RKNN init failed. error code: RKNN_ERR_MALLOC_FAIL"),
        (
            "E RKNN: [09:00:01.123] Invalid RKNN model version 6\n",
            "version_mismatch",
            "Invalid RKNN model version 6",
        ),
        ("E RKNN: [1:2:3.4] failed to submit!, op id: 7\n", "failed_to_submit", "failed to submit!, op id: 7"),
        ("E Catch exception when set npu core mode.\n", "core_mask", "Catch exception when set npu core mode."),
        (
            "E RKNN: failed to open rknpu module, need to insmod rknpu dirver!\n" + INIT.format("RKNN_ERR_FAIL"),
            "engine_missing",
            "RKNN init failed. error code: RKNN_ERR_FAIL",
        ),
        (
            "Exception: E Get outputs failed, error code: RKNN_ERR_FAIL\n\n",
            "",
            "Get outputs failed, error code: RKNN_ERR_FAIL",
        ),
        ("W The input[0] need NHWC data format, but NCHW set\nI RKNN: fine\n", "", ""),
        ("", "", ""),
    ],
)
def test_kind_and_reason(text, kind, reason):
    lines = text.splitlines()
    assert (printed.kind(lines), printed.reason(lines)) == (kind, reason)


def stderr(text: str) -> None:
    os.write(2, text.encode())


@rig.printing
def test_errors_since_the_last_look():
    stderr("E RKNN: before\n")
    text = printed.Text()
    assert text.errors() == []
    stderr("\x1b[31mE RKNN: [1] bad\x1b[0m\nW RKNN: not so bad\nE plain\nEnd of file\nit failed to submit a job\n")
    assert text.errors() == ["E RKNN: [1] bad", "E plain", "it failed to submit a job"]
    assert text.errors() == []


@rig.printing
def test_what_is_printed_in_every_step_does_not_fill_the_disk():
    """Two followers: the file is cut under the one that comes later."""
    first, second = printed.Text(), printed.Text()
    stderr("I the runtime's first words\n")
    for n in range(40):
        stderr("W warning\n" * 10_000 + f"E error {n}\n")
        assert first.errors() == [f"E error {n}"]
    text = Path("/proc/self/fd/2").read_text()
    assert len(text) < 2 << 20 and text.startswith("I the runtime's first words")
    second.lines()
    stderr("E last\n")
    assert second.errors() == first.errors() == ["E last"]


def test_a_terminal_is_not_followed():
    kept, (inlet, outlet) = os.dup(2), os.pipe()
    os.dup2(outlet, 2)
    try:
        text = printed.Text()
        os.write(2, b"E RKNN: bad\n")
        assert text.errors() == []
    finally:
        os.dup2(kept, 2)
        for descriptor in (kept, inlet, outlet):
            os.close(descriptor)
