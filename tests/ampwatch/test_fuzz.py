"""Whatever bytes come: the batch decoder and the spool reader raise InvalidBatch or read, in bounded memory."""

from __future__ import annotations

import json
import os
import tracemalloc

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ampwatch import records, spool
from ampwatch.errors import InvalidBatch

from .spooled import PRODUCER, attempts, events, tensors

QUICK = settings(max_examples=80)
VALID = [records.to_bytes(batch) for batch in (events(0, "skip"), attempts(1, loss=[1.0, 2.0]), tensors(2))]

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
column = st.tuples(
    st.sampled_from(["<i8", "|u1", "<f8", "O", "<U9", ""]) | st.text(),
    st.integers(-(2**63), 2**63),
    st.binary(),
)
names = st.sampled_from([*records.ATTEMPT_COLUMNS, *records.TENSOR_COLUMNS, "log.x"]) | st.text(max_size=8)
event = st.fixed_dictionaries(
    {"type": st.sampled_from(sorted(records.EVENT_TYPES)), "time": st.floats()},
    optional=dict.fromkeys(("attempt", "step", "stream", "repeat", "data"), plain),
)


@st.composite
def damaged(draw):
    """A valid batch with bytes changed, taken out, put in and cut off."""
    data = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=5))
        data = data or bytearray(b"\0")
    return bytes(data[: draw(st.integers(0, len(data)))])


@st.composite
def sealed(draw):
    """A batch with a true digest and a body that means harm."""
    kind = draw(st.sampled_from(records.KINDS))
    columns = st.dictionaries(names, column | plain, max_size=6)
    body = msgspec.msgpack.encode(draw(columns | st.lists(event | plain, max_size=4) | plain))
    body = draw(st.sampled_from([body, *(records.from_bytes(data).body for data in VALID)]))
    return records.Batch(1, PRODUCER, draw(st.integers(0, 9)), "r", 0, kind, records.digest_of(body), body)


def read(decode, data):
    """Decode all of it, in memory that the size of the input bounds; False where it is refused."""
    tracemalloc.start()
    try:
        records.check(decode(data))
        return True
    except InvalidBatch:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 200 * len(data) + (1 << 20)


@QUICK
@given(data=st.binary(max_size=300) | damaged())
@example(data=b"\xdd\xff\xff\xff\xff")  # arrays, maps and bytes of 4 GiB that do not follow
@example(data=b"\xdf\xff\xff\xff\xff\xa7version\x01")
@example(data=b"\x81\xa4body\xc6\xff\xff\xff\xff")
@example(data=b"\x91" * 100_000)
@example(data=b"\x81\xa7version" * 10_000)
def test_no_bytes_bring_the_decoder_down(data):
    if data not in VALID:
        assert not read(records.from_bytes, data)


@QUICK
@given(data=st.binary(max_size=300) | st.lists(st.binary(max_size=9) | plain).map(msgspec.msgpack.encode))
@example(data=b"\xdd\xff\xff\xff\xff")  # 4 billion batches that do not follow; more than may come, which do
@example(data=b"\xdc\x01\x01" + b"\xc4\x00" * 257)
@example(data=b"\xdc\xff\xff" + b"\xc4\x00" * 65_535)
@example(data=b"\x91\xc6\xff\xff\xff\xff")
@example(data=b"\x91" * 100_000)
def test_no_bytes_bring_the_decoder_of_several_down(data):
    def all_of_it(data):
        for each in records.split(data):
            records.check(records.from_bytes(each))
        raise InvalidBatch("body", "none of these is a batch")

    assert not read(all_of_it, data)


@QUICK
@given(batch=sealed())
def test_no_body_brings_the_decoder_down(batch):
    read(records.from_bytes, records.to_bytes(batch))


@QUICK
@given(
    given=st.fixed_dictionaries(
        {
            "producer": st.just(PRODUCER),
            "seq": st.integers(0, 9),
            "run": st.just("r"),
            "kind": st.sampled_from(records.KINDS),
        },
        optional={
            "columns": st.dictionaries(names, st.lists(plain, max_size=3)),
            "events": st.lists(event | plain, max_size=3),
        },
    )
)
def test_no_json_brings_the_decoder_down(given):
    read(records.from_json, json.dumps(given, default=str).encode())


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"a":' * 100_000, b'{"version":1,"events":[' + b"[" * 9_999]
)
def test_deep_json_is_refused(data):
    assert not read(records.from_json, data)


@QUICK
@given(
    files=st.dictionaries(
        st.sampled_from(
            ["events-000000.awb", "attempts-000001.awb", "tensors-999999.awb", "events-0.awb", "x.awb"]
        ),
        st.lists(
            st.binary(max_size=40)
            | st.sampled_from(VALID).map(lambda d: framed(d))
            | damaged().map(lambda d: framed(d))
        ),
    ),
    cursor=st.dictionaries(st.just(f"r/{PRODUCER}/events-000000.awb"), st.integers()),
)
def test_no_folder_brings_the_reader_down(tmp_path_factory, files, cursor):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "r" / PRODUCER).mkdir(parents=True)
    for name, parts in files.items():
        (folder / "r" / PRODUCER / name).write_bytes(b"".join(parts))
    most = sum(map(len, files.values()))
    for tail in (spool.Tail(folder), spool.Tail(folder, cursor)):
        found, calls = 0, 0
        while (got := drained(tail)) is not None:
            found, calls = found + got, calls + 1
            assert calls <= most + 1  # each call that raises stands behind what it raised for
        assert found <= most


def framed(data):
    """A record of these bytes, with a true checksum."""
    return spool._HEADER.pack(len(data), spool.zlib.crc32(data)) + data


def drained(tail):
    """How many batches a reading gave before it raised; None where it did not and gave none."""
    found = 0
    try:
        for _ in tail.read():
            found += 1
    except InvalidBatch:
        return found
    return found or None


def test_a_length_that_lies_asks_for_no_memory(tmp_path):
    path = tmp_path / "r" / PRODUCER / "events-000000.awb"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xff\xff\x7f\0\0\0\0" + bytes(1000))
    tracemalloc.start()
    assert list(spool.Tail(tmp_path).read()) == []
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_folder_or_a_pipe_in_the_place_of_a_segment_is_passed_over(tmp_path):
    folder = tmp_path / "r" / PRODUCER
    (folder / "events-000000.awb").mkdir(parents=True)
    os.mkfifo(folder / "attempts-000000.awb")
    (folder / "tensors-000000.awb").write_bytes(spool.frame(tensors(0)))
    assert list(spool.read(tmp_path)) == [tensors(0)]
