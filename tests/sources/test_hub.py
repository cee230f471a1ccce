import pytest
from kvgate.jobs import record
from kvgate.sources import hub
from tiny import fetched

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT[:-1], COMMIT.upper(), ""])
def test_a_revision_that_can_move_is_refused(tmp_path, revision):
    with pytest.raises(record.Blocked, match="40 hex digits"):
        hub.fetch({"id": "a/b", "revision": revision}, tmp_path)


def test_offline_is_one_line(tmp_path, monkeypatch):
    # The client reads HF_HUB_OFFLINE when it is imported, so its own switch is set here.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(record.Blocked, match=f"hub a/b at {COMMIT}: cannot be downloaded: ") as caught:
        hub.fetch({"id": "a/b", "revision": COMMIT}, tmp_path / "into")
    assert "\n" not in caught.value.reason and len(caught.value.reason) < 450


def test_a_cached_snapshot_is_linked_without_a_network(tmp_path, monkeypatch):
    """The real client against a cache in its own layout: blobs, and a snapshot of symbolic links."""
    cache = tmp_path / "cache"
    repository = cache / "models--a--b"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in fetched(tmp_path / "results").iterdir():
        record.link(path, repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(repository / "blobs" / path.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(cache))
    into = tmp_path / "into"
    facts = hub.fetch({"id": "a/b", "revision": COMMIT}, into)
    assert facts["revision"] == COMMIT
    assert (into / "model.safetensors").is_file() and not (into / "model.safetensors").is_symlink()
