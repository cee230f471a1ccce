"""Bodies in chunks and of known length, whole, broken and too large."""

import io
from email.message import Message

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgate.serving.bodies import LIMIT, Gone, read, size
from kvgate.serving.fields import Bad


def headers(*pairs):
    made = Message()
    for name, value in pairs:
        made[name] = value
    return made


def test_sizes():
    assert size(headers(("Content-Length", "12"))) == 12
    assert size(headers(("Transfer-Encoding", " Chunked "))) is None


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ([], 411),
        ([("Content-Length", "-1")], 411),
        ([("Content-Length", "1e3")], 411),
        ([("Content-Length", "\u0663")], 411),
        ([("Content-Length", "5"), ("Content-Length", "6")], 411),
        ([("Content-Length", str(LIMIT + 1))], 413),
        ([("Content-Length", "9" * 5000)], 413),
        ([("Transfer-Encoding", "chunked"), ("Content-Length", "5")], 400),
        ([("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "chunked")], 400),
        ([("Transfer-Encoding", "gzip, chunked")], 400),
        ([("Transfer-Encoding", "identity")], 400),
    ],
)
def test_sizes_that_are_refused(pairs, status):
    with pytest.raises(Bad, match="allowed") as caught:
        size(headers(*pairs))
    assert caught.value.status == status and len(caught.value.text) < 200


@settings(max_examples=60)
@given(st.lists(st.binary(min_size=1, max_size=40)), st.sampled_from([b"", b";name=value", b" "]), st.booleans())
def test_any_chunks_are_the_body_and_what_follows_stays(parts, extension, upper):
    form = b"%X%s\r\n%s\r\n" if upper else b"%x%s\r\n%s\r\n"
    data = b"".join(form % (len(x), extension, x) for x in parts) + b"0\r\nTrailer: x\r\n\r\nnext"
    file = io.BytesIO(data)
    assert read(file, None) == b"".join(parts) and file.read() == b"next"
    for cut in range(0, len(data) - len(b"next"), 7):
        with pytest.raises(Gone):
            read(io.BytesIO(data[:cut]), None)


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b"x\r\n", 400, "hexadecimal"),
        (b"-1\r\n\r\n", 400, "hexadecimal"),
        (b"0x2\r\nab\r\n", 400, "hexadecimal"),
        (b"\r\n", 400, "hexadecimal"),
        (b"2\r\nabc\r\n", 400, "goes on"),
        (b"1;" + b"x" * 300 + b"\r\n", 400, "longer line"),
        (b"0\r\n" + b"a: b\r\n" * 20, 400, "trailers"),
        (b"100001\r\n", 413, "1048576"),
        (b"f" * 100 + b"\r\n", 413, "1048576"),
        ((b"80000\r\n" + b"x" * 0x80000 + b"\r\n") * 2 + b"1\r\n", 413, "1048576"),
    ],
)
def test_chunks_that_are_refused(data, status, said):
    with pytest.raises(Bad, match=said) as caught:
        read(io.BytesIO(data), None)
    assert caught.value.status == status


def test_exactly_the_limit_is_taken():
    data = (b"80000\r\n" + b"x" * 0x80000 + b"\r\n") * 2 + b"0\r\n\r\n"
    assert len(read(io.BytesIO(data), None)) == LIMIT


def test_a_client_that_ends_early_is_gone():
    with pytest.raises(Gone):
        read(io.BytesIO(b"abc"), 4)
    assert read(io.BytesIO(b"abcd"), 4) == b"abcd"
