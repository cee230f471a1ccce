import pytest
from kvgate import record
from kvgate.sources import folder
from tiny import fetched


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fetched(tmp_path_factory.mktemp("results"))


def test_links_what_a_checkpoint_needs_and_nothing_else(checkpoint, tmp_path):
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
    weights = "model.safetensors"
    assert (tmp_path / "into" / weights).stat().st_ino == (origin / weights).stat().st_ino


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
    folder.fetch({"path": str(origin)}, tmp_path / "one")
    assert (tmp_path / "one/pytorch_model.bin").exists()
    record.link(checkpoint / "model.safetensors", origin / "model.safetensors")
    folder.fetch({"path": str(origin)}, tmp_path / "two")
    assert not (tmp_path / "two/pytorch_model.bin").exists()


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
