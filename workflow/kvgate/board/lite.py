"""The artifact in the vendor's Python package (rknn-toolkit-lite2), held to the contract at every call.

The package reports errors as text and -1 or None, runs on after failed runs, takes any array for any input, and
reads a rank-4 array as NHWC unless told otherwise. Its outputs are always float32. Python 3.9, numpy only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.board import printed
from kvgate.board.engine import EngineError, checked, returned
from kvgate.contract import Contract

ARTIFACT = "model.rknn"
_REPLACED = re.compile(r'replaced with "(NPU_CORE_\w+)"')


class Engine:
    def __init__(self, job: Mapping[str, Any], folder: Path, contract: Contract) -> None:
        self.job, self.path, self.contract = job, str(folder / ARTIFACT), contract
        self.lite: Any = None
        self.text = printed.Text()
        self.code: Any = None  # of the last rknn_run, where it could be had

    def open(self, say: Callable[[str], None]) -> dict[str, Any]:
        say("load")
        try:
            from rknnlite.api import RKNNLite
        except ImportError as error:
            text = "rknn-toolkit-lite2: {}".format(str(error) or type(error).__name__)
            raise EngineError("engine_missing", text) from None
        self.lite = RKNNLite(verbose=False)
        self._call("load_rknn", self.lite.load_rknn, self.path)
        say("init")
        # -1 is final: the context may be open and even infer, with another mask than asked.
        self._call("init_runtime", self.lite.init_runtime, core_mask=int(self.job.get("core_mask", 0)))
        mask, findings = self._mask(RKNNLite)
        self._watch_run()
        return {"versions": _versions(self.lite.get_sdk_version()), "core_mask": mask, "findings": findings}

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = checked(feeds, self.contract.inputs)
        # Of ranks that have no layout the format is ignored. A list of its own: the package writes into it.
        self.code = None
        outputs = self.lite.inference(inputs=arrays, data_format=["nchw"] * len(arrays))
        if self.code not in (0, None):
            lines = self.text.lines()
            text = "arrays came back, but rknn_run returned {}; {}".format(self.code, printed.reason(lines))
            raise EngineError(printed.kind(lines) or "ignored_run_error", text.rstrip("; "))
        if outputs is None:
            lines = self.text.lines()
            raise EngineError(printed.kind(lines) or "error_line", "inference returned None: " + printed.reason(lines))
        return returned(outputs, self.contract.outputs)

    def last_us(self) -> dict[str, float | None]:
        """The runtime's own run time, by a method of the package that is not public."""
        try:
            return {"run_us": float(self.lite.rknn_runtime.get_run_perf())}
        except Exception:  # another version of the package
            return {"run_us": None}

    def close(self) -> None:
        if self.lite is not None:
            self.lite.release()

    def _watch_run(self) -> None:
        """Keep the code of each run, which `inference` drops. In a part of the package that is not public."""
        try:
            runtime = self.lite.rknn_runtime
            run = runtime.run

            def watched(*arguments: Any, **options: Any) -> Any:
                answer = run(*arguments, **options)
                self.code = answer if isinstance(answer, int) else None
                return answer

            runtime.run = watched
        except AttributeError:  # another version: stderr is what is left
            pass

    def _mask(self, package: Any) -> tuple[int, list[dict[str, Any]]]:
        """The mask that took effect, and what to say of it: the package replaces one with a warning."""
        asked = int(self.job.get("core_mask", 0))
        names = _REPLACED.findall("\n".join(self.text.lines()))
        taken = int(getattr(package, names[-1], asked)) if names else asked
        if taken == asked:
            return asked, []
        text = "core mask: got {}, the lite package took {}".format(asked, taken)
        return taken, [{"kind": "core_mask", "text": text, "phase": "init"}]

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """A call that must return 0. Raises EngineError with what the package printed."""
        try:
            code = function(*arguments, **options)
        except Exception as error:  # e.g. a runtime without a function that this version of the package needs
            raise EngineError("error_line", "{}: {}: {}".format(name, type(error).__name__, error)) from error
        if code == 0:
            return
        lines = self.text.lines()
        # Of a mask that the runtime did not take nothing is said.
        silent = "core_mask" if self.job.get("core_mask") and not printed.reason(lines) else "error_line"
        text = "{} returned {}: {}".format(name, code, printed.reason(lines) or "nothing was said")
        raise EngineError(printed.kind(lines) or silent, text)


def _versions(text: Any) -> dict[str, str]:
    """From `get_sdk_version`, which is a text: `  API: 2.3.2 (...)`, `  DRV: rknn_server: ... driver: 0.9.8`."""
    found = {}
    for name, label in (("runtime", "API"), ("driver", "DRV")):
        line = re.search(r"^\s*{}:.*$".format(label), str(text), re.MULTILINE)
        numbers = re.findall(r"\d+\.\d+\.\d+", line.group(0)) if line else []
        if numbers:
            found[name] = numbers[-1] if name == "driver" else numbers[0]
    return found
