"""Frames: what is sent arrives, and nothing else is taken for a frame."""

import io
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvgate.board import wire

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
HEADS = st.builds(lambda rest, kind: {**rest, "type": kind}, st.dictionaries(st.text(), VALUES, max_size=4), st.text())
FRAMES = st.lists(st.tuples(HEADS, st.binary(max_size=300)), min_size=1, max_size=4)


def written(frames: list[tuple[dict, bytes]]) -> bytes:
    stream = io.BytesIO()
    for head, blob in frames:
        wire.send(stream, head, blob)
    return stream.getvalue()


def frame(head: bytes, blob: bytes = b"", magic: bytes = wire.MAGIC) -> bytes:
    return struct.pack(">4sII", magic, len(head), len(blob)) + head + blob


@given(FRAMES)
def test_what_is_sent_arrives(frames):
    stream = io.BytesIO(written(frames))
    assert [wire.receive(stream) for _ in frames] == frames
    with pytest.raises(wire.Closed, match=r"^ended$"):
        wire.receive(stream)


@given(FRAMES, st.data())
def test_a_cut_anywhere_is_a_closed_channel(frames, data):
    whole = written(frames)
    stream = io.BytesIO(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(wire.Closed):
        for _ in frames:
            wire.receive(stream)


@given(st.binary(max_size=200))
def test_garbage_is_no_frame(data):
    with pytest.raises((wire.Garbled, wire.Closed)):
        stream = io.BytesIO(data)
        while True:
            wire.receive(stream)


@given(HEADS, st.binary(max_size=50), st.data())
def test_a_changed_byte_never_raises_anything_else(head, blob, data):
    whole = bytearray(written([(head, blob)]))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found, _ = wire.receive(io.BytesIO(bytes(whole)))
        assert isinstance(found["type"], str)
    except (wire.Garbled, wire.Closed):
        pass


@pytest.mark.parametrize(
    "data",
    [
        frame(b"[]"),
        frame(b"{}"),
        frame(b'{"type":1}'),
        frame(b"\xff\xfe"),
        frame(b"[" * 100_000),
        frame(b'{"type":"x"}', magic=b"KVG2"),
        b"bash: python3: command not found\n",
    ],
    ids=["list", "no type", "number", "bytes", "deep", "magic", "shell"],
)
def test_what_is_no_frame(data):
    with pytest.raises(wire.Garbled, match="allowed"):
        wire.receive(io.BytesIO(data))


@pytest.mark.parametrize("sizes", [(1 << 31, 0), (2, 1 << 31)])
def test_sizes_are_limited_before_anything_is_read(sizes):
    class Stream(io.BytesIO):
        asked = 0

        def read(self, size: int | None = -1) -> bytes:
            self.asked += size or 0
            return super().read(size)

    stream = Stream(struct.pack(">4sII", wire.MAGIC, *sizes) + b"{}")
    with pytest.raises(wire.Garbled):
        wire.receive(stream)
    assert stream.asked == 12


def test_what_no_one_would_take_is_not_sent():
    stream = io.BytesIO()
    with pytest.raises(ValueError, match="frame: got 4194"):
        wire.send(stream, {"type": "x", "text": "y" * (1 << 22)})
    assert not stream.getvalue()


def test_nobody_reads():
    inlet, outlet = os.pipe()
    os.close(inlet)
    with os.fdopen(outlet, "wb", buffering=0) as stream, pytest.raises(wire.Closed):
        wire.send(stream, {"type": "x"})  # type: ignore[arg-type]
