"""The environment record and the pinned clocks, on trees of files that look like a board's."""

import json
from pathlib import Path

import pytest
from kvgate.board import environment
from rig import GHZ, governors, tree


def test_a_board(tmp_path):
    found = environment.record(tree(tmp_path))
    assert found["board"] == "Rockchip RK3576 EVB1 V10 Board"
    assert found["compatible"] == ["rockchip,rk3576-evb1-v10", "rockchip,rk3576"]
    assert (found["kernel"], found["driver"], found["runtime"]) == ("6.1.75", "0.9.8", "2.3.2")
    assert found["npu"] == {
        "device": "27700000.npu",
        "governor": "rknpu_ondemand",
        "hz": GHZ // 2,
        "min_hz": GHZ // 4,
        "max_hz": GHZ,
    }
    assert found["ddr"]["max_hz"] == 2 * GHZ
    assert found["cpus"]["policy0"]["max_hz"] == 2 * GHZ  # the kernel gives CPUs in kHz
    assert found["temperatures"] == {"soc-thermal": 45.25, "npu-thermal": -1.0}
    assert found["memory"] == {"total_bytes": 8_192_000_000, "available_bytes": 6_144_000_000}
    assert found["clock_state"] == "npu=rknpu_ondemand@1000 ddr=dmc_ondemand@2000 policy0=schedutil@2000"
    assert found["why"].keys() <= {"toolkit_lite", "numpy"}
    assert (environment.available(tmp_path), environment.oom_kills(tmp_path)) == (6_144_000_000, 4)


def test_where_nothing_can_be_read_every_value_has_its_reason(tmp_path):
    found = environment.record(tmp_path)
    for name in ("board", "compatible", "kernel", "runtime", "driver", "npu", "ddr", "cpus", "temperatures"):
        assert found[name] is None and found["why"][name], name
    assert found["memory"] == {"total_bytes": None, "available_bytes": None} and found["why"]["memory"]
    assert found["clock_state"] == "npu=?@? ddr=?@?"
    assert environment.available(tmp_path) is environment.oom_kills(tmp_path) is None


def test_half_of_it_can_be_read(tmp_path):
    root = tree(tmp_path)
    npu = root / "sys/class/devfreq/27700000.npu"
    (npu / "cur_freq").unlink()
    (npu / "max_freq").write_text("fast\n")
    (root / "sys/class/thermal/thermal_zone0/temp").unlink()
    (root / "sys/kernel/debug/rknpu/version").write_text("unknown\n")
    (root / "usr/lib/librknnrt.so").write_text("ELF")
    found = environment.record(root)
    assert found["npu"]["hz"] is None and "cur_freq: No such file" in found["why"]["npu.hz"]
    assert found["npu"]["max_hz"] is None and found["why"]["npu.max_hz"] == "no number in 'fast'"
    assert found["temperatures"]["soc-thermal"] is None and "temp: No such" in found["why"]["temperatures.soc-thermal"]
    assert found["driver"] is None and found["why"]["driver"] == "no version in 'unknown'"
    assert found["runtime"] is None and "has no version in it" in found["why"]["runtime"]
    assert found["clock_state"].startswith("npu=rknpu_ondemand@? ")


def test_a_closed_file_says_more_than_a_missing_one(tmp_path, monkeypatch):
    root = tree(tmp_path)

    def read(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied") if "debug" in str(path) else FileNotFoundError(2, "No such file")

    monkeypatch.setattr(Path, "read_bytes", read)
    assert environment.record(root)["why"]["driver"].endswith("sys/kernel/debug/rknpu/version: Permission denied")


@pytest.mark.parametrize(
    ("runtime", "toolkit", "text"),
    [
        ("2.3.2", "2.5.0", "runtime: got version 2.3.2, toolkit: 2.5.0"),
        ("1.5.2 (abc)", "v2.5.0", "runtime: got version 1.5.2, toolkit: 2.5.0"),
        ("2.5.1", "2.5.0", ""),
        (None, "2.5.0", ""),
        ("2.5.0", "", ""),
    ],
)
def test_versions(runtime, toolkit, text):
    assert environment.versions_differ(runtime, toolkit, "toolkit") == text


def test_pinned_and_given_back(tmp_path):
    root, saved = tree(tmp_path / "root"), tmp_path / "clocks.json"
    before, clocks = governors(root), environment.Clocks(saved, root)
    assert clocks.pin() == []
    assert set(governors(root).values()) == {"performance"} and len(before) == 3
    assert (
        environment.state(root)["clock_state"] == "npu=performance@1000 ddr=performance@2000 policy0=performance@2000"
    )
    assert clocks.restore() == []
    assert governors(root) == before and not saved.exists()
    assert clocks.restore() == []


def test_the_next_agent_gives_back_what_a_killed_one_pinned(tmp_path):
    root, saved = tree(tmp_path / "root"), tmp_path / "clocks.json"
    before = governors(root)
    environment.Clocks(saved, root).pin()
    assert environment.Clocks(saved, root).restore() == []
    assert governors(root) == before


def test_what_someone_else_has_set_since_stays(tmp_path):
    root, saved = tree(tmp_path / "root"), tmp_path / "clocks.json"
    clocks = environment.Clocks(saved, root)
    clocks.pin()
    (root / "sys/class/devfreq/dmc/governor").write_text("powersave\n")
    clocks.restore()
    assert governors(root) == {"27700000.npu": "rknpu_ondemand", "dmc": "powersave", "policy0": "schedutil"}


def test_what_was_pinned_before_is_left_alone(tmp_path):
    root, saved = tree(tmp_path / "root"), tmp_path / "clocks.json"
    for path in [*root.glob("sys/class/devfreq/*/governor"), *root.glob("sys/devices/system/cpu/*/*/*_governor")]:
        path.write_text("performance\n")
    assert environment.Clocks(saved, root).pin() == [] and not saved.exists()


def test_without_permission_each_clock_is_told_and_nothing_else_happens(tmp_path, monkeypatch):
    root, saved = tree(tmp_path / "root"), tmp_path / "clocks.json"
    before, clocks, write = governors(root), environment.Clocks(saved, root), Path.write_text

    def closed(path: Path, text: str, **how: str) -> int:
        if "governor" in path.name:
            raise PermissionError(13, "Permission denied")
        return write(path, text, **how)

    monkeypatch.setattr(Path, "write_text", closed)
    problems = clocks.pin()
    assert len(problems) == 3
    assert all(x.endswith("governor: got Permission denied, wanted 'performance'") for x in problems)
    assert clocks.restore() == [] and governors(root) == before and not saved.exists()


def test_a_governor_that_the_kernel_does_not_take_is_told(tmp_path, monkeypatch):
    root = tree(tmp_path / "root")
    monkeypatch.setattr(Path, "write_text", lambda path, text, **how: 0)
    problems = environment.Clocks(tmp_path / "clocks.json", root).pin()
    assert "got 'rknpu_ondemand', wanted 'performance'" in problems[0]


def test_what_could_not_be_given_back_is_tried_again(tmp_path, monkeypatch):
    root, saved = tree(tmp_path / "root"), tmp_path / "clocks.json"
    before, clocks, write = governors(root), environment.Clocks(saved, root), Path.write_text
    clocks.pin()
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "write_text", lambda path, text, **how: 0 if "dmc" in str(path) else write(path, text, **how)
        )
        assert len(clocks.restore()) == 1
    assert governors(root) == before | {"dmc": "performance"}
    clocks.pin()  # must not take `performance` for what was there
    assert clocks.restore() == [] and governors(root) == before


@pytest.mark.parametrize("text", ["[]", "{", '{"../../x": "y"}', '{"npu": 7, "x": {}}'])
def test_a_changed_file_of_clocks_leads_no_write_elsewhere(tmp_path, text):
    root, saved = tree(tmp_path / "root"), tmp_path / "clocks.json"
    before = governors(root)
    saved.write_text(text)
    environment.Clocks(saved, root).restore()
    assert governors(root) == before


def test_a_machine_without_such_clocks(tmp_path):
    clocks = environment.Clocks(tmp_path / "clocks.json", tmp_path)
    assert clocks.pin() == ["npu: no such clock", "ddr: no such clock"]
    assert clocks.restore() == []


def test_engines_are_found_without_loading_them(tmp_path, monkeypatch):
    import sys

    (tmp_path / "rknnlite").mkdir()  # a double of the vendor's package
    (tmp_path / "rknnlite/__init__.py").write_text("raise RuntimeError('loaded')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = environment.engines(tmp_path)
    assert found["lite"] == {"version": ""} and "rknnlite" not in sys.modules
    assert found["onnxruntime"]["version"] and found["native"]["error"].startswith("no librknnrt.so in /usr/lib,")
    assert environment.engines(tree(tmp_path))["native"] == {"version": "2.3.2"}


def test_the_record_is_json(tmp_path):
    assert json.loads(json.dumps(environment.record(tree(tmp_path))))
