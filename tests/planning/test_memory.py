"""What a stage of a model takes: it follows the model, and the piece where there are pieces."""

import pytest
from kvgate.jobs import machine, record
from kvgate.planning import memory

WILDCARDS = {"model": "m", "program": "p", "weights": "w", "strategy": "s", "part": "decode"}
STEPS = {"plain": [], "krot": ["krot"], "fold": ["fold"], "gptq": ["gptq"], "mixed": ["rotate", "mixed"]}
QWEN2 = {"parameters": 1_777_000_000, "vocabulary": 151_936, "hidden": 1536, "tied": False}
SMALL = {"parameters": 134_515_008, "vocabulary": 49_152, "hidden": 576, "tied": True}
LIMIT = 20_000 / 1.048576  # MiB of 20 GB


def config(layers=0, weights="plain", form="recipe", build_mb=6000):
    return {
        "models": {"m": {"build_mb": build_mb}},
        "programs": {"p": {"tokens": 96}},
        "weights": {"w": {"steps": [{"name": x} for x in STEPS[weights]]}},
        "strategies": {"s": {"layers": layers, "form": form}},
        "sweep": {"programs": ["p"], "blocks": [{"models": ["m", "never"]}]},
    }


@pytest.fixture
def put(tmp_path):
    def write(facts, layers=28, status="ok"):
        states = {f"layers.{n}.{kind}": [2, 128] for n in range(layers) for kind in ("key", "value")}
        path = tmp_path / "models" / "m" / "checkpoint" / "manifest.json"
        record.write(path, {"status": status, "states": states, **facts})
        return lambda stage, **more: memory.needed(stage, WILDCARDS, config(**more), tmp_path)

    return write


def test_a_model_of_one_and_a_half_billion_fits_20_gb_in_pieces_and_not_whole(put):
    needed = put(QWEN2)
    for stage in ("trace", "prepare", "export", "verify", "tabulate"):
        assert needed(stage) < LIMIT, stage
    assert needed("check", layers=1) < LIMIT and needed("check", layers="auto") < LIMIT
    assert needed("check") > LIMIT and needed("prepare", weights="gptq") > LIMIT


def test_a_small_model_takes_what_was_measured(put):
    """Peaks of SmolLM2-135M in MB, before weights stayed in their files; a search took 10,300."""
    needed = put(SMALL, layers=30)
    most = {"fetch": 2500, "trace": 2600, "prepare": 3800, "export": 1600, "check": 2600}
    for stage, peak in most.items():
        assert peak / 2 < needed(stage) <= peak, stage
    assert needed("check", layers="auto", build_mb=9500) <= needed("check")
    assert needed("prepare", weights="mixed") > 8000 and needed("prepare", weights="krot") == needed("prepare")
    assert needed("prepare", weights="plain") < needed("prepare", weights="fold") < needed("prepare", weights="gptq")


def test_a_prefill_part_is_checked_whole_beside_the_decode_part(put, tmp_path):
    needed = put(QWEN2)
    prefill = memory.needed("check", WILDCARDS | {"part": "prefill"}, config(layers=1), tmp_path)
    assert needed("check", layers=1) < prefill < needed("check")


def test_before_the_fetch_nobody_knows(tmp_path):
    assert memory.needed("fetch", WILDCARDS, config(), tmp_path) == memory.UNKNOWN
    with pytest.raises(FileNotFoundError):
        memory.needed("check", WILDCARDS, config(), tmp_path)
    assert memory.needed("tabulate", {"sweep": "s"}, config(), tmp_path) > memory.UNKNOWN


def test_behind_a_blocked_fetch_there_is_nothing_to_do(put):
    needed = put({}, status="blocked")
    assert needed("check") < 1000 and needed("fetch") == memory.UNKNOWN


def test_a_model_that_changed_is_read_again(put):
    small = put(SMALL)("trace")
    assert put(QWEN2)("trace") > 2 * small


def test_what_is_too_large_is_said_in_one_line():
    assert machine.room(23_000, 16_000) == "memory: needs about 23000 MB, this machine has 16000"
    assert machine.room(16_000, 16_000) == machine.room(23_000, 0) == ""
