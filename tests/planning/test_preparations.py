"""What planning holds an entry of weights.yaml to; the rest, with whole configs: test_sweep.py."""

import pytest
from kvgate.planning import preparations
from kvgate.planning.config import ConfigError


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", []),
        ("fold", []),
        ("scale", ["by"]),
        ("split2", ["group", "only", "skip"]),
        ("mixed", ["group", "megabytes", "megacycles", "share", "signs"]),
    ],
)
def test_options_are_the_hooks_keywords(name, options):
    assert preparations.options(name) == options


def test_an_option_that_it_has_not_is_one_line():
    entry = {"steps": [{"name": "vrot", "options": {}}, {"name": "gptq", "options": {"groups": 32}}], "calibrate": True}
    with pytest.raises(ConfigError) as error:
        preparations.check("mine", entry)
    known = "known: group, only, skip"
    assert str(error.value) == f"weights.mine.steps[1].options: gptq got the unknown option groups, {known}"
