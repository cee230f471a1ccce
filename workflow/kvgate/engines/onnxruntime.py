"""The graph (not the artifact) in ONNX Runtime, one thread, so that equal graphs give equal numbers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvgate.contract import Contract


class Engine:
    def __init__(self, graph: Path, contract: Contract, mapped: bool = False) -> None:
        """mapped: read the weights from their file, not from a copy in the order that its kernels like: the last digits
        are others then."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if mapped:
            options.add_session_config_entry("session.disable_prepacking", "1")
        self.session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self.names = [t.name for t in contract.outputs]

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self.names, self.session.run(self.names, dict(feeds)), strict=True))
