"""What .ci/run accepts as a whole run of the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = Path(__file__).parents[1] / ".ci/skipped"
SYSTEM = "SKIPPED [3] tests/conftest.py:15: needs system packages: make test-system\n"
OTHER = "SKIPPED [1] tests/board/test_agent.py:341: no python3.9 on the path\n"
END = "== 900 passed, 4 skipped in 812.44s (0:13:32) ==\n"


def checked(tmp_path: Path, text: str, *reason: str) -> subprocess.CompletedProcess:
    (tmp_path / "log").write_text(text)
    return subprocess.run([SKIPPED, tmp_path / "log", *reason], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "reason", "names"),
    [
        (SYSTEM + END, ["make test-system$"], ""),
        (SYSTEM + OTHER + END, ["make test-system$"], "no python3.9 on the path"),
        (SYSTEM + END, [], "needs system packages"),  # there nothing may be skipped
        ("== 40 passed in 9 s ==\n", [], ""),
        ("ERROR: file or directory not found\n", [], "no test passed"),
    ],
)
def test_a_skip_that_nothing_else_runs_fails_the_run(tmp_path, text, reason, names):
    done = checked(tmp_path, text, *reason)
    assert (done.returncode, names in done.stderr) == (1 if names else 0, True)


def test_skips_are_said_as_pytest_says_them(tmp_path):
    """The lines that the script reads are those of this pytest, also long ones and those of workers."""
    why = "needs " + "a very long reason " * 12
    (tmp_path / "test_it.py").write_text(f"import pytest\ndef test_a(): pytest.skip({why!r})\ndef test_b(): pass\n")
    command = [sys.executable, "-m", "pytest"]
    for workers in ([], ["-n", "2", "--dist", "loadfile"]):
        ran = subprocess.run(
            [*command, "-q", "-rs", "-p", "no:cacheprovider", *workers, str(tmp_path)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        done = checked(tmp_path, ran.stdout, "make test-system$")
        assert done.returncode == 1 and why.strip() in done.stderr, ran.stdout
