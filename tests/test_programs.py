"""The programs of config/ keep what the sweep relies on."""

import itertools
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROGRAMS = yaml.safe_load((ROOT / "config/programs.yaml").read_text())
KINDS = {"chat": {"isolated", "forced", "free"}, "text": {"isolated", "forced"}, "calibration": set()}


def text(name):
    return (ROOT / PROGRAMS[name]["text"]).read_text()


def words(name):
    return text(name).split()


def given(name):
    """Tokens that the text itself must have."""
    return PROGRAMS[name]["tokens"] - PROGRAMS[name].get("generated", 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_entry_is_whole(name):
    entry = PROGRAMS[name]
    keys = {"generated"} & set(entry) if entry["kind"] == "calibration" else {"histories"}
    assert set(entry) == {"kind", "text", "tokens"} | keys
    assert set(entry.get("histories", [])) <= KINDS[entry["kind"]]
    # English prose has about 1.2 tokens a word here: a text that is short of words is short of tokens.
    assert entry["kind"] == "chat" or len(words(name)) >= 0.8 * given(name)


def test_no_text_shares_a_sentence_with_another():
    """A calibration that had seen what is verified would flatter the row."""
    by_file = {PROGRAMS[name]["text"]: text(name) for name in PROGRAMS}
    for (one, a), (two, b) in itertools.combinations(by_file.items(), 2):
        shared = _sentences(a) & _sentences(b)
        assert not shared, f"{one} and {two} share {shared}"
    assert _sentences("One two. Three four.") & _sentences("Three four. Five.")


def _sentences(prose):
    return {x.strip() for x in prose.replace("\n", " ").split(".") if x.strip()}


def test_every_text_is_used_and_eight_calibrate():
    files = {f"config/texts/{path.name}" for path in (ROOT / "config/texts").iterdir()}
    assert files == {entry["text"] for entry in PROGRAMS.values()}
    assert sum(name.startswith("calibration_") for name in PROGRAMS) == 8


def test_the_quality_sweep_calibrates_with_states_of_the_model_s_own_making():
    quality = yaml.safe_load((ROOT / "config/quality.yaml").read_text())
    drawn = {name for name, entry in PROGRAMS.items() if entry.get("generated")}
    assert len(drawn) == 3 and drawn <= set(quality["calibration"]["texts"])
    assert all(given(name) < 128 / 4 for name in drawn)  # most of a cache of 128 is drawn
