"""Whatever a client puts into the data of an event, it is stored, and every page answers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sent

from ampwatch.records import EVENT_TYPES, Event
from ampwatch_server.serve import running

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
JUNK = [
    None,
    "\x00<b>&",
    2**64 - 1,
    math.nan,
    True,
    [None],
    [[]],
    {"a": None},
    b"\xff",
    {"-1": 1, "\u00b2": 1},
]
LONG = "9" * 5000  # more digits than Python reads as a number


def fields() -> set[str]:
    """Every name that docs/format.md puts between backticks in its table of events."""
    table = FORMAT.read_text().partition("## Events")[2]
    return set(re.findall(r"`([a-z_]+)`", table)) - EVENT_TYPES | {"tensors", "origin", "optimizers"}


def junk() -> list[Event]:
    found = []
    for kind in sorted(EVENT_TYPES):
        flat = [{field: value} for field in sorted(fields()) for value in JUNK]
        nested = [{kind: [{"id": 0} | data]} for data in flat] if kind in ("tensors", "optimizers") else []
        found += [Event(kind, math.nan, attempt=3, data=data) for data in [*flat, *nested]]
    extremes = (-(2**63), 2**63 - 1)
    found += [Event("origin", 1.0, data={"origins": {LONG: LONG}})]
    found += [Event("skip", 1e308, attempt=n, step=n, stream=n, repeat=n) for n in extremes]
    return found


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    database = str(tmp_path_factory.mktemp("junk") / "a.db")
    with (
        running(database=database, engine=sent.NoDiagnosis) as server,
        httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}) as client,
    ):
        sent.send(client, sent.attempts(0, 3, 0), sent.tensors([0], [0], 1), sent.events(*junk(), seq=2))
        sent.until(lambda: client.get("/v1/runs/r/events").json()["items"], 30)
        yield client


@pytest.mark.parametrize(
    "path",
    ["/v1/runs", "/v1/runs/r", "/v1/runs/r/tensors", "/v1/runs/r/findings", "/v1/runs/r/figures/timeline",
     "/v1/runs/r/figures/heatmap?stat=norm", "/v1/runs/r/figures/histogram?tensor=0"],
)  # fmt: skip
def test_every_page_answers(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    json.loads(answer.content, parse_constant=pytest.fail)


def test_every_event_is_stored_as_it_came(client: httpx.Client) -> None:
    kinds, cursor = Counter[str](), ""
    while cursor is not None:
        page = client.get("/v1/runs/r/events", params={"limit": 1000, "cursor": cursor}).json()
        kinds.update(event["type"] for event in page["items"])
        cursor = page["next"]
    assert kinds == Counter(event.type for event in junk())
