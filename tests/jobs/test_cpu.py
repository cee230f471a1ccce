import pytest
from kvgate.jobs import cpu

V2 = "fpu cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512bw avx512cd avx512dq avx512f avx512vl"


@pytest.mark.parametrize(
    ("flags", "level"),
    [("fpu", "x86-64"), (V2, "x86-64-v2"), (V3, "x86-64-v3"), (V4, "x86-64-v4"), (V4.replace(" fma", ""), "x86-64-v2")],
)
def test_vendor_and_level(tmp_path, flags, level):
    info = tmp_path / "cpuinfo"
    info.write_text(
        f"processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: {flags}\n\nprocessor\t: 1\nvendor_id\t: X\n"
    )
    assert cpu.label(info) == f"AuthenticAMD {level}"
    assert cpu.flags(info) == set(flags.split())


def test_where_the_kernel_does_not_tell(tmp_path):
    assert cpu.label(tmp_path / "none") == "unknown" and cpu.flags(tmp_path / "none") == set()
    (tmp_path / "cpuinfo").write_text("Processor\t: ARMv8\n")
    assert cpu.label(tmp_path / "cpuinfo") == "unknown"
