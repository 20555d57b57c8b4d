"""One batch to the server: what is mended on the spot."""

from __future__ import annotations

import gzip
import math

import httpx
import pytest

from ampwatch import records, spool
from ampwatch.cuts import Cuts
from ampwatch.sender import Sender

from .spooled import answered, attempts, events, posted, tensors


class Gate:
    """A server behind a proxy: bodies up to a size, in one encoding."""

    def __init__(
        self, most_bytes=1 << 20, encoding="gzip", media="application/vnd.ampwatch.batch", refusal=415
    ):
        self.most_bytes, self.encoding, self.media, self.refusal = most_bytes, encoding, media, refusal
        self.stored, self.sizes = [], []

    def __call__(self, request):
        self.sizes.append(len(request.content))
        if len(request.content) > self.most_bytes:
            return httpx.Response(413, html="<html>")
        coded = request.headers.get("Content-Encoding", "")
        if (coded, request.headers["Content-Type"]) != (self.encoding, self.media):
            return httpx.Response(self.refusal, json={"detail": "not so"})
        data = gzip.decompress(request.content) if coded else request.content
        self.stored.append(records.from_bytes(data))
        return httpx.Response(200, json={"next_batch_s": 1})


def sender(gate):
    return Sender("http://127.0.0.1:1", "secret", http=httpx.MockTransport(gate))


def cuts(folder=None, first=100):
    numbers = iter(range(first, first + 1000))
    return Cuts(folder, lambda: next(numbers))


def rows(batches):
    return sorted(i for batch in batches for i in batch.table()["attempt"].tolist())


@pytest.mark.parametrize(
    "gate",
    [Gate(encoding=""), Gate(encoding="", media="application/msgpack"), Gate(encoding="", refusal=426)],
)
def test_what_cannot_be_read_goes_in_another_encoding_and_so_does_the_next(gate):
    with sender(gate) as client:
        outcomes = [client.send(events(seq), cuts()).outcome for seq in range(3)]
    assert outcomes == ["stored"] * 3
    assert gate.stored == [events(seq) for seq in range(3)]
    assert len(gate.sizes) - 3 in (1, 2)  # asked in vain once for each encoding


@pytest.mark.parametrize(("refusal", "outcome"), [(415, "refused"), (426, "barred")])
def test_what_no_encoding_makes_readable(refusal, outcome):
    gate = Gate(encoding="br", refusal=refusal)
    with sender(gate) as client:
        assert client.send(events(0), cuts()).outcome == outcome
    assert len(gate.sizes) == 3


def test_a_batch_that_is_too_large_goes_in_parts_and_the_next_without_asking():
    gate, count = Gate(most_bytes=900), 64
    with sender(gate) as client:
        assert client.send(attempts(7, rows=count, loss=range(count)), cuts()).outcome == "stored"
        asked = len(gate.sizes)
        assert (
            client.send(attempts(8, first=count, rows=count, loss=range(count)), cuts(first=200)).outcome
            == "stored"
        )
    assert rows(gate.stored) == list(range(2 * count))
    assert {7, 8} <= {batch.seq for batch in gate.stored}
    assert max(gate.sizes[asked:]) <= 900


def test_events_are_cut_too_and_a_row_cannot_be():
    gate = Gate(most_bytes=250)
    with sender(gate) as client:
        assert client.send(events(0, *["heartbeat"] * 400), cuts()).outcome == "stored"
        assert client.send(tensors(1, rows=1), Cuts(None)).outcome in ("stored", "refused")
        gate.most_bytes = 10
        assert client.send(events(1), cuts()).outcome == "refused"
    assert sum(len(batch.events()) for batch in gate.stored if batch.kind == "events") == 400


def test_whoever_sends_a_cut_batch_again_sends_the_same_parts(tmp_path):
    gate, batch = Gate(most_bytes=900), attempts(7, rows=64, loss=range(64))
    with sender(gate) as client:
        client.send(batch, cuts(tmp_path))
    again = Gate(most_bytes=1 << 20)
    with sender(again) as client:
        assert client.send(batch, Cuts(tmp_path)).outcome == "stored"
    assert again.stored == gate.stored
    assert list(spool.Tail(tmp_path).read()) == []  # they are no part of the record


def test_who_is_not_the_producer_cannot_cut():
    gate = Gate(most_bytes=10)
    with sender(gate) as client:
        answer = client.send(attempts(0), Cuts(None))
    assert (answer.outcome, answer.status, len(gate.sizes)) == ("refused", 413, 1)


def test_a_part_that_is_refused_keeps_no_other_back():
    gate = Gate(most_bytes=900)
    whole, refused = gate.__call__, []

    def picky(request):
        answer = whole(request)
        if answer.status_code == 200 and not refused:
            refused.append(gate.stored.pop())
            return httpx.Response(422, json={"detail": "no"})
        return answer

    with sender(picky) as client:
        assert client.send(attempts(7, rows=64, loss=range(64)), cuts()).outcome == "refused"
    assert rows([*gate.stored, *refused]) == list(range(64))


class Several:
    """A server that takes several batches in one request, and answers some numbers otherwise than with a receipt."""

    def __init__(self, told=None, most_bytes=1 << 20):
        self.told, self.most_bytes, self.asked = told or {}, most_bytes, []

    def __call__(self, request):
        seqs = [batch.seq for batch in posted(request)]
        if len(request.content) > self.most_bytes:
            return httpx.Response(413, json={"detail": "too large"})
        self.asked.append(seqs)
        return answered(request, *(self.told.pop(seq, (200, {"next_batch_s": 1})) for seq in seqs))


def outcomes(client, batches, cuts=lambda _: Cuts(None)):
    return [answer.outcome for answer in client.send_all(batches, cuts)]


def test_several_go_in_one_request_and_each_has_its_answer():
    told = {1: (422, {"detail": "no"}), 3: (429, {}, 7), 4: (403, {"detail": "not of this project"})}
    server = Several(told)
    with sender(server) as client:
        answers = client.send_all([events(seq) for seq in range(6)], lambda _: Cuts(None))
    assert server.asked == [[0, 1, 2, 3, 4, 5]]
    assert [a.outcome for a in answers] == ["stored", "refused", "stored", "later", "barred", "stored"]
    assert [a.pause_s for a in answers[:4]] == [1.0, None, 1.0, 7.0]
    assert answers[1].warning.endswith("refused records: 422 no")


def test_what_can_be_mended_goes_alone():
    batch = attempts(1, rows=64, loss=range(64))
    server = Several({0: (426, {}), 1: (413, {})})
    with sender(server) as client:
        assert outcomes(client, [events(0), batch, events(2)], lambda _: cuts()) == ["stored"] * 3
    assert server.asked == [[0, 1, 2], [0], [1]]


def test_too_many_for_one_request_go_in_several():
    batches = [attempts(seq, loss=[seq, math.pi]) for seq in range(8)]
    server = Several(most_bytes=350)
    with sender(server) as client:
        assert outcomes(client, batches) == ["stored"] * 8
        assert sorted(seq for seqs in server.asked for seq in seqs) == list(range(8))
        assert 1 < max(map(len, server.asked)) < 8


@pytest.mark.parametrize("gate", [Gate(), Gate(refusal=404), Gate(refusal=422)])
def test_an_older_server_gets_one_after_the_other_and_is_not_asked_again(gate):
    with sender(gate) as client:
        assert outcomes(client, [events(0), events(1)]) == ["stored"] * 2
        assert outcomes(client, [events(2), events(3)]) == ["stored"] * 2
    assert [batch.seq for batch in gate.stored] == [0, 1, 2, 3]
    assert len(gate.sizes) == 5


def test_an_answer_that_says_nothing_of_each_is_none():
    with sender(lambda request: httpx.Response(200, json={"next_batch_s": 1})) as client:
        assert outcomes(client, [events(0), events(1)]) == ["stored"] * 2
        assert client._takes_several is False


@pytest.mark.parametrize(("status", "outcome"), [(503, "later"), (401, "barred"), (404, "barred")])
def test_what_is_answered_to_the_request_is_the_first_batchs(status, outcome):
    with sender(lambda request: httpx.Response(status, json={})) as client:
        assert outcomes(client, [events(0), events(1)]) == [outcome]


def test_one_that_was_cut_before_goes_in_the_same_parts(tmp_path):
    whole, gate = attempts(7, rows=64, loss=range(64)), Gate(most_bytes=300)
    with sender(gate) as client:
        client.send(whole, cuts(tmp_path))
    assert len(gate.stored) > 1
    server = Several()
    with sender(server) as client:
        assert outcomes(client, [events(0), whole], lambda _: Cuts(tmp_path)) == ["stored"] * 2
    assert server.asked == [[0], *([batch.seq] for batch in gate.stored)]
