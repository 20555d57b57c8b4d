"""Bad input on a real loop: training goes on bit for bit, one warning says what to do, and the records are kept."""

from __future__ import annotations

import logging
import math
import resource
import socket
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from torch import nn

import ampwatch
from ampwatch import spool
from ampwatch.settings import Settings

torch.set_num_threads(1)


def trained(scaler, lr=0.1, each=lambda: None):
    """A short training with an overflow in it; weights and scale as text, which NaN equals NaN in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for i in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.full((4, 8), 1e5 if i == 2 else 1.0)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        each()
    return repr([p.tolist() for p in model.parameters()]), repr(scaler.state_dict())


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "runs"
    ampwatch.finish()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def watched(folder, **given):
    settings = Settings(
        **{"dir": folder, "spool_min_free_bytes": 0, "quiet": True, "flush_s": 0.02, "token": "wrong"} | given
    )
    return ampwatch.GradScaler("cpu", settings=settings)


def attempts_in(folder):
    return sum(len(b.table()["attempt"]) for b in spool.read(folder) if b.kind == "attempts")


@contextmanager
def answering(status, content=b"<html>Sign in</html>"):
    """A web server that is none of ours."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def nobody():
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        return f"127.0.0.1:{gone.getsockname()[1]}"


@pytest.mark.parametrize(
    ("scheme", "status", "said"),
    [
        ("http", 200, "does not answer as an ampwatch server does (200, text/html)"),
        ("http", 404, "does not answer as an ampwatch server does (404, text/html)"),
        ("http", 401, "does not accept the token (401): set AMPWATCH_TOKEN"),
        ("https", 200, "It does not speak https; try http://"),
    ],
)
def test_a_server_that_is_none_or_does_not_know_the_token(scheme, status, said, folder, caplog):
    with answering(status) as address:
        got = trained(watched(folder, server=f"{scheme}://{address}"))
        ampwatch.finish()
    assert got == trained(torch.amp.GradScaler("cpu"))
    (warning,) = warnings_of(caplog)
    assert said in warning
    assert warning.endswith(f"Training goes on, and the records are kept in {folder}")
    assert attempts_in(folder) == 5


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (f"http://{nobody()}", "Connection refused. Does `ampwatch serve` run there?"),
        ("https://no-such-host.invalid", "cannot be reached: "),
        ("http://no-such-host.invalid:8642", "whoever listens could read the token"),
        ("no address", "is not an address such as https://ampwatch.example.org"),
    ],
    ids=[
        "nobody listens",
        "no such host",
        "plain http",
        "no address",
    ],  # the port differs from process to process
)
def test_a_server_that_cannot_be_reached(server, said, folder, caplog):
    got = trained(watched(folder, server=server))
    ampwatch.finish()
    assert got == trained(torch.amp.GradScaler("cpu"))
    (warning,) = warnings_of(caplog)
    assert said in warning
    assert attempts_in(folder) == 5


def test_a_directory_that_is_a_file(folder, caplog):
    folder.touch()
    assert trained(watched(folder)) == trained(torch.amp.GradScaler("cpu"))
    ampwatch.finish()
    (warning,) = warnings_of(caplog)
    assert f"{folder} cannot be written: Not a directory" in warning


def test_a_directory_that_cannot_be_made(folder, caplog):
    nowhere = "/proc/ampwatch_runs"  # not even root can
    assert trained(watched(nowhere)) == trained(torch.amp.GradScaler("cpu"))
    ampwatch.finish()
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"ampwatch: {nowhere} cannot be written: ")


def test_a_disk_that_is_full(folder, caplog):
    """Full at 1,500 bytes: the limit of the process on the size of a file, as a quota sets it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    scaler = watched(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        got = trained(scaler)
        ampwatch.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert got == trained(torch.amp.GradScaler("cpu"))
    (warning,) = warnings_of(caplog)
    assert warning.startswith(
        f"ampwatch: {folder} cannot be written any more: File too large. Training goes on"
    )


@pytest.mark.parametrize(
    "given",
    [
        {"init_scale": math.nan},
        {"init_scale": math.inf},
        {"init_scale": 0.0},
        {"init_scale": -4.0},
        {"growth_factor": math.nan, "growth_interval": 1},
        {"growth_factor": math.inf, "growth_interval": 1},
        {"backoff_factor": math.nan},
    ],
    ids=str,
)
def test_numbers_that_are_none_given_to_the_scaler(given, folder, caplog):
    scaler = ampwatch.GradScaler("cpu", **given, settings=Settings.load(dir=folder, quiet=True))
    assert trained(scaler) == trained(torch.amp.GradScaler("cpu", **given))
    ampwatch.finish()
    assert (warnings_of(caplog), attempts_in(folder)) == ([], 5)


def test_an_interval_that_torch_refuses_is_refused_by_torch(folder, caplog):
    for make in (
        torch.amp.GradScaler,
        lambda *a, **k: ampwatch.GradScaler(*a, **k, settings=Settings.load(dir=folder)),
    ):
        with pytest.raises(TypeError, match="must be int, not float"):
            trained(make("cpu", growth_interval=math.nan))
    assert warnings_of(caplog) == []


def test_numbers_that_are_none_in_the_loop(folder, caplog):
    scaler = watched(folder, config={"lr": math.nan, "eps": math.inf})
    got = trained(
        scaler, lr=math.nan, each=lambda: ampwatch.log(loss=math.nan, reward=-math.inf, epoch=math.inf)
    )
    ampwatch.finish()
    assert got == trained(torch.amp.GradScaler("cpu"), lr=math.nan)
    tables = [batch.table() for batch in spool.read(folder) if batch.kind == "attempts"]
    last = {name: tables[-1][name][-1] for name in ("lr", "log.loss", "log.reward", "log.epoch")}
    assert repr(list(map(float, last.values()))) == "[nan, nan, -inf, inf]"
    assert (warnings_of(caplog), attempts_in(folder)) == ([], 5)
