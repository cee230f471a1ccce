"""What planning reads of modules is what they have when they are imported."""

from importlib import import_module

import pytest
from kvgate.planning import sweep
from kvgate.planning.module_facts import constants

MODULES = [(folder, name) for folder in ("weights", "sources", "judging/measures") for name in sweep.modules(folder)]
READ = {"FAMILIES", "DTYPES", "STATISTICS", "MOVES", "DISABLE", "HYBRID", "REQUIRED", "OPTIONAL", "LOCAL", "THRESHOLDS"}


@pytest.mark.parametrize(("folder", "name"), MODULES)
def test_the_constants_are_the_modules(folder, name):
    module, found = import_module(f"kvgate.{folder}.{name}".replace("/", ".")), constants(folder, name)
    assert {key: getattr(module, key) for key in found} == found
    assert found.keys() & READ == vars(module).keys() & READ


def test_all_modules_together_have_every_constant():
    assert {key for folder, name in MODULES for key in constants(folder, name)} >= READ
