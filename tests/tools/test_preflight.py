import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kvgate.tools import preflight

GOOD = preflight.Machine(
    "Linux", "x86_64", "3.11.7", "2.36", True, 16.0, 100.0, {"rknn-toolkit2": "2.5.0", "torch": "2.13.0"}
)


def test_one_line_with_all_facts():
    (line,) = preflight.lines(GOOD)
    for fact in (
        "Linux x86_64",
        "16.0 GB memory",
        "100 GB disk",
        "AVX2 yes",
        "glibc 2.36",
        "3.11.7",
        "rknn-toolkit2 2.5.0",
    ):
        assert fact in line
    assert "AVX2 no" in preflight.lines(replace(GOOD, avx2=False))[0]


def test_this_machine_is_read():
    found = preflight.machine()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.memory > 0.5 and found.disk > 0
    assert found.versions["transformers"] == "5.24.0"
    assert "\n" not in preflight.lines()[0]


def test_a_good_machine_has_no_problem():
    assert preflight.problem(GOOD) is None
    assert preflight.problem(replace(GOOD, avx2=False)) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"processor": "aarch64"}, "Linux on aarch64"),
        ({"system": "Darwin", "processor": "arm64", "glibc": ""}, "Darwin on arm64"),
        ({"python": "3.12.1"}, "got 3.12.1, needed: 3.11"),
        ({"glibc": "2.27"}, "got glibc 2.27"),
        ({"glibc": ""}, "got glibc none"),
        ({"memory": 5.9}, "got 5.9 GB"),
        ({"versions": {"torch": "missing"}}, "got no torch"),
    ],
)
def test_what_is_in_the_way_is_one_line(change, says):
    reason = preflight.problem(replace(GOOD, **change))
    assert reason and says in reason and "needed: " in reason and "\n" not in reason


def test_by_itself_before_anything_is_installed():
    done = subprocess.run([sys.executable, "-I", "-S", preflight.__file__], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    program = "import platform, runpy, sys; platform.machine = lambda: 'aarch64'; "
    program += "runpy.run_path(sys.argv[1], None, '__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", program, preflight.__file__], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr
        == "kvgate preflight: machine: got Linux on aarch64, needed: Linux on x86_64, where the toolkit runs\n"
    )


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(preflight, "PACKAGES", ("no-such-thing-at-all",))
    assert preflight.machine().versions == {"no-such-thing-at-all": "missing"}


@pytest.mark.parametrize(("text", "bytes_"), [("1073741824\n", 2.0**30), ("max\n", float("inf")), ("", float("inf"))])
def test_a_container_s_limit(text, bytes_):
    assert preflight.memory_limit(text) == bytes_


def test_only_the_standard_library_is_imported():
    tree = ast.parse(Path(preflight.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) if node.module}
    assert names and {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)
