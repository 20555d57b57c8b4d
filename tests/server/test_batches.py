from __future__ import annotations

import gzip
import json
import math
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import sent
import zstandard

from ampwatch import records
from ampwatch.errors import InvalidBatch
from ampwatch.records import Event
from ampwatch_server.agenda import New
from ampwatch_server.inbox import Inbox, Stored
from ampwatch_server.limits import TooLarge, check, decompress
from ampwatch_server.serve import running
from ampwatch_server.service import Service

BODY = records.to_bytes(sent.attempts(0, 5))


def problem(response: httpx.Response) -> tuple[int, str | None, str]:
    assert response.headers["content-type"] == "application/problem+json"
    told = response.json()
    assert told["status"] == response.status_code
    return response.status_code, told.get("field"), told["detail"]


def post(
    client: httpx.Client, content: bytes, media: str = "application/msgpack", **headers: str
) -> httpx.Response:
    return client.post("/v1/batches", content=content, headers={"Content-Type": media, **headers})


def test_a_batch_gets_a_receipt(client: httpx.Client) -> None:
    first, again = post(client, BODY), post(client, BODY)
    assert first.json() == {
        "producer": sent.P,
        "seq": 0,
        "stored": True,
        "last_seq": -1,
        "next_batch_s": 1.0,
    }
    assert again.json()["stored"] is False


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress), ("identity", bytes)]
)
def test_bodies_may_be_compressed(client: httpx.Client, encoding: str, pack) -> None:
    answer = post(client, pack(BODY), **{"Content-Encoding": encoding})
    assert answer.json()["stored"] is True


def test_a_short_body_may_unpack_to_a_long_one_within_the_bound(tmp_path: Path, connect) -> None:
    batch = sent.attempts(0, 2000)
    long = gzip.compress(records.to_bytes(batch))
    assert len(long) < 1 << 15 < 1 << 16 < len(batch.body)
    bomb = gzip.compress(bytes(1 << 20))
    with (
        running(database=str(tmp_path / "a.db"), max_decoded_bytes=1 << 19) as server,
        connect(server) as client,
    ):
        assert post(client, long, **{"Content-Encoding": "gzip"}).json()["stored"] is True
        assert problem(post(client, bomb, **{"Content-Encoding": "gzip"}))[0] == 413


def test_json_will_do(client: httpx.Client) -> None:
    columns = {"attempt": [0, 1, 2, 3], "scale": [8.0, "NaN", "Infinity", None]}
    batch = sent.key() | {"kind": "attempts", "columns": columns}
    assert post(client, json.dumps(batch).encode(), "application/json").json()["stored"] is True
    found = client.get("/v1/runs/r/series", params={"names": "scale"}).json()["streams"][0]
    assert found["series"]["scale"]["mean"] == [8.0, "NaN", "Infinity", None]
    assert (found["step"], found["time"]) == ([None] * 4, [None] * 4)


def test_another_digest_is_a_conflict(client: httpx.Client) -> None:
    sent.send(client, sent.attempts(0, 5))
    status, field, detail = problem(sent.post(client, sent.attempts(0, 6)))
    assert (status, field) == (409, None)
    assert detail.startswith(f"producer {sent.P} has sent another batch with seq 0")


@pytest.mark.parametrize(
    ("content", "media", "headers", "expected"),
    [
        (BODY, "text/plain", {}, (415, None)),
        (BODY, "", {}, (415, None)),
        (BODY, "application/msgpack", {"Content-Encoding": "br"}, (415, None)),
        (BODY, "application/msgpack", {"Content-Encoding": "gzip"}, (422, "body")),
        (gzip.compress(BODY)[:-9], "application/msgpack", {"Content-Encoding": "gzip"}, (422, "body")),
        (BODY[:40], "application/msgpack", {}, (422, "body")),
        (b"", "application/msgpack", {}, (422, "body")),
        (b"[" * 100_000, "application/json", {}, (422, "body")),
        (b'{"version": 2}', "application/json", {}, (426, "version")),
        (msgspec.json.encode(sent.key() | {"kind": "x"}), "application/json", {}, (422, "kind")),
        (
            msgspec.json.encode(sent.key() | {"kind": "attempts", "columns": {"attempt": [0]}}),
            "application/json",
            {},
            (422, "columns.scale"),
        ),
        (
            msgspec.json.encode(sent.key() | {"kind": "attempts", "columns": {"attempt": [-1], "scale": [1]}}),
            "application/json",
            {},
            (422, "columns.attempt"),
        ),
        (
            msgspec.json.encode(
                sent.key() | {"kind": "events", "events": [{"type": "skip", "time": 1, "data": {"x": 2**64 - 1}}]}
            ).replace(b"18446744073709551615", b"1" * 40),
            "application/json",
            {},
            (422, "events"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_the_field(client, content, media, headers, expected) -> None:
    assert problem(post(client, content, media, **headers))[:2] == expected


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (Event("skip", 1.0, attempt=2**63), "events[0].attempt"),
        (Event("skip", 1.0, data={"x": msgspec.json.decode(b"[" * 40 + b"]" * 40)}), "events[0].data"),
        (Event("nonsense", 1.0), "events[0].type"),
    ],
)
def test_events_out_of_bounds_are_refused(client: httpx.Client, event: Event, field: str) -> None:
    assert problem(sent.post(client, sent.events(event)))[:2] == (422, field)


def test_a_damaged_batch_is_refused(client: httpx.Client) -> None:
    damaged = BODY.replace(b"found_inf", b"found_ing")
    assert problem(post(client, damaged))[:2] == (422, "digest")


def test_a_long_body_is_refused(tmp_path: Path, connect) -> None:
    with (
        running(database=str(tmp_path / "a.db"), max_body_bytes=1000, max_decoded_bytes=2000) as server,
        connect(server) as client,
    ):
        assert problem(post(client, bytes(1001)))[0] == 413
        packed = gzip.compress(bytes(2001))
        assert problem(post(client, packed, **{"Content-Encoding": "gzip"}))[0] == 413
        assert len(post(client, BODY).content) > 0


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
def test_a_bomb_is_not_unpacked(encoding: str, pack) -> None:
    bomb = pack(bytes(64 << 20))
    with pytest.raises(TooLarge, match="unpacks to more than 1,000 bytes"):
        decompress(bomb, encoding, 1000)


def test_a_zstd_frame_may_not_ask_for_much_memory() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = stream.compress(bytes(1000)) + stream.flush()
    with pytest.raises(InvalidBatch, match="it is not zstd"):
        decompress(frame, "zstd", 10_000)


TOGETHER = "application/vnd.ampwatch.batches"


def several(client: httpx.Client, *bodies: bytes) -> list[dict[str, Any]]:
    """The answers to batches of one request."""
    content = gzip.compress(msgspec.msgpack.encode(bodies))
    return (
        post(client, content, TOGETHER, **{"Content-Encoding": "gzip"}).raise_for_status().json()["answers"]
    )


def test_several_batches_of_one_request_are_answered_each_as_if_it_had_come_alone(
    client: httpx.Client,
) -> None:
    whole = [records.to_bytes(sent.attempts(i, i + 1, i)) for i in range(2)]
    other = records.to_bytes(sent.attempts(1, 9, 1))
    newer = msgspec.msgpack.encode({"version": 2})
    answers = several(client, whole[0], whole[1][:-3], other, whole[1], newer, whole[0])
    assert [each["status"] for each in answers] == [200, 422, 200, 409, 426, 200]
    about = {"producer": sent.P, "next_batch_s": 1.0}
    assert [each["body"] for each in answers if each["status"] == 200] == [
        about | {"seq": 0, "stored": True, "last_seq": -1},
        about | {"seq": 1, "stored": True, "last_seq": 0},
        about | {"seq": 0, "stored": False, "last_seq": 1},
    ]
    assert answers[4]["body"] == post(client, newer).json()
    assert client.get("/v1/runs/r").json()["producers"][0]["last_seq"] == 1


def test_several_batches_of_one_request_share_a_commit(service: Service) -> None:
    commits: list[dict[str, list[New]]] = []
    inbox = Inbox(service.database, service.settings, commits.append)
    batches = [sent.attempts(i, i + 1, i) for i in range(20)]
    told: queue.SimpleQueue[Sequence[Stored | BaseException]] = queue.SimpleQueue()
    inbox.append_all([(batch, check(batch)) for batch in batches], told.put)
    assert told.get(timeout=60) == [Stored(new=True, last_seq=seq) for seq in range(-1, 19)]
    service.database.write(lambda _: None)
    assert [len(new["r"]) for new in commits] == [20]


def test_requests_that_are_read_before_a_commit_begins_share_it(service: Service) -> None:
    commits: list[dict[str, list[New]]] = []
    inbox = Inbox(service.database, service.settings, commits.append)
    told: queue.SimpleQueue[Sequence[Stored | BaseException]] = queue.SimpleQueue()
    begun: list[Callable[[], None]] = []
    for batch in (sent.attempts(i, i + 1, i) for i in range(3)):
        inbox.append_all([(batch, check(batch))], told.put, begin=begun.append)
    (commit,) = begun
    commit()
    assert [told.get(timeout=60) for _ in range(3)] == [[Stored(True, seq)] for seq in range(-1, 2)]
    service.database.write(lambda _: None)
    assert [len(new["r"]) for new in commits] == [3]


@pytest.mark.parametrize("content", [b"", b"\x93", BODY, msgspec.msgpack.encode([BODY.decode("latin-1")])])
def test_a_body_that_is_no_array_of_batches_is_refused(client: httpx.Client, content: bytes) -> None:
    assert problem(post(client, content, TOGETHER))[0] == 422


def test_no_more_than_256_batches_of_one_request_are_read(client: httpx.Client) -> None:
    assert len(several(client, *[BODY] * 256)) == 256
    assert problem(post(client, msgspec.msgpack.encode([BODY] * 257), TOGETHER))[:2] == (422, "body")


def test_each_of_several_batches_counts_for_how_often_a_token_may_come(tmp_path: Path, connect) -> None:
    with running(database=str(tmp_path / "a.db"), token_per_s=0.3) as server, connect(server) as client:
        answers = several(client, *(records.to_bytes(sent.attempts(i, i + 1, i)) for i in range(5)))
    assert [each["status"] for each in answers] == [200, 200, 200, 429, 429]
    assert [each.get("retry_after_s") for each in answers] == [None, None, None, 4, 4]


def test_of_several_batches_only_those_of_its_project_may_a_token_send(client: httpx.Client, server) -> None:
    sent.send(client, sent.attempts(0, 1, run="other"))
    made = client.post("/v1/tokens", json={"name": "ci", "scopes": ["write"], "project": "vision"}).json()
    batches = [sent.attempts(0, 1, producer=sent.Q), sent.attempts(1, 2, 1, run="other")]
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {made['token']}"}) as bound:
        answers = several(bound, *map(records.to_bytes, batches))
    assert [each["status"] for each in answers] == [200, 403]


def nan_everywhere(kind: str) -> sent.Batch:
    reals = {name for name, dtype in records.COLUMNS[kind].items() if dtype == "<f8"}
    values = [math.nan, math.inf, -math.inf, records.MISSING]
    if kind == "attempts":
        return sent.attempts(0, 4, 1, **dict.fromkeys(reals, values), **{"log.x": values})
    return sent.tensors([0, 1, 2, 3], [0] * 4, 2, **dict.fromkeys(reals, values))


def test_nan_in_every_field_reaches_every_endpoint(database: str, connect) -> None:
    with running(database=database) as server, connect(server) as client:
        odd = Event("run", math.nan, data={"config": {"lr": math.inf}, "name": "n"})
        sent.send(
            client, sent.events(odd, *sent.named("a")), nan_everywhere("attempts"), nan_everywhere("tensors")
        )
        sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 4)
        sent.until(lambda: client.get("/v1/runs/r/tensors").json()["items"])
        names = "scale,loss,norm,lr,log.x"
        for path in (
            "/v1/runs",
            f"/v1/runs/r/series?names={names}",
            f"/v1/runs/r/series?names={names}&points=1",
            "/v1/runs/r/events",
            "/v1/runs/r/tensors/0/series?names=norm,max_abs,scale",
            "/v1/runs/r/tensors/0/histograms",
            *(
                f"/v1/runs/r/heatmap?stat={stat}"
                for stat in ("lost_share", "norm", "headroom_log2", "nonfinite")
            ),
            "/v1/runs/r/findings",
            "/v1/compare?runs=r&names=loss,log.x",
            "/v1/compare/figure?runs=r",
            *(f"/v1/runs/r/export?format=json&kind={kind}" for kind in ("attempts", "tensors", "events")),
            "/v1/runs/r/figures/timeline",
            "/v1/runs/r/figures/heatmap",
            "/v1/runs/r/figures/histogram?tensor=0",
        ):
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            json.loads(answer.content, parse_constant=pytest.fail)
        assert client.get("/v1/runs/r/report").status_code == 200
        found = client.get("/v1/runs/r/series?names=loss").json()["streams"][0]
        assert found["time"] == found["series"]["loss"]["mean"] == ["NaN", "Infinity", "-Infinity", None]
