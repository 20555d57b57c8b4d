from __future__ import annotations

import httpx
import sent

from ampwatch_server.rates import Rates
from ampwatch_server.serve import running


def test_a_sender_may_burst_and_then_waits() -> None:
    now = [0.0]
    rates = Rates(2.0, lambda: now[0])
    assert [rates.wait_s("a") for _ in range(21)] == [*[0.0] * 20, 0.5]
    assert rates.wait_s("b") == 0.0
    now[0] = 1.0
    assert [rates.wait_s("a") for _ in range(3)] == [0.0, 0.0, 0.5]


def test_too_many_batches_of_one_process_are_sent_back(tmp_path, connect) -> None:
    with running(str(tmp_path / "a.db"), producer_per_s=0.1) as server, connect(server) as client:
        sent.send(client, sent.attempts(0, 1))
        refused: httpx.Response = sent.post(client, sent.attempts(1, 2, 1))
        other = sent.post(client, sent.attempts(0, 1, producer=sent.Q))
    assert (refused.status_code, refused.headers["Retry-After"], other.status_code) == (429, "10", 200)
    assert refused.json()["detail"] == f"producer {sent.P} sends too often; send the same batch again later"
