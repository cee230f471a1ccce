"""What planning reads of the modules of weight preparations, without importing them."""

from importlib import import_module

import pytest
from kvgate import preparations, sweep
from kvgate.config import ConfigError

MODULES = sweep.modules("weights")


@pytest.mark.parametrize("name", MODULES)
def test_the_constants_are_the_modules(name):
    module = import_module(f"kvgate.weights.{name}")
    wanted = {key: value for key, value in vars(module).items() if key.isupper() and not key.startswith("_")}
    assert preparations.constants(name) == wanted


def test_all_modules_together_have_every_constant():
    found = {key for name in MODULES for key in preparations.constants(name)}
    assert found >= {"FAMILIES", "DTYPES", "STATISTICS", "MOVES", "DISABLE", "HYBRID"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", []),
        ("fold", []),
        ("scale", ["by"]),
        ("split2", ["group", "only", "skip"]),
        ("mixed", ["group", "megabytes", "megacycles"]),
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
