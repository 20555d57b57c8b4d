"""What is sent compressed, and what is not."""

from __future__ import annotations

import httpx
import pytest
import sent

from ampwatch_server.compression import LEAST_BYTES

PLAIN = {"Accept-Encoding": "identity"}


@pytest.fixture
def run(client: httpx.Client) -> httpx.Client:
    sent.send(client, sent.attempts(0, 600))
    sent.until(lambda: client.get("/v1/runs/r/series?names=loss").json()["streams"])
    return client


@pytest.mark.parametrize(
    "path", ["/v1/runs/r/series?names=loss,scale", "/assets/plotly.min.js", "/static/base.css", "/settings"]
)
def test_to_who_accepts_it_fewer_bytes_say_the_same(run: httpx.Client, path: str) -> None:
    plain, packed = run.get(path, headers=PLAIN), run.get(path)
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("gzip", "Accept-Encoding")
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content
    assert packed.num_bytes_downloaded < len(plain.content) / 2


def test_what_fits_into_a_packet_goes_as_it_is(run: httpx.Client) -> None:
    answer = run.get("/v1/runs/r/findings")
    assert len(answer.content) < LEAST_BYTES
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("form", ["csv", "json", "ndjson"])
def test_an_export_goes_as_it_is(run: httpx.Client, form: str) -> None:
    answer = run.get(f"/v1/runs/r/export?format={form}")
    assert len(answer.content) > LEAST_BYTES
    assert "content-encoding" not in answer.headers


def test_events_do_not_wait_in_a_compressor(run: httpx.Client) -> None:
    with run.stream("GET", "/v1/live") as stream:
        assert "content-encoding" not in stream.headers
        assert "event: run" in next(text for text in stream.iter_text() if "event:" in text)


@pytest.mark.parametrize("path", ["/assets/plotly.min.js", "/static/base.css"])
def test_what_was_kept_compressed_is_not_sent_again(run: httpx.Client, path: str) -> None:
    packed, plain = run.get(path).headers["etag"], run.get(path, headers=PLAIN).headers["etag"]
    assert packed == f"W/{plain}"
    for tag in (packed, plain):
        assert run.get(path, headers={"If-None-Match": tag}).status_code == 304
