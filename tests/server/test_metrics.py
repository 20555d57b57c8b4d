from __future__ import annotations

import re
from pathlib import Path

import httpx
import sent

from ampwatch.records import Event
from ampwatch_server.metrics import NAMES, Metrics
from ampwatch_server.serve import running

DOCS = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def values(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_every_metric_is_documented() -> None:
    assert set(re.findall(r"`(ampwatch_\w+)", DOCS.partition("### Metrics")[2])) == set(NAMES)


def test_what_was_sent_is_counted(database: str, connect) -> None:
    lost = [
        Event("dropped", 1.0, data={"reason": 'a "full" disk', "first_seq": 3, "last_seq": 5}),
        Event("dropped", 1.0, data={"reason": "queue", "first_seq": -1, "last_seq": -1, "count": 7}),
        Event("dropped", 1.0, data={"reason": "room", "first_seq": 3, "last_seq": 90, "batches": 2}),
        Event("dropped", 1.0, data={"reason": None, "count": "x"}),
    ]
    with running(database=database) as server, connect(server) as client:
        sent.send(client, sent.attempts(0, 30, 0), sent.attempts(0, 30, 0), sent.events(*lost, seq=1))
        sent.until(lambda: values(client).get('ampwatch_dropped_total{reason="queue"}') == 7)
        found = sent.until(lambda: (v := values(client))["ampwatch_lag_seconds"] == 0 and v)
    expected = {
        'ampwatch_batches_total{outcome="stored"}': 2,
        'ampwatch_batches_total{outcome="repeated"}': 1,
        "ampwatch_attempts_total": 30,
        'ampwatch_dropped_total{reason="a \\"full\\" disk"}': 3,
        'ampwatch_dropped_total{reason="room"}': 2,
        'ampwatch_dropped_total{reason="None"}': 1,
        'ampwatch_runs{status="live"}': 1,
        "ampwatch_alerts_waiting": 0,
        "ampwatch_watchers": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["ampwatch_database_bytes"] > 10_000
    assert found["ampwatch_commits_total"] >= 3
    assert found["ampwatch_commit_seconds_total"] > 0


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    for i in range(100):
        metrics.add("ampwatch_dropped_total", label=("reason", str(i)))
    lines = [line for line in metrics.text({}).splitlines() if line.startswith("ampwatch_dropped_total{")]
    assert len(lines) == 65
    assert lines[-1] == 'ampwatch_dropped_total{reason="other"} 36'
