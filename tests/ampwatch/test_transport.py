import gzip
import threading
import time

import httpx
import pytest

from ampwatch import records
from ampwatch.sender import TOGETHER
from ampwatch.transport import Transport

from .spooled import PRODUCER, answered, attempts, events, posted

SERVER = "http://127.0.0.1:8642"


class Server:
    """A server in memory, of before there were several batches in a request.

    It gives its answers in turn, the last one for good; an exception is raised.
    """

    def __init__(self, *answers):
        self.answers = list(answers) or [stored()]
        self.requests = []
        self.asked = threading.Semaphore(0)

    def __call__(self, request):
        if request.headers["Content-Type"] == TOGETHER:
            return httpx.Response(415, json={"detail": "got Content-Type"})
        self.requests.append(request)
        self.asked.release()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(*answer[:1], json=answer[1], headers=answer[2] if len(answer) > 2 else {})

    @property
    def seqs(self):
        return [records.from_bytes(gzip.decompress(r.content)).seq for r in self.requests]


def stored(next_batch_s=0.0):
    return (200, {"stored": True, "next_batch_s": next_batch_s})


def transport(server, **how):
    return Transport(SERVER, "secret", http=httpx.MockTransport(server), first_retry_s=0.001, **how)


def test_a_batch_is_posted_as_it_stands_in_the_spool():
    server = Server()
    client = transport(server)
    assert client.submit(events(0))
    assert client.close(5)
    (request,) = server.requests
    assert (request.method, str(request.url)) == ("POST", f"{SERVER}/v1/batches")
    assert request.headers["Content-Type"] == "application/vnd.ampwatch.batch"
    assert request.headers["Authorization"] == "Bearer secret"
    assert gzip.decompress(request.content) == records.to_bytes(events(0))


def test_batches_are_sent_in_order():
    server = Server()
    client = transport(server)
    for seq in range(5):
        client.submit(attempts(seq))
    assert client.close(5)
    assert (server.seqs, client.delivered) == ([0, 1, 2, 3, 4], 5)


@pytest.mark.parametrize(
    "passing",
    [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), (408, {}), (429, {}), (500, {}), (503, {})],
)
def test_what_may_pass_is_tried_again(passing):
    server = Server(passing, passing, stored())
    client = transport(server)
    client.submit(events(7))
    assert all(server.asked.acquire(timeout=5) for _ in range(3))
    assert client.close(5)
    assert (server.seqs, client.delivered, client.rejected) == ([7, 7, 7], 1, 0)


def test_a_server_that_cannot_be_reached_gives_one_warning(caplog):
    server = Server(httpx.ConnectError("refused"), httpx.ConnectError("refused"), stored())
    client = transport(server)
    client.submit(events(0))
    assert all(server.asked.acquire(timeout=5) for _ in range(3))
    assert client.close(5)
    assert caplog.messages == [
        f"ampwatch: {SERVER} cannot be reached: refused. Does `ampwatch serve` run there? Training goes on"
    ]


def test_trouble_that_passes_is_not_spoken_of_and_what_does_not_is_once(caplog):
    client = transport(Server((503, {}), stored(), (503, {}), (503, {}), (503, {}), stored()))
    for seq in range(2):
        client.submit(events(seq))
    assert client.close(5)
    (message,) = caplog.messages
    assert "answers 503 Service Unavailable; trying again until it takes the records" in message


def test_retry_after_is_waited_for():
    server = Server((503, {}, {"Retry-After": "3600"}), stored())
    client = transport(server)
    client.submit(events(0))
    assert server.asked.acquire(timeout=5)
    assert not server.asked.acquire(timeout=0.1)
    assert client.close(5)  # a client that is closing asks once more at once
    assert server.seqs == [0, 0]


BARRING = [(401, {}), (403, {}), (200, ["a list"]), (302, {}), (404, {"detail": "Not Found"})]


@pytest.mark.parametrize("answer", BARRING, ids=lambda answer: str(answer[0]))
def test_what_a_person_must_mend_gives_one_warning_and_keeps_the_batch(answer, caplog):
    server = Server(answer, answer, stored())
    client = transport(server, barred_retry_s=0.001)
    client.submit(events(0))
    assert all(server.asked.acquire(timeout=5) for _ in range(3))
    assert client.close(5)
    assert (server.seqs, client.delivered, client.rejected) == ([0, 0, 0], 1, 0)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("answer", [*BARRING, httpx.ConnectError("refused")], ids=str)
def test_a_server_that_takes_nothing_is_tried_once_more_and_not_waited_for(answer):
    server = Server(answer)
    client = transport(server)
    client.submit(events(0))
    client.submit(events(1))
    assert server.asked.acquire(timeout=5)
    started = time.monotonic()
    assert not client.close(60)
    assert time.monotonic() - started < 30
    assert server.asked.acquire(timeout=5)


def test_a_server_that_was_reached_before_is_waited_for():
    server = Server(stored(), httpx.ConnectError("restarting"), httpx.ConnectError("restarting"), stored())
    client = transport(server)
    client.submit(events(0))
    assert server.asked.acquire(timeout=5)
    client.submit(events(1))
    assert client.close(5)
    assert client.delivered == 2


def test_what_happens_meanwhile_is_part_of_a_warning(caplog):
    client = transport(
        Server((401, {})), meanwhile=lambda: "Training goes on, and the records are kept in runs"
    )
    client.submit(events(0))
    assert not client.close(5)
    assert caplog.messages[0].endswith("Training goes on, and the records are kept in runs")


@pytest.mark.parametrize("status", [409, 410, 422, 431])
def test_what_is_refused_for_good_is_counted_and_passed_over(status, caplog):
    server = Server((status, {"detail": "why"}), (status, {"detail": "why"}), stored())
    client = transport(server)
    for seq in range(3):
        client.submit(events(seq))
    assert client.close(5)
    assert (server.seqs, client.rejected, client.delivered) == ([0, 1, 2], 2, 1)
    (message,) = caplog.messages
    assert message == f"ampwatch: {SERVER} refused records: {status} why. Training goes on"


def test_the_next_burst_waits_as_long_as_the_server_asks():
    server = Server(stored(next_batch_s=60.0))
    client = transport(server)
    client.submit(events(0))
    assert server.asked.acquire(timeout=5)
    client.submit(events(1))
    assert not server.asked.acquire(timeout=0.1)
    assert client.close(5)
    assert server.seqs == [0, 1]


def test_what_does_not_fit_is_read_again_from_the_spool():
    server = Server()
    batches = [attempts(seq) for seq in range(4)]
    client = transport(server, reread=lambda _again: batches, queue_bytes=len(batches[0].body))
    kept = [client.submit(batch) for batch in batches]
    assert client.close(5)
    assert kept[0] is True
    assert sorted(server.seqs) == [0, 1, 2, 3]


def test_what_a_broken_reading_of_the_spool_did_not_reach_is_not_held_for_sent(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")

    def torn(_again):
        yield attempts(0)
        raise OSError("the disk")

    server = Server()
    client = transport(server, reread=torn, queue_bytes=0)
    for seq in range(2):
        client.submit(attempts(seq))
    assert server.asked.acquire(timeout=5)
    assert not client.close(0.2)
    assert server.seqs == [0]


def test_what_closing_broke_off_is_not_held_for_sent():
    server = Server(httpx.ConnectError("refused"))
    batches = [attempts(seq) for seq in range(2)]
    client = transport(server, reread=lambda _again: batches, queue_bytes=0)
    for batch in batches:
        client.submit(batch)
    assert server.asked.acquire(timeout=5)
    assert not client.close(0.05)
    client._thread.join(5)
    assert (client.answered_seq, client.delivered) == (-1, 0)


def test_an_outage_of_days_costs_no_memory_and_ends_in_order():
    server, spooled = Server(httpx.ConnectError("refused")), [attempts(seq) for seq in range(50)]
    fresh = iter(spooled)
    client = transport(server, reread=lambda _again: fresh, queue_bytes=3 * len(spooled[0].body))
    kept = [client.submit(batch) for batch in spooled]
    assert (kept.count(True) <= 4, client._behind[1], len(client._queue) <= 3) == (True, 49, True)
    server.answers, server.requests = [stored()], []
    assert client.close(10)
    assert (sorted(set(server.seqs)), client.answered_seq) == (list(range(50)), 49)


def test_what_is_not_in_the_spool_is_sent_out_of_turn():
    server = Server(httpx.ConnectError("refused"))
    size = len(attempts(0).body)
    client = transport(server, queue_bytes=0, unspooled_bytes=size)
    assert [client.submit(attempts(seq), is_spooled=seq == 0) for seq in range(2)] == [False, True]
    assert client.answered_seq == -1
    client.close(0)
    assert not transport(server, unspooled_bytes=size - 1).submit(
        attempts(0), is_spooled=False
    )  # no room at all


def test_a_poison_batch_stops_none_of_the_others(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    server, told = Server(), []
    client = transport(server, refused=lambda batch, answer: told.append((batch.seq, answer.status)))
    poison = records.Batch(1, PRODUCER, 1, "r", object(), "events", "", b"")  # no msgpack can hold it
    for batch in (attempts(0), poison, attempts(2)):
        client._queue.append(batch)
    client.submit(attempts(3))
    assert client.close(5)
    assert (server.seqs, told, client.answered_seq) == ([0, 2, 3], [(1, 0)], 3)


class Store:
    """A server that says how far it has come; from the first time that it is sent `loses` on, it has what is left."""

    def __init__(self, loses=-1, left=()):
        self.has, self.loses, self.left = [], loses, left

    def __call__(self, request):
        if request.headers["Content-Type"] == TOGETHER:
            return httpx.Response(415, json={"detail": "got Content-Type"})
        seq = records.from_bytes(gzip.decompress(request.content)).seq
        if seq == self.loses:
            self.has, self.loses = list(self.left), -1
        last_seq, self.has = max(self.has, default=-1), [*self.has, seq]
        return httpx.Response(200, json={"last_seq": last_seq, "next_batch_s": 0})


@pytest.mark.parametrize("queue_bytes", [1 << 20, 0])  # from memory; from the spool, while it catches up
def test_what_a_server_that_was_put_back_has_lost_is_sent_again(queue_bytes, caplog):
    spooled, asked = [attempts(seq) for seq in range(6)], []
    server = Store(loses=4, left=[0, 1])
    client = transport(server, reread=lambda again: asked.append(again) or spooled, queue_bytes=queue_bytes)
    for batch in spooled:
        client.submit(batch)
    assert client.close(5)
    assert set(server.has) == set(range(6))
    assert (server.has[:3], True in asked, client.answered_seq) == ([0, 1, 4], True, 5)
    (told,) = caplog.messages
    assert "has lost records that it had acknowledged" in told


def test_of_another_producer_it_is_told(caplog):
    told = []
    client = transport(Store(loses=1), forgotten=told.append)
    for seq in range(3):
        client.submit(attempts(seq))
    assert client.close(5)
    assert told == [PRODUCER]


def test_what_the_spool_has_lost_is_not_waited_for():
    client = transport(Server(), queue_bytes=0)
    assert not client.submit(attempts(0))
    assert client.close(5)


def test_close_is_bounded_in_time():
    client = transport(Server(httpx.ConnectError("refused")))
    client.submit(events(0))
    assert not client.close(0.05)


def test_an_answer_that_asks_for_no_pause_is_a_delivery():
    client = transport(Server((200, {"next_batch_s": "soon"})))
    client.submit(events(0))
    assert client.close(5)
    assert client.delivered == 1


def test_nothing_is_sent_in_the_clear_to_another_machine(caplog):
    server = Server()
    client = Transport("http://10.0.0.1", "secret", http=httpx.MockTransport(server))
    assert not client.submit(events(0))
    assert client.close(5)
    assert server.requests == []
    (message,) = caplog.messages
    assert "whoever listens could read the token" in message
    assert message.endswith("Training goes on, nothing is sent")


def test_an_environment_that_lets_no_client_be_made_gives_one_warning(monkeypatch, caplog):
    monkeypatch.delenv("AMPWATCH_STRICT", raising=False)
    monkeypatch.setenv("ALL_PROXY", "none://127.0.0.1:1")
    client = Transport("https://ampwatch.invalid", "secret")
    client.submit(events(0))
    assert not client.close(1)
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert told.startswith("ampwatch: transport.open failed")


class Several:
    """A server that takes several batches in one request; the first time a number comes, its answer may be another."""

    def __init__(self, **told):
        self.told, self.asked, self.open = told, [], threading.Event()

    def __call__(self, request):
        self.asked.append([batch.seq for batch in posted(request)])
        self.open.wait(5)
        return answered(request, *(self.told.pop(f"of_{s}", stored()) for s in self.asked[-1]))


def test_what_waits_goes_in_one_request():
    server = Several()
    client = transport(server)
    for seq in range(100):
        client.submit(attempts(seq))
    server.open.set()
    assert client.close(5)
    assert [seq for seqs in server.asked for seq in seqs] == list(range(100))
    assert max(map(len, server.asked)) == 64
    assert (len(server.asked) <= 4, client.delivered, client.answered_seq) == (True, 100, 99)


def test_of_several_only_what_has_to_come_again_is_sent_again():
    server, told = Several(of_2=(503, {}), of_3=(422, {"detail": "no"})), []
    client = transport(server, refused=lambda batch, answer: told.append((batch.seq, answer.status)))
    client.submit(attempts(0))
    for seq in range(1, 6):
        client.submit(attempts(seq))
    server.open.set()
    assert client.close(5)
    assert (server.asked[-1], told, client.delivered) == ([2], [(3, 422)], 5)
    assert sum(seqs.count(2) for seqs in server.asked) == 2


def test_what_has_to_come_again_is_not_answered_though_what_came_after_it_is():
    server = Several(of_1=(503, {}, 3600))
    client = transport(server, reread=lambda _again: [attempts(seq) for seq in range(4)])
    client.catch_up(3)
    server.open.set()
    while client.delivered < 3:
        time.sleep(0.01)
    assert client.answered_seq == -1
    assert client.close(5)
    assert client.answered_seq == 3


def test_what_did_not_fit_is_read_again_in_requests_of_several():
    server, spooled = Several(), [attempts(seq) for seq in range(70)]
    client = transport(server, reread=lambda _again: spooled, queue_bytes=0)
    for batch in spooled:
        client.submit(batch)
    server.open.set()
    assert client.close(5)
    assert [seq for seqs in server.asked for seq in seqs] == list(range(70))
    assert len(server.asked) <= 3
