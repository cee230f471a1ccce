"""Facts about the real toolkit that the package rests on. An upgrade that changes one fails here."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvgate.compiler import platforms, toolkit

DTYPES = ("fp16", "w8a8", "w8a16", "w4a16", "w16a16i_dfp")
# The toolkit's process aborts, so each of these needs one of its own.
ABORTS = ("rk2118:w8a8", "rk2118:w16a16i_dfp", "rv1103b:w16a16i_dfp", "rv1106b:w16a16i_dfp")


CASES = ("cube", "counters", "norms", "sessions", "arguments", "groups", "outer")


def probe(folder: Path, *cases: str) -> tuple[int, dict[str, Any]]:
    environment = toolkit.environment(folder)
    here = Path(__file__).parent
    environment["PYTHONPATH"] += os.pathsep + str(here) + os.pathsep + str(here.parent)
    command = [sys.executable, str(here / "probes.py"), *cases]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=280)
    file = folder / "results.json"
    return done.returncode, json.loads(file.read_text()) if file.is_file() else {}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    code, found = probe(tmp_path_factory.mktemp("probes"), *CASES)
    assert code == 0
    return found


@pytest.mark.slow
def test_a_cube_is_transposed_by_default_and_not_by_the_engine(probes: dict[str, Any]) -> None:
    cube = probes["cube"]
    assert cube["default"] > 1 and cube["default_transposed"] < 1e-3
    assert cube["engine"] < 1e-3 and max(cube["double"]) < 1e-3  # the double of the fast tests has the same habits
    assert len(cube["refused"]) == 3 and all("tensor 'k': got float" in x for x in cube["refused"])


@pytest.mark.slow
def test_integer_states_are_exact_and_float_counters_round(probes: dict[str, Any]) -> None:
    assert probes["counters"]["int64"] == [2049, 70002]
    assert probes["counters"]["float"] == [2048, 2002]  # 2048 + 1 is no float16


@pytest.mark.slow
def test_a_norm_of_products_is_all_zeros(probes: dict[str, Any]) -> None:
    assert probes["norms"]["pow"] < 1e-3
    assert probes["norms"]["mul"] > 0.9


@pytest.mark.slow
def test_a_product_over_one_channel_loses_what_is_added_to_it(probes: dict[str, Any]) -> None:
    """Without a warning, in rank 3; in rank 4 inside of a layer only (tests/prepare/test_replaced.py)."""
    lost, apart, right = (probes["outer"][name] for name in ("MatMul 3", "MatMul 4", "Mul 3"))
    assert lost["product"] < 1e-3 < 0.5 < lost["sum"]
    assert apart["sum"] < 1e-3 and right["sum"] < 1e-3
    assert [x["risks"] for x in (lost, apart, right)] == [1, 1, 0]


@pytest.mark.slow
def test_kept_weights_change_no_bit(probes: dict[str, Any]) -> None:
    assert probes["sessions"] == {"equal": True, "different": 4, "kept": 2}  # one copy a weight, not one a step


@pytest.mark.slow
def test_what_is_on_the_grid_of_groups_stays(probes: dict[str, Any]) -> None:
    found = probes["groups"]
    assert found["matrix"] < 1e-3 and found["convolution"] < 1e-3  # float16 scales
    assert found["convolution_by_rows"] > 0.05


@pytest.mark.slow
def test_the_arguments_of_quants_are_the_toolkits(probes: dict[str, Any]) -> None:
    """Also those that its signature hides in **kwargs; without those that the build stage sets itself."""
    found = {side: set(names) for side, names in probes["arguments"].items()}
    assert set(platforms.CONFIG_ARGUMENTS) == found["config"] - {"target_platform", "custom_string"}
    assert set(platforms.BUILD_ARGUMENTS) == found["build"] - {"do_quantization", "dataset"}


@pytest.mark.slow
def test_the_table_of_platforms_is_the_toolkits(tmp_path: Path) -> None:
    pairs = [f"{p}:{d}" for p in platforms.SUPPORTED for d in DTYPES]
    code, found = probe(tmp_path, *(p for p in pairs if p not in ABORTS))
    assert code == 0
    builds = {p: tuple(d for d in DTYPES if found.get(f"{p}:{d}") == "ok") for p in platforms.SUPPORTED}
    assert builds == {p: tuple(sorted(d, key=DTYPES.index)) for p, d in platforms.SUPPORTED.items()}


@pytest.mark.slow
@pytest.mark.parametrize("pair", ABORTS)
def test_what_would_abort_is_not_supported(pair: str, tmp_path: Path) -> None:
    code, found = probe(tmp_path, pair)
    assert code == -signal.SIGABRT and pair not in found
    chip, dtype = pair.split(":")
    assert dtype not in platforms.supported(chip)


def test_unknown_platform_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"platform: got 'rk9999', known: rk2118, rk3562, .*rv1126b"):
        platforms.supported("rk9999")
    assert "w8a16" not in platforms.supported("rk3576") and "w4a16" not in platforms.supported("rk3588")
    assert (
        platforms.dtype({"mask": -1}) == "fp16" and platforms.dtype({"config": {"quantized_dtype": "w8a8"}}) == "w8a8"
    )
