"""What the tiny sweep makes is what it made before states and parts (commit 209bc6a), but for names in contracts."""

from pathlib import Path

import pytest
from kvgate.compiler import artifact
from kvgate.jobs import record

pytestmark = pytest.mark.slow

WEIGHTS = "eaeb5eac3ac529dcf9a1c3f73382ac73bcda6d4679bf44553a2ec5c76dce7397"
HOST = "9a979583c1a99c43cc38107c6a384da5d023337baa38d335785e6b1458522c54"
# By strategy: the graph, and the fp16 artifact's content without its custom string, which names the contract.
MADE = {
    "tiny_cpu_managed": (
        "1321f3d29280bc50dac1e37a1d03b11533ff1e307589c755c2e41d1d49606ea8",
        "0f564913b54ebab6ef6bce4d322d7307e2cd75b14773d247905d98e0b3c38806",
    ),
    "tiny_blend": (
        "6bb76c9cc41247aa53ff20dca7bc9245e231312c0ea758a6b578b39155417e9c",
        "c7a455980d285599255b74e71a3c3216123145d6a64654338e8e2b5039d465ab",
    ),
}


def unnamed(path: Path, into: Path) -> str:
    """The content digest of an artifact whose custom string is blanked."""
    custom = artifact.read(path, digests=False).custom.encode()
    data = path.read_bytes()
    assert len(custom) > 64 and data.count(custom) == 1
    into.write_bytes(data.replace(custom, custom[:11] + b"0" * 64 + custom[75:]))
    return artifact.read(into).content_digest


@pytest.mark.parametrize("strategy", MADE)
def test_graphs_weights_and_artifacts_are_what_they_were(built, tmp_path, strategy):
    model = built.path / "results/models/tiny"
    graph = model / f"graphs/plain/{strategy}/decode"
    names = ("model.onnx", "weights.bin", "host.npz")
    assert tuple(record.sha256(graph / x) for x in names) == (MADE[strategy][0], WEIGHTS, HOST)
    rknn = model / f"artifacts/plain/{strategy}/rk3576/fp16/decode/model.rknn"
    assert unnamed(rknn, tmp_path / "unnamed.rknn") == MADE[strategy][1]
