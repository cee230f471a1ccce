from pathlib import Path

import pytest
from kvgate.jobs import digest


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three modules: a imports b in a function, c stands alone."""
    files = {
        "a": "def f():\n    from kvgate import b\n    return b.VALUE\n",
        "b": "VALUE = 1\n",
        "c": "VALUE = 1\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(digest, "_ROOT", tmp_path)

    def of(name: str, edit: str | None = None, text: str = "") -> str:
        if edit:
            (tmp_path / f"{edit}.py").write_text(text)
        digest._source.cache_clear()
        digest._file.cache_clear()
        return digest.code_digest([f"kvgate.{name}"])

    yield of
    digest._source.cache_clear()
    digest._file.cache_clear()


def test_sees_a_change_in_an_imported_module(package):
    before, other = package("a"), package("c")
    assert package("a", "b", "VALUE = 2\n") != before
    assert package("c") == other


@pytest.mark.parametrize("text", ["# why\nVALUE = 1\n", '"""Doc."""\n\n\nVALUE    =  1  # one\n'])
def test_comments_layout_and_docstrings_are_no_code(package, text):
    before = package("a")
    assert package("a", "b", text) == before


def test_a_package_that_looks_for_its_modules_imports_them_all(package, tmp_path):
    """By `pkgutil.iter_modules(__path__)`; one that looks elsewhere does not."""
    folder = tmp_path / "found"
    folder.mkdir()
    looks = "import pkgutil\nNAMES = [x.name for x in pkgutil.iter_modules({})]\n"
    (folder / "__init__.py").write_text(looks.format("__path__"))
    (folder / "one.py").write_text("VALUE = 1\n")
    (tmp_path / "d.py").write_text("from kvgate import found\n")
    before = package("d")
    assert package("d", "found/one", "VALUE = 2\n") != before
    assert package("d", "found/one", "VALUE = 1\n") == before
    assert package("d", "found/two", "VALUE = 1\n") != before
    elsewhere = package("d", "found/__init__", looks.format("['/tmp']"))
    assert package("d", "found/two", "VALUE = 3\n") == elsewhere


def test_unknown_root_is_refused(package):
    with pytest.raises(ValueError, match=r"'kvgate\.nope', which is not in the package"):
        package("nope")


def test_lock_names_are_compared_as_pip_does(tmp_path: Path):
    lock = tmp_path / "lock.txt"
    lock.write_text("Jinja2==3.1.6\nml_dtypes==0.6.0\n")
    assert digest.locked(lock, ["jinja2", "ml-dtypes"]) == {"jinja2": "3.1.6", "ml-dtypes": "0.6.0"}
    with pytest.raises(ValueError, match=r"lock\.txt: lacks torch"):
        digest.locked(lock, ["torch"])
