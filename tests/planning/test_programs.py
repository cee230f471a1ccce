"""The programs of config/ keep what the sweep relies on."""

import itertools
from pathlib import Path

import pytest
import yaml
from kvgate.planning import programs, progress
from kvgate.planning.config import override
from kvgate.planning.plan import Plan

ROOT = Path(__file__).parents[2]
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


def unreached(path):
    planned = Plan(ROOT, override([ROOT / path] if path else [], ""))
    return programs.unreached(planned.config, (row.strategy for row in planned.rows))


@pytest.mark.parametrize(
    "path", ["", "config/demo.yaml", "config/quality.yaml", "config/wide.yaml", "tests/workflow/tiny.yaml"]
)
def test_every_shipped_sweep_fills_each_rows_own_cache(path):
    assert unreached(path) == []


def test_a_cache_that_no_forced_text_fills_is_known_while_planning(tmp_path):
    (line,) = unreached("config/bench.yaml")  # compares costs; 1,024 forced steps a row are none of its business
    assert line.startswith("  no forced text of 1024 tokens: rows of hf_export_1024, legacy_export_1024, ")
    tiny = yaml.safe_load((ROOT / "tests/workflow/tiny.yaml").read_text())
    for histories, tokens, known in ((["isolated"], 32, 1), (["isolated", "forced"], 31, 1), (["forced"], 32, 0)):
        entry = {"kind": "text", "text": "tests/texts/fill.txt", "tokens": tokens, "histories": histories}
        tiny["programs"]["own"] = entry
        tiny["programs"]["tiny_fill"]["histories"] = ["isolated"]
        tiny["sweep"]["programs"] = ["tiny_chat", "tiny_fill", "own"]
        planned = Plan(ROOT, tiny)
        said = progress.begin(planned, {}, tmp_path, write=False)[1:]
        rows = "rows of tiny_cpu_managed, tiny_blend may not pass, their cache is not filled"
        assert said == [f"  no forced text of 32 tokens: {rows}"] * known
