from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import sent

from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.errors import AmpwatchError, SettingsError
from ampwatch.records import Event
from ampwatch.spool_writer import SpoolWriter
from ampwatch_server.serve import running, serve
from ampwatch_server.service import MOOD_S, Service
from ampwatch_server.settings import Settings

SCRIPT = """
import sys
from pathlib import Path
from ampwatch_server.serve import serve
serve(directory=Path(sys.argv[1]), port=0, ready=lambda link: print(link, flush=True))
"""


def test_a_port_in_use_says_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AmpwatchError, match=rf"port {port} of 127.0.0.1 is in use.*--port {port + 1}"):
            serve(port=port, database=str(tmp_path / "a.db"))
    assert not (tmp_path / "a.db").exists()


def test_a_host_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="host: 'no such host' is not an address"):
        serve(host="no such host", port=0, database=str(tmp_path / "a.db"))


def written(directory: Path) -> None:
    writer = SpoolWriter(directory, "r", sent.P, max_bytes=1 << 20)
    writer.write([sent.events(Event("run", 1.0, data={"name": "n"})), sent.attempts(0, 3, 1)])
    writer.close()


def files(directory: Path) -> dict[str, tuple[float, bytes]]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime, path.read_bytes()) for path in found}


def test_a_damaged_file_of_a_directory_is_named(tmp_path: Path, connect, caplog) -> None:
    written(tmp_path / "runs")
    (segment,) = tmp_path.glob("runs/r/*/attempts-*.awb")
    segment.write_bytes(b"\xff" * segment.stat().st_size)
    with running(database=str(tmp_path / "a.db"), directory=tmp_path / "runs") as server, connect(server):
        sent.until(lambda: f"{segment} is damaged: nothing is read from its byte 0 on" in caplog.text)


def test_a_directory_is_followed_and_never_changed(tmp_path: Path, connect) -> None:
    directory = tmp_path / "runs"
    written(directory)
    before = files(directory)
    with running(database=str(tmp_path / "a.db"), directory=directory) as server, connect(server) as client:
        sent.until(lambda: client.get("/v1/runs/r").json().get("attempts") == 3)
        more = SpoolWriter(directory, "s", sent.Q, max_bytes=1 << 20)
        more.write([sent.attempts(0, 5, 0, run="s", producer=sent.Q)])
        sent.until(lambda: client.get("/v1/runs/s").json().get("attempts") == 5)
        more.close()
    assert {path: state for path, state in files(directory).items() if f"{os.sep}r{os.sep}" in path} == before


def test_a_run_that_was_deleted_stays_so_after_a_restart(tmp_path: Path, connect) -> None:
    directory, database = tmp_path / "runs", str(tmp_path / "a.db")
    written(directory)
    for path in directory.rglob("*.awb"):
        os.utime(path, (1e9, 1e9))
    with running(database=database, directory=directory) as server, connect(server) as client:
        sent.until(lambda: client.get("/v1/runs/r").status_code == 200)
        assert client.delete("/v1/runs/r").status_code == 204
    more = SpoolWriter(directory, "s", sent.Q, max_bytes=1 << 20)
    more.write([sent.attempts(0, 5, 0, run="s", producer=sent.Q)])
    more.close()
    with running(database=database, directory=directory) as server, connect(server) as client:
        sent.until(lambda: client.get("/v1/runs/s").status_code == 200)
        assert [run["run"] for run in client.get("/v1/runs").json()["items"]] == ["s"]


def test_old_records_do_not_look_alive(tmp_path: Path, connect) -> None:
    directory = tmp_path / "runs"
    written(directory)
    for path in directory.rglob("*.awb"):
        os.utime(path, (1e9, 1e9))
    for _ in range(2):  # again: what is stored already changes nothing
        with (
            running(database=str(tmp_path / "a.db"), directory=directory) as server,
            connect(server) as client,
        ):
            run = sent.until(
                lambda c=client: c.get("/v1/runs/r").json() if c.get("/v1/runs/r").is_success else None
            )
            assert (run["status"], run["last_seen"]) == ("crashed", 1e9)


def test_processes_of_a_copied_folder_keep_their_order(tmp_path: Path, connect) -> None:
    directory = tmp_path / "runs"
    for producer, begun in ((sent.Q, 1e9), (sent.P, 2e9)):
        writer = SpoolWriter(directory, "r", producer, max_bytes=1 << 20)
        writer.write(
            [sent.events(Event("run", begun), producer=producer), sent.attempts(0, 3, 1, producer=producer)]
        )
        writer.close()
    for path in directory.rglob("*.awb"):
        os.utime(path, (3e9, 3e9))
    with running(database=str(tmp_path / "a.db"), directory=directory) as server, connect(server) as client:
        sent.until(lambda: client.get("/v1/runs/r").json().get("attempts") == 6)
        run = client.get("/v1/runs/r").json()
    assert [(p["producer"], p["begins"]) for p in run["producers"]] == [(sent.Q, 0), (sent.P, 3)]
    assert (run["started"], run["last_seen"]) == (1e9, 3e9)


def test_a_damaged_record_is_passed_over(tmp_path: Path, connect, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "runs"
    writer = SpoolWriter(directory, "r", sent.P, max_bytes=1 << 20)
    writer.write([sent.events(Event("skip", 1.0, attempt=2**63))])
    writer.write([sent.attempts(0, 3, 1)])
    writer.close()
    with running(database=str(tmp_path / "a.db"), directory=directory) as server, connect(server) as client:
        sent.until(lambda: client.get("/v1/runs/r").json().get("attempts") == 3)
    assert [r.message for r in caplog.records if "passed over" in r.message]


def test_serve_keeps_its_files_with_the_user_and_stops_on_a_signal(tmp_path: Path) -> None:
    directory = tmp_path / "runs"
    written(directory)
    homes = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("CONFIG", "CACHE", "DATA")}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(directory)]
    with subprocess.Popen(command, env=os.environ | homes, stdout=subprocess.PIPE, text=True) as process:
        link = process.stdout.readline().strip()
        with httpx.Client(follow_redirects=True) as browser:
            assert browser.get(link).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    assert len(list((tmp_path / "CACHE" / "ampwatch").glob("*.db"))) == 1
    assert (tmp_path / "CONFIG" / "ampwatch" / "token").stat().st_mode & 0o777 == 0o600


def test_an_impatient_ctrl_c_ends_without_a_traceback(tmp_path: Path) -> None:
    written(tmp_path / "runs")
    homes = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("CONFIG", "CACHE", "DATA")}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path / "runs")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | homes, **pipes) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert (process.wait(10), process.stderr.read()) == (0, "")


def test_what_is_followed_is_tried_again_until_the_database_takes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = SpoolWriter(tmp_path / "runs", "r", sent.P, max_bytes=1 << 20)
    writer.write([sent.attempts(0, 3000, 0)])
    writer.close()
    service = Service(Settings(str(tmp_path / "a.db"), directory=tmp_path / "runs"), Diagnosis)
    sent.allow_pages(service.database, 1)
    service.start()
    sent.until(lambda: "database or disk is full; trying again" in caplog.text)
    sent.allow_pages(service.database, 1 << 20)
    sent.until(lambda: sent.attempts_of(service, "r") == 3000)
    service.stop()


def test_clients_come_soon_while_a_run_is_young_or_in_trouble(service: Service, clock: list[float]) -> None:
    failing = {"loss": [float("nan")] * 12, "found_inf": [1] * 12, "skipped": [1] * 12}
    sent.store(service, sent.attempts(0, 3), sent.attempts(0, 12, run="bad", producer=sent.Q, **failing))
    assert service.look_up_wait_s("r") == 1.0
    clock[0] += 999
    assert 10 <= service.look_up_wait_s("r") <= 20
    assert 10 <= service.known_wait_s("r") <= 20
    assert service.look_up_wait_s("bad") == 1.0
    assert service.known_wait_s("unknown") is None


def test_one_of_many_senders_looks_up_when_to_come_again(service: Service) -> None:
    sent.store(service, sent.attempts(0, 3))
    service.look_up_wait_s("r")
    time.sleep(MOOD_S)
    assert [service.known_wait_s("r") for _ in range(3)] == [None, 1.0, 1.0]
