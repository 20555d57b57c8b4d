from __future__ import annotations

import math

import numpy as np
import pytest
import sent

from ampwatch import records
from ampwatch.errors import RunNotFound
from ampwatch.records import MISSING, Event
from ampwatch_server.diagnoser import stored_batches
from ampwatch_server.service import Service
from ampwatch_server.store import events, tensors
from ampwatch_server.store.marks import list_marks
from ampwatch_server.store.processes import Source, begins_of
from ampwatch_server.store.series import Range, read_series, read_tensor_series


def series(service: Service, names: list[str], asked: Range = Range(), **given: object) -> dict[str, object]:
    with service.database.read() as connection:
        return read_series(connection, service.tails, "r", names, asked, **given)


def heatmap(service: Service, stat: str, columns: int = 200, rows: int | None = None) -> dict[str, object]:
    with service.database.read() as connection:
        asked = Range(0, None, columns)
        return tensors.read_heatmap(connection, service.tails, "r", stat, asked, rows=rows)


def test_each_attempt_is_shown_as_it_was(service: Service) -> None:
    loss = [1.5, math.nan, math.inf, -math.inf, MISSING]
    sent.store(service, sent.attempts(0, 5, loss=loss))
    assert series(service, ["loss"])["streams"] == [
        {
            "rank": 0,
            "producer": sent.P,
            "stream": 0,
            "stride": 1,
            "attempt": [0, 1, 2, 3, 4],
            "step": [1, 2, 3, 4, 5],
            "time": [1000.0, 1001.0, 1002.0, 1003.0, 1004.0],
            "series": {
                "loss": {
                    "min": [1.5, "NaN", "Infinity", "-Infinity", None],
                    "max": [1.5, "NaN", "Infinity", "-Infinity", None],
                    "mean": [1.5, "NaN", "Infinity", "-Infinity", None],
                    "count": [1, 0, 0, 0, 0],
                    "nan": [0, 1, 0, 0, 0],
                    "inf": [0, 0, 1, 1, 0],
                }
            },
        }
    ]


def test_points_cover_several_attempts(service: Service) -> None:
    sent.store(service, sent.attempts(0, 8, loss=[1.0, 3.0, math.nan, math.inf, 5.0, 5.0, 5.0, 9.0]))
    found = series(service, ["loss"], Range(0, None, 2))["streams"][0]
    assert (found["stride"], found["attempt"], found["step"]) == (4, [0, 4], [1, 5])
    assert found["series"]["loss"] == {
        "min": [1.0, 5.0],
        "max": [3.0, 9.0],
        "mean": [2.0, 6.0],
        "count": [2, 4],
        "nan": [1, 0],
        "inf": [1, 0],
    }


def test_a_column_that_was_not_sent_is_missing(service: Service) -> None:
    sent.store(service, sent.attempts(0, 2, 0), sent.attempts(2, 4, 1, **{"log.reward": [7.0, 8.0]}))
    found = series(service, ["log.reward", "norm"])["streams"][0]["series"]
    assert found["log.reward"]["mean"] == [None, None, 7.0, 8.0]
    assert found["norm"]["mean"] == [None] * 4


@pytest.mark.parametrize("asked", [Range(), Range(points=1)])
def test_a_column_that_nobody_sent_is_missing_in_every_level(service: Service, asked: Range) -> None:
    sent.store(service, sent.attempts(0, 16_384, 0), sent.events(Event("finish", 1.0), seq=1))
    column = series(service, ["log.reward"], asked)["streams"][0]["series"]["log.reward"]
    assert (set(column["mean"]), set(column["count"])) == ({None}, {0})


def test_attempts_are_counted_where_nobody_sent_found_inf(service: Service) -> None:
    columns = {"attempt": np.arange(16_384), "scale": np.ones(16_384)}
    bare = records.pack_table("attempts", columns, **sent.key(0))
    sent.store(service, bare, sent.events(Event("finish", 1.0), seq=1))
    assert sent.attempts_of(service, "r") == 16_384


def test_range_rank_and_stream_choose(service: Service) -> None:
    sent.store(
        service,
        sent.attempts(0, 10, 0),
        sent.attempts(0, 10, 1, stream=1),
        sent.attempts(0, 10, 0, producer=sent.Q, rank=1),
    )
    found = series(service, ["loss"], Range(3, 4))["streams"]
    assert [(s["rank"], s["stream"], s["attempt"]) for s in found] == [
        (0, 0, [3, 4]),
        (0, 1, [3, 4]),
        (1, 0, [3, 4]),
    ]
    assert len(series(service, ["loss"], source=Source(rank=1))["streams"]) == 1
    assert {s["producer"] for s in series(service, ["loss"], source=Source(producer=sent.P))["streams"]} == {
        sent.P
    }
    assert len(series(service, ["loss"], stream=1)["streams"]) == 1
    assert series(service, ["loss"], Range(50, None))["streams"] == []


def resumed(service: Service) -> None:
    """A job of ten attempts that was resumed, in the order in which its processes came."""
    skip = Event("skip", 1.0, attempt=3)
    sent.store(service, sent.attempts(0, 10, 0, producer=sent.Q), sent.events(skip, seq=1, producer=sent.Q))
    sent.store(service, sent.attempts(0, 10, 0), sent.tensors([0, 4], [0, 0], 1), sent.events(skip, seq=2))


def test_on_a_page_the_processes_of_a_rank_stand_one_after_the_other(service: Service) -> None:
    resumed(service)
    both = series(service, ["loss"], Range(8, 12, through=True))["streams"]
    assert [(s["producer"], s["attempt"]) for s in both] == [(sent.Q, [8, 9]), (sent.P, [0, 1, 2])]
    (first,) = series(service, ["loss"], Range(0, 9, through=True))["streams"]
    assert first["producer"] == sent.Q
    with service.database.read() as connection:
        assert begins_of(connection, "r") == {sent.Q: 0, sent.P: 10}


def test_marks_and_heatmaps_are_found_where_their_process_stands(service: Service) -> None:
    resumed(service)
    with service.database.read() as connection:
        chosen = {"types": ["skip"], "most": 9}
        marks = [
            list_marks(connection, "r", first=a, last=b, **chosen) for a, b in ((0, 9), (10, 19), (0, None))
        ]
        grid = [
            tensors.read_heatmap(
                connection, service.tails, "r", "norm", Range(a, b, 9, through=True), source=Source(rank=0)
            )
            for a, b in ((0, 9), (10, 19))
        ]
    assert [[mark["producer"] for mark in found] for found in marks] == [[sent.Q], [sent.P], [sent.Q, sent.P]]
    assert [found["attempt"] for found in grid] == [[], [0, 4]]


def test_long_descriptions_of_tensors_are_shown_and_not_kept_in_memory(service: Service) -> None:
    described = [
        {"id": i, "name": f"long {i}", "module": "x" * 10_000, "shape": [i], "numel": i} for i in range(3)
    ]
    sent.store(service, sent.events(Event("tensors", 1.0, data={"tensors": described})))
    before = tensors._known_description.cache_info().currsize
    with service.database.read() as connection:
        found = tensors.list_tensors(connection, "r", cursor=None, limit=10)["items"]
    assert [(each["module"], each["shape"]) for each in found] == [("x" * 10_000, [i]) for i in range(3)]
    assert tensors._known_description.cache_info().currsize == before


def test_heatmap_by_hand(service: Service) -> None:
    sent.store(
        service,
        sent.events(*sent.named("a", "b")),
        sent.attempts(0, 60, 1),
        sent.tensors([0, 0, 25, 25, 50], [0, 1, 0, 1, 0], 2, n_inf=[0, 0, 0, 3, 0]),
    )
    norm = heatmap(service, "norm")
    assert [tensor["name"] for tensor in norm["tensors"]] == ["a", "b"]
    assert (norm["attempt"], norm["step"], norm["unit"]) == ([0, 25, 50], [1, 26, 51], "L2 norm")
    assert norm["values"] == [[2.0, 2.0, 2.0], [2.0, None, None]]
    assert heatmap(service, "headroom_log2")["values"] == [[3.0, 3.0, 3.0], [3.0, None, None]]
    assert heatmap(service, "zero_share")["values"] == [[0.1, 0.1, 0.1], [0.1, 0.1, None]]
    assert heatmap(service, "subnormal_share")["values"] == [[0.2, 0.2, 0.2], [0.2, 0.2, None]]
    assert heatmap(service, "nonfinite")["values"] == [[0.0, 0.0, 0.0], [0.0, 3.0, None]]


@pytest.mark.parametrize(("origin", "shown"), [("float16", 3.0), ("bfloat16", None), ("unknown", None)])
def test_headroom_is_judged_on_float16_born_tensors_only(
    service: Service, origin: str, shown: float | None
) -> None:
    sent.store(service, sent.events(*sent.named("a", origin=origin)), sent.tensors([0], [0], 1))
    assert heatmap(service, "headroom_log2")["values"] == [[shown]]


def test_a_column_shows_its_worst_and_rows_the_worst_tensors(service: Service) -> None:
    worst = np.array([9.0, 1.0, 4.0, 1.0]) ** 2
    sent.store(
        service,
        sent.events(*sent.named("a", "b")),
        sent.tensors([0, 0, 1, 1], [0, 1, 0, 1], 1, sum_sq=16 * worst),
    )
    assert heatmap(service, "norm", columns=1)["values"] == [[9.0], [1.0]]
    assert [tensor["name"] for tensor in heatmap(service, "norm", rows=1)["tensors"]] == ["a"]


def test_a_rolled_up_heatmap_is_that_of_the_rows(service: Service) -> None:
    at = list(range(0, 20_000, 25))
    sum_sq = 16 * (np.arange(len(at)) % 50) ** 2.0
    batch = sent.tensors(at, [0] * len(at), 1, sum_sq=sum_sq)
    sent.store(service, sent.events(*sent.named("a")), batch, fold=False)
    before = [heatmap(service, stat, columns=20) for stat in ("norm", "lost_share")]
    service.compactor.process("r")
    assert [p[3] for p in sent.all_chunks(service)].count(1) == 1
    for old, new in zip(
        before, [heatmap(service, s, columns=20) for s in ("norm", "lost_share")], strict=True
    ):
        assert new["attempt"] == old["attempt"]
        np.testing.assert_allclose(new["values"], [[None or v for v in row] for row in new["values"]])
    assert max(heatmap(service, "norm", columns=20)["values"][0]) == 49.0


def test_histograms(service: Service) -> None:
    sent.store(service, sent.attempts(0, 60, 0), sent.tensors([0, 25], [3, 3], 1))
    with service.database.read() as connection:
        found = tensors.read_histograms(connection, service.tails, "r", 3, Range())
        summed = tensors.read_histograms(connection, service.tails, "r", 3, Range(points=1))
    assert (found["bins_log2"][0], found["bins_log2"][-1]) == (-48, 15)
    assert (found["attempt"], found["step"], found["scale"]) == ([0, 25], [1, 26], [4.0, 4.0])
    assert [row[40] for row in found["hist"]] == [90, 90]
    assert [row[40] for row in summed["hist"]] == [180]


def test_series_of_a_tensor(service: Service) -> None:
    sent.store(
        service, sent.attempts(0, 60, 0), sent.tensors([0, 0, 25], [3, 4, 3], 1, max_abs=[1, 2, math.inf])
    )
    with service.database.read() as connection:
        found = read_tensor_series(connection, service.tails, "r", 3, ["norm", "max_abs"], Range())
        with pytest.raises(RunNotFound, match="run 'r' has no tensor 9"):
            read_tensor_series(connection, service.tails, "r", 9, ["norm"], Range())
    stream = found["streams"][0]
    assert (stream["attempt"], stream["step"], stream["time"]) == ([0, 25], [1, 26], [1000.0, 1025.0])
    assert stream["series"]["norm"]["mean"] == [2.0, 2.0]
    assert stream["series"]["max_abs"]["max"] == [1.0, "Infinity"]


def test_events_page_by_page(service: Service) -> None:
    given = [Event("growth", float(i), attempt=i, data={"scale": 2.0**i}) for i in range(5)]
    sent.store(service, sent.events(*given), sent.events(Event("skip", 2.5, attempt=2), seq=1))
    seen, cursor = [], None
    with service.database.read() as connection:
        while True:
            chosen = {"types": ["growth"], "first": 1, "last": None, "source": Source(rank=0)}
            page = events.list_events(connection, "r", cursor=cursor, limit=3, **chosen)
            seen += [event["attempt"] for event in page["items"]]
            if (cursor := page["next"]) is None:
                break
    assert seen == [1, 2, 3, 4]


def test_an_event_that_is_repeated_is_found_by_each_attempt_it_stands_for(service: Service) -> None:
    sent.store(service, sent.events(Event("skip", 1.0, attempt=10, repeat=5), Event("skip", 2.0, attempt=20)))

    def found(first: int, last: int) -> list[int]:
        asked = {"types": [], "first": first, "last": last, "cursor": None, "limit": 10}
        with service.database.read() as connection:
            listed = events.list_events(connection, "r", **asked)["items"]
            marked = list_marks(connection, "r", types=["skip"], first=first, last=last, most=9)
        assert [mark["attempt"] for mark in marked] == [event["attempt"] for event in listed]
        return [event["attempt"] for event in listed]

    assert [found(14, 14), found(15, 19), found(0, 9), found(12, 30)] == [[10], [], [], [10, 20]]


def test_marks_are_events_while_there_are_few_and_groups_of_them_that_leave_none_out(
    service: Service,
) -> None:
    kinds = {"skip": range(90), "growth": range(0, 90, 30)}
    given = [Event(kind, float(i), attempt=i) for kind, at in kinds.items() for i in at]
    sent.store(service, sent.events(*given))
    chosen = {"types": ["skip", "growth"], "first": 0, "last": None}
    with service.database.read() as connection:
        each = list_marks(connection, "r", most=93, **chosen)
        groups = list_marks(connection, "r", most=20, **chosen)
    assert [(m["type"], m["attempt"], m["count"]) for m in each[:3]] == [
        ("skip", 0, 1),
        ("growth", 0, 1),
        ("skip", 1, 1),
    ]
    assert len(each) == 93
    assert [(m["attempt"], m["last_attempt"], m["count"]) for m in groups if m["type"] == "skip"] == [
        (first, first + 8, 9) for first in range(0, 90, 9)
    ]
    assert [(m["attempt"], m["count"]) for m in groups if m["type"] == "growth"] == [(0, 1), (30, 1), (60, 1)]


def test_an_event_keeps_what_json_cannot_write(service: Service) -> None:
    data = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": MISSING, "\x00": "\x00", "e": b"\x01"}
    sent.store(service, sent.events(Event("skip", math.nan, attempt=2**62, data=data)))
    with service.database.read() as connection:
        chosen = {"types": [], "first": None, "last": None}
        event = events.list_events(connection, "r", cursor=None, limit=3, **chosen)["items"][0]
    assert event["time"] == "NaN"
    assert event["data"] == {
        "a": "NaN",
        "b": ["Infinity", {"c": "-Infinity"}],
        "d": None,
        "\x00": "\x00",
        "e": "AQ==",
    }


def test_batches_with_different_columns_meet_in_one_chunk(service: Service) -> None:
    plain = {"attempt": [25], "tensor": [0], "scale": [4.0], "numel": [100]}
    bare = records.pack_table("tensors", plain, **sent.key(1))
    sent.store(service, sent.tensors([0], [0], 0), bare, sent.attempts(0, 3000, 2))
    assert heatmap(service, "norm")["values"] == [[2.0, None]]
    assert heatmap(service, "nonfinite")["values"] == [[0.0, None]]
    with service.database.read() as connection:
        back = [set(b.table()) for b in stored_batches(connection, "r") if b.kind == "tensors"]
    full = {*sent.tensors([0], [0]).table(), "stream"}
    assert back == [full, full - {"n_inf", "n_nan", "n_zero", "n_subnormal", "hist"}]  # reals can be missing
