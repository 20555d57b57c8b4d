import contextlib
import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwatch import records
from ampwatch.errors import InvalidBatch, UnsupportedVersion
from ampwatch.records import Event

PRODUCER = "0123456789abcdef" * 2
KEY = {"producer": PRODUCER, "seq": 3, "run": "run-1", "rank": 2}
ATTEMPTS = {"attempt": [0, 1], "scale": [65536.0, 32768.0]}


def attempts(**columns):
    return records.pack_table("attempts", ATTEMPTS | columns, **KEY)


def resealed(batch, **changes):
    """The bytes of a batch with fields changed behind its back."""
    fields = {name: getattr(batch, name) for name in batch.__struct_fields__} | changes
    return msgspec.msgpack.encode(fields)


def json_batch(**changes):
    given = {"producer": PRODUCER, "seq": 0, "run": "r", "kind": "attempts", "columns": ATTEMPTS}
    return json.dumps(given | changes).encode()


def test_events_come_back_as_they_were():
    events = [
        Event("skip", 12.5, attempt=7, step=6, stream=1, repeat=3, data={"loss": 1.5, "tensors": [1, 2]}),
        Event("heartbeat", 13.0),
    ]
    batch = records.from_bytes(records.to_bytes(records.pack_events(events, **KEY)))
    assert batch.events() == events
    assert (batch.producer, batch.seq, batch.run, batch.rank) == (PRODUCER, 3, "run-1", 2)


def test_a_table_comes_back_with_its_dtypes():
    table = records.from_bytes(records.to_bytes(attempts(found_inf=[0, 1], **{"log.reward": [1, 2]}))).table()
    assert {name: (c.dtype.str, c.tolist()) for name, c in table.items()} == {
        "attempt": ("<i8", [0, 1]),
        "scale": ("<f8", [65536.0, 32768.0]),
        "found_inf": ("|u1", [0, 1]),
        "log.reward": ("<f8", [1.0, 2.0]),
    }


def test_a_histogram_keeps_its_bins():
    hist = np.arange(128).reshape(2, 64)
    columns = {"attempt": [0, 0], "tensor": [0, 1], "scale": [1.0, 1.0], "numel": [5, 6], "hist": hist}
    table = records.pack_table("tensors", columns, **KEY).table()
    assert table["hist"].tolist() == hist.tolist()


def test_nan_infinities_and_missing_are_told_apart():
    values = [math.nan, math.inf, -math.inf, records.MISSING, 1.0]
    batch = records.pack_table("attempts", {"attempt": range(5), "scale": [1.0] * 5, "loss": values}, **KEY)
    loss = records.from_bytes(records.to_bytes(batch)).table()["loss"]
    assert records.is_missing(loss).tolist() == [False, False, False, True, False]
    assert records.to_json_list(loss) == ["NaN", "Infinity", "-Infinity", None, 1.0]


def test_json_carries_the_same_table_as_msgpack():
    columns = ATTEMPTS | {"loss": ["NaN", None], "log.x": ["Infinity", "-Infinity"]}
    table = records.from_json(json_batch(columns=columns)).table()
    assert {name: records.to_json_list(column) for name, column in table.items()} == columns


def test_json_carries_events():
    sent = {"type": "growth", "time": 1.0, "attempt": 4, "data": {"scale": 1.0, "scale_after": 2.0}}
    batch = records.from_json(json_batch(kind="events", columns={}, events=[sent]))
    assert batch.events() == [Event("growth", 1.0, attempt=4, data={"scale": 1.0, "scale_after": 2.0})]


def test_missing_and_nested_lists_in_json():
    assert records.missing(2).view(np.uint64).tolist() == [0x7FF80000000007A2] * 2
    assert records.to_json_list([[1.0, math.nan], [2.0, 3.0]]) == [[1.0, "NaN"], [2.0, 3.0]]
    assert records.to_json_list([1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"producer": "X" * 32}, "producer"),
        ({"run": "../etc"}, "run"),
        ({"run": ""}, "run"),
        ({"seq": -1}, "seq"),
        ({"rank": -1}, "rank"),
        ({"rank": 2**31}, "rank"),
        ({"digest": "0" * 32}, "digest"),
        ({"body": b"other"}, "digest"),
        ({"kind": "spans"}, "kind"),
        ({"seq": "one"}, "seq"),
    ],
)
def test_a_header_that_cannot_be_read_names_its_field(changes, field):
    with pytest.raises(InvalidBatch) as caught:
        records.from_bytes(resealed(attempts(), **changes))
    assert caught.value.field == field


def test_another_version_says_what_to_do():
    with pytest.raises(UnsupportedVersion, match="version: got 99, this ampwatch reads 1: upgrade"):
        records.from_bytes(resealed(attempts(), version=99))
    with pytest.raises(UnsupportedVersion):
        records.from_bytes(msgspec.msgpack.encode({"version": 99, "what": "else"}))
    with pytest.raises(UnsupportedVersion):
        records.from_json(json_batch(version=2))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"[]", b"\x93\x01\x02\x03", b"\xff" * 40])
def test_bytes_that_are_no_batch_blame_the_body(data):
    with pytest.raises(InvalidBatch) as caught:
        records.from_bytes(data)
    assert caught.value.field == "body"


@pytest.mark.parametrize(
    ("columns", "field", "reason"),
    [
        ({"scale": ("<f8", 1, b"")}, "columns.attempt", "it is required in attempts"),
        ({"attempt": ("<i8", 1, b""), "scale": ("<f4", 1, b"")}, "columns.scale", "got dtype '<f4'"),
        ({"attempt": ("<i8", 1, b""), "scale": ("<f8", 2, b"")}, "columns.scale", "got width 2"),
        ({"attempt": ("<i8", 1, b"1234567"), "scale": ("<f8", 1, b"")}, "columns.attempt", "not whole rows"),
        ({"attempt": ("<i8", 1, bytes(8)), "scale": ("<f8", 1, b"")}, "columns.scale", "`attempt` has 1"),
        (
            {"attempt": ("<i8", 1, b""), "scale": ("<f8", 1, b""), "mood": ("<f8", 1, b"")},
            "columns.mood",
            "no such",
        ),
        ({f"log.{i}": ("<f8", 1, b"") for i in range(300)}, "columns", "got 300, at most 256"),
        ([1], "columns", "Expected `object`"),
    ],
)
def test_a_table_that_cannot_be_read_names_its_column(columns, field, reason):
    body = msgspec.msgpack.encode(columns)
    batch = records.from_bytes(resealed(attempts(), body=body, digest=records.digest_of(body)))
    with pytest.raises(InvalidBatch, match=reason) as caught:
        records.check(batch)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("events", "field"),
    [
        ([{"type": "party", "time": 0.0}], "events[0].type"),
        ([{"type": "skip", "time": 0.0}, {"type": "skip"}], "events[1]"),
        ([{"type": "skip", "time": "noon"}], "events[0].time"),
        ("no list", "events"),
    ],
)
def test_events_that_cannot_be_read_name_their_place(events, field):
    body = msgspec.msgpack.encode(events)
    header = {"kind": "events", "body": body, "digest": records.digest_of(body)}
    with pytest.raises(InvalidBatch) as caught:
        records.check(records.from_bytes(resealed(attempts(), **header)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"colour": 1}, "body"),
        ({"columns": {"attempt": ["x"], "scale": [1]}}, "columns.attempt"),
        ({"columns": {"attempt": [None], "scale": [1]}}, "columns.attempt"),
        ({"columns": {"attempt": [2**70], "scale": [1]}}, "columns.attempt"),
        ({"columns": {"attempt": [1.5], "scale": [1]}}, "columns.attempt"),
        ({"columns": {"attempt": [0], "scale": ["big"]}}, "columns.scale"),
        ({"columns": {"attempt": [0], "scale": [[1, 2]]}}, "columns.scale"),
        ({"columns": {"attempt": [0], "scale": [[1], [1, 2]]}}, "columns.scale"),
        ({"columns": {"attempt": [0], "mood": [1]}}, "columns.mood"),
        ({"kind": "tensors", "columns": {"hist": [[1, 2]]}}, "columns.hist"),
        ({"kind": "events", "columns": {}, "events": [{"time": 1}]}, "events[0]"),
        (
            {"kind": "events", "columns": {}, "events": [{"type": "skip", "time": 0, "data": {"n": 2**70}}]},
            "events",
        ),
        ({"seq": 2**63}, "seq"),
    ],
)
def test_json_that_cannot_be_read_names_its_field(changes, field):
    with pytest.raises(InvalidBatch) as caught:
        records.from_json(json_batch(**changes))
    assert caught.value.field == field


def test_an_events_batch_has_no_table():
    with pytest.raises(InvalidBatch, match="kind: an events batch holds no table"):
        records.pack_events([], **KEY).table()


def only_invalid_batch(read, data):
    with contextlib.suppress(InvalidBatch):
        records.check(read(data))


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["NaN", "Infinity"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
HEADERS = {
    "version": st.just(1) | JSON_LIKE,
    "producer": st.just(PRODUCER) | JSON_LIKE,
    "seq": st.integers(0, 5) | JSON_LIKE,
    "run": st.just("r") | JSON_LIKE,
    "kind": st.sampled_from(records.KINDS) | JSON_LIKE,
    "rank": st.just(0) | JSON_LIKE,
}
COLUMN_NAMES = st.sampled_from([*records.ATTEMPT_COLUMNS, *records.TENSOR_COLUMNS, "log.x", "mood"])
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["skip", "party"]), "time": st.floats() | JSON_LIKE, "data": JSON_LIKE}
    )
)
COLUMNS = st.dictionaries(
    COLUMN_NAMES, JSON_LIKE | st.lists(st.floats() | st.integers() | st.none()), max_size=5
)


@given(st.binary())
def test_no_bytes_raise_anything_else(data):
    only_invalid_batch(records.from_bytes, data)
    only_invalid_batch(records.from_json, data)


@given(JSON_LIKE)
def test_no_json_raises_anything_else(value):
    only_invalid_batch(records.from_json, json.dumps(value).encode())
    only_invalid_batch(records.from_bytes, msgspec.json.encode(value))


@given(
    st.fixed_dictionaries(HEADERS, optional={"events": EVENTS | JSON_LIKE, "columns": COLUMNS | JSON_LIKE})
)
def test_no_json_batch_raises_anything_else(value):
    only_invalid_batch(records.from_json, json.dumps(value).encode())


@given(st.binary(), st.sampled_from(records.KINDS))
def test_no_body_raises_anything_else(body, kind):
    header = {"kind": kind, "body": body, "digest": records.digest_of(body)}
    only_invalid_batch(records.from_bytes, resealed(attempts(), **header))


@given(st.data())
def test_no_damaged_batch_raises_anything_else(data):
    whole = bytearray(records.to_bytes(attempts(loss=[1.0, 2.0])))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    only_invalid_batch(records.from_bytes, bytes(whole))
