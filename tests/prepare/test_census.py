"""tests/FAMILIES.md is what the families give: a sample in every run of the tests, all of it in the slow ones."""

from pathlib import Path

import census
import families
import pytest

# A recipe, the plain form with its reason, an own window, repeated heads, alibi, positions added inside, refusals.
SAMPLE = ("llama", "gpt_neo", "falcon_alibi", "mpt", "ctrl", "hunyuan_v1_dense", "mixtral", "bart")
# What held when the table was first made by hand (and more, which nobody had listed).
HELD = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "opt", "gpt_neox"),
    *("falcon", "bloom", "starcoder2", "granite", "olmo2", "olmo3", "cohere", "cohere2", "glm", "glm4", "nemotron"),
    *("stablelm", "smollm3", "ministral", "exaone4", "ernie4_5", "seed_oss", "arcee", "helium", "jais2", "gpt_bigcode"),
    *("codegen", "gptj", "persimmon", "biogpt", "vaultgemma", "internlm3", "nanochat"),
    *("apertus", "xglm", "gpt_neo", "ctrl", "mpt", "falcon_alibi", "hunyuan_v1_dense"),
)


def written() -> dict[str, str]:
    """The page's rows by family."""
    lines = [x for x in census.PAGE.read_text().splitlines() if x.startswith("| ")][1:]
    return {line.split(" | ")[0][2:]: line for line in lines}


@pytest.mark.parametrize("family", SAMPLE)
def test_the_page_is_what_a_family_gives(tmp_path: Path, family: str) -> None:
    assert census.judge(family, tmp_path).text() == written()[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(census.kinds()) - set(SAMPLE)))
def test_the_whole_page_is_what_the_families_give(tmp_path: Path, family: str) -> None:
    assert census.judge(family, tmp_path).text() == written()[family]


def test_the_page_has_every_family() -> None:
    assert list(written()) == census.kinds()
    assert set(families.FAMILIES) <= set(written())


def test_what_held_holds() -> None:
    works = {name for name, row in written().items() if f" | {census.WORKS} | " in row}
    assert [name for name in HELD if name not in works] == []
    assert len(works) >= 46
    assert f": {len(works)} of {len(written())} families " in census.PAGE.read_text()


def test_every_row_without_a_recipe_says_why() -> None:
    for row in written().values():
        family, form, equal, reason = (x.strip() for x in row.split("|")[1:-1])
        assert reason or (form, equal) == ("recipe", census.WORKS), family


def test_a_family_that_is_not_equal_would_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another token of `generate` than the graph's is no `yes`, and neither are other logits."""
    right = census._generated
    monkeypatch.setattr(census, "_generated", lambda folder: [*right(folder)[:-1], 3])
    assert "| not tokens |" in census.judge("llama", tmp_path).text()
