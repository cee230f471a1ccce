import json

import pytest
from kvgate.jobs import record
from kvgate.sources import folder
from tiny import fetched


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fetched(tmp_path_factory.mktemp("results"))


def test_copies_what_a_checkpoint_needs_and_nothing_else(checkpoint, tmp_path):
    origin = tmp_path / "origin"
    for path in checkpoint.iterdir():
        record.link(path, origin / path.name)
    (origin / "README.md").write_text("---\nlicense: mit\ntags: [x]\n---\nlicense: gpl\n")
    (origin / "picture.png").write_bytes(b"x")
    (origin / "tf_model.h5").write_bytes(b"x")
    facts = folder.fetch({"path": str(origin)}, tmp_path / "into")
    names = {path.name for path in (tmp_path / "into").iterdir()}
    assert "model.safetensors" in names and "tokenizer.json" in names
    assert not names & {"picture.png", "tf_model.h5"}
    assert facts["licence"] == "mit"
    for path in (tmp_path / "into").iterdir():  # a link would let an edit here reach the user's own file
        assert path.read_bytes() == (origin / path.name).read_bytes()
        assert path.stat().st_ino != (origin / path.name).stat().st_ino
        assert path.stat().st_nlink == 1


@pytest.mark.parametrize("call", [lambda *_: 0, None])
def test_a_file_is_copied_where_the_kernel_cannot(tmp_path, monkeypatch, call):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.copy_file_range", call or refuse)
    (tmp_path / "a").write_bytes(bytes(range(256)) * 999)
    folder.copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_the_revision_follows_the_content(checkpoint, tmp_path):
    revisions = []
    for name, change in (("a", False), ("b", False), ("c", True)):
        for path in checkpoint.iterdir():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
        if change:
            (tmp_path / name / "config.json").write_bytes((checkpoint / "config.json").read_bytes() + b"\n")
        revisions.append(folder.fetch({"path": str(tmp_path / name)}, tmp_path / f"into-{name}")["revision"])
    assert revisions[0] == revisions[1] != revisions[2]


def test_pickled_weights_only_where_there_are_no_others(checkpoint, tmp_path):
    origin = tmp_path / "origin"
    record.link(checkpoint / "config.json", origin / "config.json")
    (origin / "pytorch_model.bin").write_bytes(b"x")
    (origin / "consolidated.safetensors").write_bytes(b"x")  # a stray one hides nothing
    left = folder.fetch({"path": str(origin)}, tmp_path / "one")["left_out"]
    assert (tmp_path / "one/pytorch_model.bin").exists()
    assert not (tmp_path / "one/consolidated.safetensors").exists()
    assert left == {"consolidated.safetensors": "the weights are those of pytorch_model.bin"}
    record.link(checkpoint / "model.safetensors", origin / "model.safetensors")
    left = folder.fetch({"path": str(origin)}, tmp_path / "two")["left_out"]
    assert not (tmp_path / "two/pytorch_model.bin").exists()
    assert left.keys() == {"consolidated.safetensors", "pytorch_model.bin"}


def test_an_index_says_which_files_are_the_weights(tmp_path):
    origin = tmp_path / "origin"
    origin.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors", "stray.safetensors", "config.json"):
        (origin / name).write_bytes(name.encode())
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (origin / "model.safetensors.index.json").write_text(json.dumps(index))
    left = folder.fetch({"path": str(origin)}, tmp_path / "into")["left_out"]
    assert left.keys() == {"stray.safetensors"}
    assert {x.name for x in (tmp_path / "into").iterdir()} == {x.name for x in origin.iterdir()} - left.keys()
    (origin / "model-2.safetensors").unlink()
    with pytest.raises(record.Blocked, match=r"got no model-2.safetensors, which model.safetensors.index"):
        folder.fetch({"path": str(origin)}, tmp_path / "cut")
    index["weight_map"]["b"] = "model-1.safetensors"
    (origin / "model.safetensors.index.json").write_text(json.dumps(index))
    (origin / "model.safetensors").write_bytes(b"x")
    with pytest.raises(record.Blocked, match="of other files, allowed: one of the two"):
        folder.fetch({"path": str(origin)}, tmp_path / "both")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_what_git_lfs_left_behind_is_named(checkpoint, tmp_path, name):
    origin = tmp_path / "origin"
    for path in checkpoint.iterdir():
        record.link(path, origin / path.name)
    (origin / name).unlink()
    (origin / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(record.Blocked, match=rf"^{name}: got a Git LFS pointer, allowed: "):
        folder.fetch({"path": str(origin)}, tmp_path / "into")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["adapter_config.json"], r"got adapter_config.json, an adapter: merge it first"),
        (["config.json", "adapter_model.safetensors"], r"got adapter_model.safetensors, an adapter: merge it first"),
        (["config.json", "model.safetensors", "adapter_config.json"], "got adapter_config.json beside a model"),
        (["config.json", "pytorch_model.bin", "adapter_model.bin"], "got adapter_model.bin beside a model"),
    ],
)
def test_an_adapter_is_no_model(tmp_path, names, says):
    (tmp_path / "origin").mkdir()
    for name in names:
        (tmp_path / "origin" / name).write_bytes(b"{}")
    with pytest.raises(record.Blocked, match=says):
        folder.fetch({"path": str(tmp_path / "origin")}, tmp_path / "into")


def test_the_line_that_says_why_is_not_cut_off():
    error = ValueError("Validation error for field 'x':\n    TypeError: expected int, got str")
    assert folder.one_line(error) == "ValueError: Validation error for field 'x': TypeError: expected int, got str"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "got no such folder"),
        (["config.json"], "got no weights"),
        (["model.safetensors"], "got no config.json"),
    ],
)
def test_an_incomplete_folder_is_one_line(checkpoint, tmp_path, files, says):
    origin = tmp_path / "origin"
    for name in files or []:
        record.link(checkpoint / name, origin / name)
    with pytest.raises(record.Blocked, match=says):
        folder.fetch({"path": str(origin)}, tmp_path / "into")
