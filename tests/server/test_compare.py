from __future__ import annotations

import httpx
import pytest
import sent

from ampwatch.records import Event
from ampwatch_server import schemas


def described(run: str, producer: str, **config: object) -> sent.Batch:
    data = {"name": run, "world_size": 1, "config": config, "versions": {"torch": "2"}}
    return sent.events(Event("run", 1.0, data=data), run=run, producer=producer)


@pytest.fixture
def two(client: httpx.Client) -> httpx.Client:
    sent.send(client, described("a", sent.P, lr=0.1, opt={"beta": 0.9}, same=1))
    sent.send(client, described("b", sent.Q, lr=0.2, opt={"beta": 0.9, "eps": 1e-8}, same=1))
    sent.send(client, sent.attempts(0, 9, 1, run="a"), sent.attempts(0, 5, 1, run="b", producer=sent.Q))
    sent.until(lambda: [r["attempts"] for r in client.get("/v1/runs?order=name").json()["items"]] == [9, 5])
    return client


def test_runs_stand_beside_each_other_with_what_differs(two: httpx.Client) -> None:
    answer = two.get("/v1/compare?runs=b,a,b&names=loss")
    found = schemas.Comparison.model_validate_json(answer.content, strict=True)
    assert [run.run for run in found.runs] == ["b", "a"]
    assert [len(series.streams[0].attempt) for series in found.series] == [5, 9]
    assert [d.model_dump() for d in found.differences] == [
        {"name": "config.lr", "values": [0.2, 0.1]},
        {"name": "config.opt.eps", "values": [1e-8, None]},
    ]


def test_the_figure_has_a_colour_and_a_place_in_the_legend_for_each_run(two: httpx.Client) -> None:
    data = two.get("/v1/compare/figure?runs=a,b").json()["data"]
    told = [(trace["name"], trace["legendgroup"]) for trace in data if trace["showlegend"]]
    assert told == [("a", "0"), ("b", "1")]
    assert len({trace["line"]["color"] for trace in data}) == 2
    assert {trace["yaxis"] for trace in data} == {"y", "y2", "y3"}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ("", (422, "runs")),
        (",".join("abcdefghijk"), (422, "runs")),
        ("a,%00", (404, None)),
        ("a,x", (404, None)),
    ],
)
def test_runs_that_cannot_be_compared(two: httpx.Client, runs: str, expected: tuple) -> None:
    answer = two.get(f"/v1/compare?runs={runs}")
    assert (answer.status_code, answer.json().get("field")) == expected
