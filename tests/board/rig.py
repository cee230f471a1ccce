"""An agent over pipes, as a host would drive it, and jobs for it. Not a test itself."""

import functools
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import standin
from kvgate import contract as c
from kvgate.board import wire
from kvgate.board.agent import VERSION
from kvgate.remote import agent_zip

GHZ = 1_000_000_000
STRATEGY = "cpu_managed"
CONTRACT = standin.contract(STRATEGY, c.Cache(8))

# An engine in the place of ort.py: the stand-in's boundary with zeros, and a script of what goes wrong when.
# The script is the job's `custom_string`: {"open", "every" step or a step's number: what}.
DOUBLE = '''
import json, os, signal, sys, time
import numpy as np
from kvgate.board.engine import EngineError, checked

class Engine:
    """A double: no runtime."""
    def __init__(self, job, folder, contract):
        self.script, self.contract, self.count = json.loads(job["custom_string"] or "{}"), contract, 0
        self.outputs = {t.name: np.zeros(t.shape, np.float32) for t in contract.outputs}
    def open(self, say):
        say("load")
        say("init")
        self.play("open")
        return {"versions": {"runtime": self.script.get("runtime", "2.5.0")}, "core_mask": 1, "findings": []}
    def play(self, when):
        for what in self.script.get(when, []):
            if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
            elif what == "kill": os.kill(os.getpid(), signal.SIGKILL)
            elif what == "hang": time.sleep(1000)
            elif what == "exit": os._exit(7)
            elif what == "memory": raise MemoryError
            elif what == "fork": print(os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "1000"]), file=sys.stderr)
            elif what.startswith("error "): raise EngineError("core_mask", what[6:])
            elif what.startswith("out "): os.write(1, (what[4:] + "\\n").encode())
            else: os.write(2, (what + "\\n").encode())
    def step(self, feeds):
        checked(feeds, self.contract.inputs)
        self.count += 1
        self.play("every")
        self.play(str(self.count))
        return self.outputs
    def close(self):
        self.play("close")
'''


def tree(root: Path) -> Path:
    """The files of a board with an RK3576, as far as the agent reads them. A double of a board."""
    texts = {
        "proc/device-tree/model": "Rockchip RK3576 EVB1 V10 Board\0",
        "proc/device-tree/compatible": "rockchip,rk3576-evb1-v10\0rockchip,rk3576\0",
        "proc/sys/kernel/osrelease": "6.1.75\n",
        "proc/meminfo": "MemTotal:        8000000 kB\nMemFree: 1 kB\nMemAvailable:    6000000 kB\n",
        "proc/vmstat": "nr_free_pages 3\noom_kill 4\n",
        "sys/kernel/debug/rknpu/version": "RKNPU driver: v0.9.8\n",
        "sys/class/thermal/thermal_zone0/type": "soc-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "45250\n",
        "sys/class/thermal/thermal_zone1/type": "npu-thermal\n",
        "sys/class/thermal/thermal_zone1/temp": "-1000\n",
        "usr/lib/librknnrt.so": "\0ELF librknnrt version: 2.3.2 (429f97ae6b@2025-04-09T09:09:27)\0",
    }
    for device, hertz, governor in (("27700000.npu", GHZ, "rknpu_ondemand"), ("dmc", 2 * GHZ, "dmc_ondemand")):
        texts |= clock(f"sys/class/devfreq/{device}", "", hertz, governor)
    texts |= clock("sys/devices/system/cpu/cpufreq/policy0", "scaling_", 2_000_000, "schedutil")
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def clock(folder: str, prefix: str, high: int, governor: str) -> dict[str, str]:
    values = {"cur_freq": high // 2, "min_freq": high // 4, "max_freq": high, "governor": governor}
    return {f"{folder}/{prefix}{name}": f"{value}\n" for name, value in values.items()}


def governors(root: Path) -> dict[str, str]:
    paths = [*root.glob("sys/class/devfreq/*/governor"), *root.glob("sys/devices/system/cpu/cpufreq/*/*_governor")]
    return {path.parent.name: path.read_text().strip() for path in paths}


def double(text: str = DOUBLE, module: str = "kvgate/board/ort.py") -> bytes:
    """The agent with an engine's source replaced."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(agent_zip.build("onnxruntime", STRATEGY))) as old,
        zipfile.ZipFile(buffer, "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, text if name == module else old.read(name))
    return buffer.getvalue()


class Remote:
    """The host's side of one agent."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process, self.progress, self.files = process, [], {}  # type: Any, list[dict[str, Any]], dict[str, bytes]

    def send(self, kind: str, blob: bytes = b"", **fields: Any) -> None:
        wire.send(self.process.stdin, {"type": kind, **fields}, blob)

    def receive(self) -> dict[str, Any]:
        return wire.receive(self.process.stdout)[0]

    def ask(self, kind: str, blob: bytes = b"", **fields: Any) -> dict[str, Any]:
        self.send(kind, blob, **fields)
        return self.receive()

    def hello(self, deadline: float = 60) -> dict[str, Any]:
        return self.ask("hello", version=VERSION, deadline=deadline)

    def put(self, data: bytes) -> str:
        sha = hashlib.sha256(data).hexdigest()
        answer = self.ask("put", data, sha256=sha, size=len(data), offset=0)
        assert answer == {"type": "put", "sha256": sha, "ok": True}
        return sha

    def run(self, job: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
        """Send the files and the job; the status. Progress and result files are kept."""
        self.start(job, files)
        return self.done()

    def start(self, job: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        self.progress, self.files = [], {}
        self.send("run", job={**job, "files": {name: self.put(data) for name, data in files.items()}})

    def done(self) -> dict[str, Any]:
        while True:
            head, blob = wire.receive(self.process.stdout)
            if head["type"] == "progress":
                self.progress.append(head)
            elif head["type"] == "file":
                self.files[head["name"]] = self.files.get(head["name"], b"") + blob
                assert len(self.files[head["name"]]) == head["offset"] + len(blob) <= head["size"]
            else:
                assert head["type"] == "done", head
                status: dict[str, Any] = head["status"]
                return status


@contextmanager
def agent(work: Path, app: bytes, python: str = sys.executable, **environment: str) -> Iterator[Remote]:
    """Start the agent as the boot code does. It is gone afterwards."""
    path = work.parent / "agent.pyz"
    path.write_bytes(app)
    process = subprocess.Popen(
        [python, "-u", str(path), str(work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        yield Remote(process)
    finally:
        for stream in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        try:
            process.wait(10)
        finally:
            process.kill()
            process.wait()
            process.stderr.close()  # type: ignore[union-attr]


def printing(test: Callable[..., None]) -> Callable[..., None]:
    """The test runs with its stderr in a file that is opened for appending, as a child's is."""

    @functools.wraps(test)
    def wrapped(*arguments: Any, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder, Path(folder, "stderr").open("ab") as file:
            kept = os.dup(2)
            os.dup2(file.fileno(), 2)
            try:
                test(*arguments, **options)
            finally:
                os.dup2(kept, 2)
                os.close(kept)

    return wrapped


def ends(pid: int, seconds: float = 5) -> bool:
    """Whether a process is gone, or a zombie, within the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def trace(tokens: int = 6, prompt: int = 3, contract: c.Contract = CONTRACT) -> bytes:
    """A trace of the stand-in, as file."""
    made = standin.Model(standin.layers_of(contract)).trace(
        np.arange(tokens) % standin.VOCABULARY, prompt, standin.tables(64), contract.windows
    )
    buffer = io.BytesIO()
    arrays = {"tokens": made.tokens, "prompt": prompt, "ended": False, "end_ids": (), "logits": made.logits}
    arrays |= made.states
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def host_file() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **standin.tables(64))  # type: ignore[arg-type]
    return buffer.getvalue()


def files() -> dict[str, bytes]:
    return {"contract.json": CONTRACT.to_json().encode(), "host.npz": host_file(), "trace/chat.npz": trace()}


def job(script: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A job for the double. script: see DOUBLE."""
    return {
        "engine": "onnxruntime",
        "platform": "rk3576",
        "custom_string": json.dumps(script or {}),
        "contract_digest": CONTRACT.digest,
        "pieces": [],
        "parts": {},
        "mask": -1e4,
        "programs": {"chat": {"histories": ["isolated", "forced", "free"]}},
        "isolated": 2,
        "core_mask": 0,
        "clocks": "record",
        "memory_bytes": 1 << 20,
        "timing": {"warmup": 2, "steps": 6},
        "seconds": {"load": 20, "step": 10},
        "perf": True,
        **fields,
    }
