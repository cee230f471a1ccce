"""Causes that lie in the machine: known by the system's words, whoever passes them on."""

import errno
import os
from pathlib import Path

import pytest
from kvgate.jobs import machine
from kvgate.jobs.record import Blocked


def raised(why, cause=None, quiet=False):
    """An error as it is caught, raised while handling `cause`."""
    try:
        try:
            raise cause or KeyError()
        except Exception as error:
            if quiet:
                raise why from None
            raise why from (error if cause else None)
    except Exception as error:
        return error


def written():
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a b/x.npz"), "disk full: /a b/x.npz"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "disk quota used up: {folder}"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "x"), "read-only file system: x"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "limit of a file's size: {folder}"),
        (RuntimeError('Error: IoError(Os { code: 28, message: "No space left on device" })'), "disk full: {folder}"),
        (RuntimeError("DefaultCPUAllocator: Error code 12 (Cannot allocate memory)\nmore"), "out of memory: Runtime"),
        (MemoryError("Unable to allocate 4 GiB"), "out of memory: MemoryError: Unable to allocate 4 GiB"),
    ],
)
def test_a_cause_in_the_machine_is_one_line(tmp_path, error, said):
    said = said.format(folder=tmp_path)
    for found in (raised(error), raised(RuntimeError("cannot be read"), error), raised(Blocked("weights"), error)):
        assert machine.cause(found, tmp_path).startswith(said) and "\n" not in machine.cause(found, tmp_path)


def test_what_the_system_raises_itself(tmp_path):
    with pytest.raises(OSError) as caught:
        written()
    assert machine.cause(caught.value, tmp_path) == f"disk full: {tmp_path}"


@pytest.mark.parametrize(
    "error",
    [
        raised(ValueError("a shape")),
        raised(FileNotFoundError(2, "No such file or directory", "x")),
        raised(Blocked("the board refuses: No space left on device")),  # its disk, not this one
        raised(Blocked("lost"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), quiet=True),
    ],
)
def test_other_causes_are_left_alone(tmp_path, error):
    assert machine.cause(error, tmp_path) == ""


def test_whatever_fails_on_a_full_disk_is_its_fault(tmp_path, mounted):
    mounted(tmp_path / "disk", "size=2m")
    assert machine.cause(ValueError("cut"), tmp_path / "disk") == ""
    (tmp_path / "disk/data").write_bytes(bytes(3 << 19))
    assert machine.cause(ValueError("cut"), tmp_path / "disk") == f"disk full: {tmp_path / 'disk'}"
