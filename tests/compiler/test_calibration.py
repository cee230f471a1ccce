"""Calibration samples: which states, and what is written for the toolkit."""

from pathlib import Path

import numpy as np
import pytest
import tinygraph
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgate.compiler import calibration
from kvgate.compiler.calibration import Sample
from kvgate.jobs import record
from kvgate.observe import Trace
from kvgate.strategies.cpu_managed.host import Host


def ids(count: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"t{i}": rng.integers(0, 50, length) for i in range(count)}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(1, 6), st.integers(2, 12), st.data())
def test_samples_cover_positions_and_texts(texts: int, capacity: int, data: st.DataObject) -> None:
    found = ids(texts, capacity + 3)
    most = len({(p, t[: p + 1].tobytes()) for t in found.values() for p in range(capacity)})
    count = data.draw(st.integers(1, most))
    samples = calibration.choose(found, capacity, count)
    assert len({(s.position, found[s.text][: s.position + 1].tobytes()) for s in samples}) == count
    positions = [s.position for s in samples]
    assert positions[0] == 0 and positions == sorted(positions)
    if count > 1:
        assert positions[-1] == capacity - 1
        # Evenly spread but for the first (a repeated first token makes position 0 stand for several texts).
        assert max(np.diff(positions)) <= -(-capacity // max(count - count // 4 - 1, 1)) + 1
    used = [sum(s.text == t for s in samples) for t in found]
    if count <= capacity // 2:
        assert max(used) - min(used) <= 1


def test_first_positions_of_many_texts() -> None:
    positions = [s.position for s in calibration.choose(ids(15, 128), 128, 64)]
    assert 12 <= positions.count(0) <= 15 and 40 < len(set(positions)) < 64


def test_more_than_two_hundred_samples() -> None:
    samples = calibration.choose(ids(8, 128), 128, 500)
    assert len(set(samples)) == 500 and {s.text for s in samples} == set(ids(8, 128))


def test_texts_that_begin_alike_are_one_sample_there() -> None:
    found = ids(3, 8)
    for text in found.values():
        text[:2] = 7
    samples = calibration.choose(found, 8, 20)
    assert [s.position for s in samples].count(0) == [s.position for s in samples].count(1) == 1
    with pytest.raises(record.Blocked, match="got 21 samples, allowed: 1 to 20 different"):
        calibration.choose(found, 8, 21)


@pytest.mark.parametrize(
    ("texts", "count", "line"),
    [
        ({}, 1, "calibration: got no texts"),
        (ids(2, 7), 4, "calibration text t0: got 7 tokens, allowed: at least 8"),
        (ids(2, 8), 0, "got 0 samples"),
        (ids(2, 8), 17, "got 17 samples, allowed: 1 to 1"),
    ],
)
def test_refusals_while_choosing(texts: dict, count: int, line: str) -> None:
    with pytest.raises(record.Blocked, match=line):
        calibration.choose(texts, 8, count)


def test_drawn_texts_are_sampled_where_they_are_drawn() -> None:
    found = ids(15, 128)
    drawn = {"t12": 16, "t13": 16, "t14": 16}
    samples = calibration.choose(found, 128, 64, drawn)
    of = {t: [s.position for s in samples if s.text == t] for t in found}
    assert all(len(of[t]) >= 3 and min(of[t]) >= 16 for t in drawn)
    assert max(map(len, of.values())) - min(map(len, of.values())) <= 1
    assert max(max(of[t]) - min(of[t]) for t in drawn) > 64  # spread, not at one end
    positions = [s.position for s in samples]
    assert positions[0] == 0 and positions[-1] == 127 and max(np.diff(positions)) <= 4
    assert min(of["t0"] + of["t1"]) < 16
    plain = calibration.choose(found, 128, 400)
    assert any(s.text in drawn and s.position < 16 for s in plain)  # what is not known to be drawn is a text


def test_few_samples_take_drawn_texts_first() -> None:
    samples = calibration.choose(ids(9, 32), 32, 4, {"t7": 8, "t8": 8})
    assert {"t7", "t8"} < {s.text for s in samples} and samples[0].position == 0


def test_a_drawn_text_is_not_left_out_in_silence() -> None:
    with pytest.raises(record.Blocked, match="text t8: got none of 2 samples from its first drawn position 8 on"):
        calibration.choose(ids(9, 32), 32, 2, {"t7": 8, "t8": 8})


def test_only_drawn_texts_still_cover_the_first_position() -> None:
    samples = calibration.choose(ids(2, 16), 16, 12, {"t0": 4, "t1": 6})
    assert samples[0].position == 0 and [s.position for s in samples][-1] == 15


def test_which_texts_are_drawn_is_read_from_their_traces(tmp_path: Path) -> None:
    states = {f"layers.0.{kind}": np.zeros((6, 1, 2), np.float32) for kind in ("key", "value")}
    for name, prompt in (("a", 6), ("b", 2)):
        Trace(np.arange(6), prompt, False, (), states).save(str(tmp_path / name))
    found, drawn = calibration.tokens({name: tmp_path / name for name in "ab"})
    assert drawn == {"b": 2} and found["a"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_text_that_a_program_verifies_is_refused_by_its_tokens() -> None:
    texts, verified = ids(2, 20), {"p": ids(1, 30, seed=9)["t0"]}
    calibration.refuse_verified(texts, {}, verified, 16)
    texts["t1"][:16] = verified["p"][:16]
    line = "calibration text t1: got the first 16 tokens of program p, allowed: another text"
    with pytest.raises(record.Blocked, match=line):
        calibration.refuse_verified(texts, {}, verified, 16)
    with pytest.raises(record.Blocked, match="shares 90 % of its runs of 8 tokens with program p"):
        calibration.refuse_verified(texts, {}, verified, 17)  # though the seventeenth differs
    with pytest.raises(record.Blocked, match="got the first 10 tokens of program p"):
        calibration.refuse_verified(texts, {"t1": 10}, verified, 17)  # but what it was drawn after does not
    with pytest.raises(record.Blocked, match="got the first 5 tokens of program p"):
        calibration.refuse_verified(texts, {}, {"p": verified["p"][:5]}, 16)


def test_a_text_that_a_program_verifies_but_for_a_word_is_refused() -> None:
    """Wherever the word stands, changed, added or taken away; half of a text is too much, a quotation is not."""
    verified = {"p": np.random.default_rng(9).integers(0, 50, 128)}
    base = verified["p"]
    changed = np.where(np.arange(128) == 5, 51, base)
    edits = {
        "changed": changed,
        "added": np.insert(base, 0, [51, 52]),
        "taken": np.delete(base, 60),
        "half": np.concatenate([ids(1, 60)["t0"] + 60, base[:68]]),
    }
    for edited in edits.values():
        line = r"calibration text t: shares \d+ % of its runs of 8 tokens with program p, allowed: another text"
        with pytest.raises(record.Blocked, match=line):
            calibration.refuse_verified({"t": edited}, {}, verified, 128)
    quoting = np.concatenate([ids(1, 100)["t0"] + 60, base[:28]])
    calibration.refuse_verified({"t": quoting}, {}, verified, 128)
    calibration.refuse_verified({"t": edits["half"]}, {}, verified, 64)  # within the capacity it is another one
    with pytest.raises(record.Blocked, match="shares 92 %"):
        calibration.refuse_verified({"t": edits["added"]}, {"t": 32}, verified, 128)  # what it was drawn after


def test_digest_is_of_content() -> None:
    samples = [Sample("a", 0), Sample("b", 5)]
    digest = calibration.digest(samples, {"a": "1", "b": "2"})
    assert digest == calibration.digest([Sample("x", 0), Sample("y", 5)], {"x": "1", "y": "2"})  # names do not count
    assert digest != calibration.digest(samples, {"a": "1", "b": "3"})
    assert digest != calibration.digest([Sample("a", 0), Sample("b", 6)], {"a": "1", "b": "2"})


class World:
    """A contract, its host and two traces with values of their own at each slot."""

    def __init__(self, folder: Path) -> None:
        self.contract = tinygraph.contract()
        self.host = Host(self.contract, tinygraph.tables(), -1e4)
        self.traces = {}
        for i, name in enumerate("ab"):
            rng = np.random.default_rng(i)
            shape = (tinygraph.SLOTS, tinygraph.HEADS, tinygraph.SIZE)
            names = [f"layers.{layer}.{kind}" for kind in ("key", "value") for layer in range(2)]
            states = {state: rng.normal(size=shape).astype(np.float32) for state in names}
            tokens = rng.integers(0, tinygraph.VOCABULARY, tinygraph.SLOTS)
            Trace(tokens, len(tokens), False, (), states).save(str(folder / f"{name}.npz"))
            self.traces[name] = folder / f"{name}.npz"

    def write(self, folder: Path, *samples: Sample) -> list[list[np.ndarray]]:
        path = calibration.write(folder, self.contract, self.host, self.traces, samples)
        return [[np.load(folder / name) for name in line.split(" ")] for line in path.read_text().splitlines()]


def test_files_are_the_isolated_feeds(tmp_path: Path) -> None:
    world = World(tmp_path)
    # Not in the order of texts: the list keeps the order of the samples.
    samples = (Sample("a", 0), Sample("b", 3), Sample("a", tinygraph.SLOTS - 1))
    lines = world.write(tmp_path, *samples)
    assert len(lines) == 3
    for arrays, sample in zip(lines, samples, strict=True):
        trace = Trace.load(str(world.traces[sample.text]))
        world.host.fill(trace.tokens.tolist(), trace.states, sample.position)
        feeds = world.host.feeds([int(trace.tokens[sample.position])])
        assert [a.dtype for a in arrays] == [t.dtype for t in world.contract.inputs]
        for array, (name, fed) in zip(arrays, feeds.items(), strict=True):
            assert array.shape == fed.shape and np.array_equal(array, fed), name
    key = lines[1][2]  # key.0 [Hk, D, 1, S] of (b, 3), read by plain indexing
    trace = Trace.load(str(world.traces["b"]))
    assert key[1, 5, 0, 2] == trace.states["layers.0.key"][2, 1, 5] and not key[..., 3:].any()


def test_identical_samples_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(record.Blocked, match=r"\(b, 4\) is identical to sample \(b, 4\)"):
        world.write(tmp_path, Sample("b", 4), Sample("a", 4), Sample("b", 4))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_refused_by_name(tmp_path: Path, bad: float) -> None:
    world = World(tmp_path)
    trace = Trace.load(str(world.traces["b"]))
    trace.states["layers.1.value"][2, 0, 0] = bad
    trace.save(str(world.traces["b"]))
    world.write(tmp_path, Sample("b", 2))  # not reached yet
    with pytest.raises(record.Blocked, match=r"sample \(b, 3\), input 'value.1': got NaN or infinity"):
        world.write(tmp_path, Sample("a", 0), Sample("b", 3))


def test_what_float16_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    world = World(tmp_path)
    trace = Trace.load(str(world.traces["b"]))
    trace.states["layers.1.key"][2, 1, 3] = -65504
    trace.save(str(world.traces["b"]))
    world.write(tmp_path, Sample("b", 3))
    trace.states["layers.1.key"][2, 1, 3] = -70000
    trace.save(str(world.traces["b"]))
    line = r"sample \(b, 3\), input 'key.1': got 7e\+04, allowed: at most 65504 \(float16\)"
    with pytest.raises(record.Blocked, match=line):
        world.write(tmp_path, Sample("a", 0), Sample("b", 3))


def test_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.host.buffers["key.0"] = world.host.buffers["key.0"].astype(np.float64)
    with pytest.raises(record.Blocked, match=r"input 'key.0': got float64 .* allowed: float32"):
        world.write(tmp_path, Sample("a", 1))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    usage = type("Usage", (), {"free": 5000})
    monkeypatch.setattr(calibration.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(record.Blocked, match="MiB of free disk"):
        world.write(tmp_path, Sample("a", 1), Sample("b", 2))
    assert not list(tmp_path.glob("*.npy"))
