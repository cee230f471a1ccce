"""A copy of the repository with the tiny sweep built in it once; tests plan and run in it as a user would."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = (
    *("Snakefile", "workflow", "config", "envs", "profiles", "tests/texts"),
    *(f"tests/workflow/{name}.yaml" for name in ("tiny", "boards", "replaced")),
)


@dataclass(frozen=True)
class Repository:
    """A checkout at `path`, with its own results."""

    path: Path

    def snakemake(self, *args: str, config: str = "tests/workflow/tiny.yaml") -> subprocess.CompletedProcess[str]:
        """Run snakemake in it as a user does."""
        return subprocess.run(self.command(*args, config=config), cwd=self.path, capture_output=True, text=True)

    def command(self, *args: str, config: str = "tests/workflow/tiny.yaml") -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", "2", *args, "--configfile", *config.split()]

    def planned(self, *args: str, config: str = "tests/workflow/tiny.yaml") -> dict[str, int]:
        """Jobs that a dry run plans, by rule, without the target itself."""
        done = self.snakemake("-n", "--quiet", "rules", *args, config=config)  # quiet rules: print the counts
        assert done.returncode == 0, done.stdout + done.stderr
        stats = done.stderr.partition("Job stats:")[2].partition("Reasons:")[0] or done.stdout
        found = {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", stats, re.MULTILINE)}
        return {name: count for name, count in found.items() if name not in ("all", "total")}

    def kvgate(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvgate", *args],
            cwd=self.path,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": "workflow"},
        )

    def results(self) -> list[Path]:
        return sorted(p for p in (self.path / "results").rglob("*.json") if ".cost." not in p.name)

    def copy(self, path: Path) -> "Repository":
        """Another checkout with a copy of the results: hard links, except for records, whose dates are tested."""
        shutil.copytree(self.path, path, copy_function=_link)
        return Repository(path)


def _link(source: str, target: str) -> None:
    if "results" in Path(source).parts and Path(source).suffix != ".json":
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _checkout(path: Path) -> Repository:
    for name in COPIED:
        source, target = ROOT / name, path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    return Repository(path)


@pytest.fixture(scope="session")
def checkout() -> Callable[[Path], Repository]:
    """Makes a checkout without results at a path."""
    return _checkout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """The tiny sweep, run from an empty results folder by the real workflow with the real toolkit."""
    repository = _checkout(tmp_path_factory.mktemp("built") / "repository")
    done = repository.snakemake()
    assert done.returncode == 0, done.stdout + done.stderr
    return repository


@pytest.fixture
def repository(built: Repository, tmp_path: Path) -> Iterator[Repository]:
    """A copy of the built repository that a test may edit."""
    yield built.copy(tmp_path / "copy")
