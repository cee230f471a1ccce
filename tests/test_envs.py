"""The environments: one list of versions, written down twice, and what is installed."""

import re
from importlib import metadata
from pathlib import Path

import yaml

ENVS = Path(__file__).parents[1] / "envs"
LOCK = (ENVS / "lock.txt").read_text().splitlines()


def conda(text):
    """The pip section of a conda environment, as lines of a lock."""
    (pip,) = [x["pip"] for x in yaml.safe_load(text)["dependencies"] if isinstance(x, dict)]
    return pip


def test_conda_records_the_same_versions():
    text = (ENVS / "kvgate.yaml").read_text()
    assert conda(text) == LOCK
    assert conda(text.replace("torch==2.13.0", "torch==2.4.0")) != LOCK


def test_every_version_is_pinned_once():
    names = []
    for line in LOCK:
        found = re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][0-9A-Za-z.]*)", line)
        assert found, line
        names.append(re.sub(r"[-_.]+", "-", found[1]).lower())
    assert len(set(names)) == len(names) > 100


def test_what_is_installed_is_the_lock():
    wrong = {}
    for line in LOCK:
        name, version = line.split("==")
        if metadata.version(name).split("+")[0] != version:
            wrong[name] = metadata.version(name)
    assert not wrong


def test_conda_s_python_is_the_project_s():
    text = (ENVS.parent / "pyproject.toml").read_text()
    assert "python=3.11" in (ENVS / "kvgate.yaml").read_text() and 'requires-python = ">=3.11,<3.12"' in text
