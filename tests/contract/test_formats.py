"""Old and new: batches of each released format are read, stored and shown; a server's answers of each are understood."""

import json
import re
import time
from pathlib import Path

import httpx
import pytest

import ampwatch_dashboard
from ampwatch import answers, records, spool
from ampwatch_server.serve import running

FORMATS = sorted((Path(__file__).parents[1] / "formats").glob("[0-9]*"))


@pytest.fixture(params=FORMATS, ids=lambda folder: f"version {folder.name}")
def folder(request):
    return request.param


def batches(folder):
    return [batch for kind in records.KINDS for batch in spool.read_segment(folder / f"{kind}.awb")]


def test_there_is_a_folder_for_the_version_that_is_written_now():
    assert [int(folder.name) for folder in FORMATS] == list(range(1, records.FORMAT_VERSION + 1))


def test_a_batch_says_what_it_said_when_it_was_written(folder):
    expected = json.loads((folder / "expected.json").read_text())
    events, *tables = batches(folder)
    said = [{name: getattr(event, name) for name in event.__struct_fields__} for event in events.events()]
    assert (
        json.loads(json.dumps(said).replace("NaN", '"NaN"').replace("Infinity", '"Infinity"'))
        == expected["events"]
    )
    for batch in tables:
        shown = {name: records.to_json_list(column) for name, column in batch.table().items()}
        assert shown == expected[batch.kind]


def test_what_is_written_now_has_the_same_bytes(folder):
    if int(folder.name) == records.FORMAT_VERSION:
        for batch in batches(folder):
            key = {"producer": batch.producer, "seq": batch.seq, "run": batch.run, "rank": batch.rank}
            if batch.kind == "events":
                again = records.pack_events(batch.events(), **key)
            else:
                again = records.pack_table(batch.kind, batch.table(), **key)
            assert spool.frame(again) == (folder / f"{batch.kind}.awb").read_bytes()


def test_a_server_stores_and_shows_it(folder, tmp_path):
    with running(database=f"sqlite:///{tmp_path / 'a.db'}") as server:
        client = httpx.Client(
            base_url=f"{server.url}/v1", headers={"Authorization": f"Bearer {server.token}"}
        )
        binary = {"Content-Type": "application/vnd.ampwatch.batch"}
        sent = [(records.to_bytes(batch), binary) for batch in batches(folder)]
        sent.append(((folder / "attempts.json").read_bytes(), {"Content-Type": "application/json"}))
        with client:
            stored = [
                client.post("/batches", content=data, headers=how).json()["stored"] for data, how in sent
            ]
            while len(events := client.get("/runs/golden/events").json()["items"]) < 4:
                time.sleep(0.02)
            series = client.get("/runs/golden/series", params={"names": "scale,loss"}).json()["streams"]
    assert stored == [True] * 4
    assert sorted(event["type"] for event in events) == ["run", "scaler", "skip", "tensors"]
    assert [attempt for stream in series for attempt in stream["attempt"]] == [0, 1, 2, 3, 4, 5]


def test_the_answers_of_its_server_are_understood(folder):
    for given in json.loads((folder / "answers.json").read_text()):
        response = httpx.Response(given["status"], headers=given["headers"], text=given["body"])
        assert answers.read(response, "http://127.0.0.1:1", "secret").outcome == given["outcome"], given


def test_the_page_offers_every_type_of_event():
    script = (Path(ampwatch_dashboard.__file__).parent / "static" / "events.js").read_text()
    (offered,) = re.findall(r"const TYPES = (\[.*\]);", script)
    assert sorted(json.loads(offered)) == sorted(records.EVENT_TYPES)
