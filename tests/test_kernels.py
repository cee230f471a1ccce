"""Torch's and numpy's kernels of another PC, as far as they can be chosen here: every result is the same.

tests/system/test_other_pcs.py does so with CPUs that are emulated.
"""

import sys
from pathlib import Path

from system import pc

OTHERS = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL",
}


def test_other_kernels_make_the_same(tmp_path):
    here = pc.made(Path(sys.executable), tmp_path / "here")
    there = pc.made(Path(sys.executable), tmp_path / "there", **OTHERS)
    assert here.pop("float32") != there.pop("float32")  # they are others
    assert there == here and len(here) > 20
