"""The oldest Python that a board may have: where one is on this machine, and what it must take. Not a test itself."""

import io
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

from board import rig
from kvgate.board import environment
from kvgate.remote import agent_zip

VERSION = "3.9"
# Where pyenv and uv keep theirs: they need not be on the path.
_KEPT = (".pyenv/versions/3.9.*/bin/python3.9", ".local/share/uv/python/cpython-3.9.*/bin/python3.9")
# Every module as it is imported on a board: what is evaluated at run time counts, not only the syntax.
_IMPORTS = """
import importlib, pkgutil, sys
import kvgate.board
names = [x.name for x in pkgutil.iter_modules(kvgate.board.__path__)]
for name in names:
    importlib.import_module("kvgate.board." + name)
print(sys.version_info[:2], len(names))
"""


def found() -> str | None:
    """A Python 3.9 that runs: KVGATE_PYTHON_3_9, of the path, pyenv's, uv's."""
    kept = [str(x) for pattern in _KEPT for x in sorted(Path.home().glob(pattern))]
    for python in (os.environ.get("KVGATE_PYTHON_3_9"), shutil.which("python3.9"), *kept):
        if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return None


def takes(python: str, folder: Path) -> bool:
    """Asserts that it compiles every zip and says hello as an agent; with numpy, that it imports all of board/ and
    runs a job. Returns whether numpy was there."""
    for engine in environment.ENGINES:
        with zipfile.ZipFile(io.BytesIO(agent_zip.build(engine, "dynamic_concat"))) as file:
            file.extractall(folder / engine)
    subprocess.run([python, "-m", "compileall", "-q", str(folder)], check=True)
    numpy = subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode == 0
    runtime = folder / "site/onnxruntime"  # looked for by its name alone: the rig's engine is a double
    runtime.mkdir(parents=True)
    (runtime / "__init__.py").touch()
    with rig.agent(folder / "work", rig.double(), python, PYTHONPATH=str(runtime.parent)) as remote:
        assert remote.hello()["python"].startswith(f"{VERSION}.")
        if not numpy:
            return False
        status = remote.run(rig.job(), rig.files())
        assert status["ok"], status
    package = Path(environment.__file__).parents[2]
    imported = subprocess.run([python, "-c", _IMPORTS], cwd=package, capture_output=True, text=True)
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.startswith("(3, 9) ")
    return True
