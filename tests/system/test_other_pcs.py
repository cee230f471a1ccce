"""Other PCs than this one: every result before int8 artifacts is the same on CPUs that qemu-user emulates.

Two vendors, both with AVX2 and without AVX-512. What emulation cannot show is AVX-512 where this machine has none.
"""

import shutil
import sys
from pathlib import Path

import pytest
from system import pc

pytestmark = pytest.mark.system

CPUS = ("Haswell", "EPYC-Rome")


@pytest.fixture(scope="module")
def pcs(tmp_path_factory) -> dict[str, dict[str, str]]:
    if shutil.which(pc.QEMU) is None:
        pytest.skip(f"no {pc.QEMU}")
    root = tmp_path_factory.mktemp("pcs")
    found = {"here": pc.made(Path(sys.executable), root / "here", compile=True)}
    pythons = {cpu: pc.emulated(root / f"venv-{cpu}", cpu) for cpu in CPUS}
    return found | {cpu: pc.made(pythons[cpu], root / cpu, compile=True) for cpu in CPUS}


@pytest.mark.parametrize("cpu", CPUS)
def test_another_pc_makes_the_same(pcs, cpu):
    here, there = (dict(pcs[name]) for name in ("here", cpu))
    assert here.pop("float32") and there.pop("float32")
    assert here.pop("w8a8") and there.pop("w8a8")
    assert there == here and len(here) > 20


def test_emulated_pcs_make_the_same_artifact(pcs):
    """This machine's is not held to it: with AVX-512 ONNX Runtime's calibration gives a scale another last digit."""
    (made,) = {pcs[cpu]["w8a8"] for cpu in CPUS}
    assert not made.startswith("not comparable")


def test_the_emulated_pcs_are_others(pcs):
    """In float32 they differ: else the digests above would prove nothing."""
    assert len({pcs[cpu]["float32"] for cpu in CPUS}) == 2
