"""Ingest: batches a second into one server, durable, authenticated, validated and diagnosed.

    python benchmarks/ingest.py [big|fifty|ranks|nodes|catchup|tensors ...] [--seconds 20] [--ranks 8000] [--peers]

big      one client, 1,000 attempts of 20 scalars a batch
fifty    as big, 50 attempts a batch, over 8 connections
ranks    8,000 ranks of one run, 5 attempts a batch, over 64 connections; the first batch of each is sent before
nodes    as ranks, the batches of 8 ranks in a request
catchup  as big, through a backlog of 200 batches, while a second client asks for runs, series and findings
tensors  one client, 41 samples of 300 tensors with histograms a batch

A server in processes of its own stores into a fresh SQLite file, or into the empty database of --database. "a core" divides
by the CPU time of the server while clients sent: of the process that answers, of all its processes, and of these until
everything is folded and diagnosed. Other work on the machine does not change it much. Acknowledged is what was answered 200
until the clients stopped; written is what the server gave to the disk, stored the file at the end. --peers puts trackers
through 20 scalars a step in environments of their own, made here by pip. How long news waits to be seen: lag.py.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
import venv
from functools import partial
from itertools import islice
from pathlib import Path

import httpx
import numpy as np
import tables
from queries import Server
from rich.console import Console
from rich.table import Table

from ampwatch import records

CONSOLE = Console(width=120)
TOGETHER = 8
PEERS = {"mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
PEER_STEPS = {"mlflow": 1000, "tensorboard": 2000, "wandb": 5000, "trackio": 5000}


def big(seconds: float, size: int = 1000):
    """Bodies of so many attempts, made before the clock runs."""
    rng, producer = np.random.default_rng(0), os.urandom(16).hex()
    rows = tables.attempts(rng, 0, size)
    for seq in range(int(400_000 / size * seconds)):
        table = rows | {"attempt": rows["attempt"] + seq * size}
        yield records.to_bytes(tables.batch("attempts", table, seq, "big", producer)), size


def fifty(seconds: float):
    """Bodies of 50 attempts."""
    yield from big(seconds, 50)


def ranks(seconds: float, count: int):
    """Bodies of 5 attempts of so many ranks in turn."""
    rng = np.random.default_rng(0)
    rows = tables.attempts(rng, 0, 5)
    producers = [os.urandom(16).hex() for _ in range(count)]
    for i in range(count + int(2000 * seconds)):
        seq, rank = divmod(i, count)
        table = rows | {"attempt": rows["attempt"] + seq * 5}
        yield records.to_bytes(tables.batch("attempts", table, seq, "ranks", producers[rank], rank)), 5


def nodes(seconds: float, count: int):
    """Bodies of 8 batches of 5 attempts each, of so many ranks in turn."""
    batches = (records.from_bytes(body) for body, _ in ranks(4 * seconds, count))
    while len(some := list(islice(batches, TOGETHER))) == TOGETHER:
        yield records.join(some), 5 * TOGETHER


def tensor_rows(seconds: float):
    """Bodies of 12,300 tensor rows."""
    rng, producer = np.random.default_rng(0), os.urandom(16).hex()
    yield (
        records.to_bytes(
            records.pack_events(tables.described(300), producer=producer, seq=0, run="tensors", rank=0)
        ),
        0,
    )
    rows = tables.tensors(rng, np.arange(0, 1024, tables.EVERY), 300)
    for seq in range(1, 1 + int(4 * seconds)):
        table = rows | {"attempt": rows["attempt"] + (seq - 1) * 1024}
        yield records.to_bytes(tables.batch("tensors", table, seq, "tensors", producer)), len(rows["attempt"])


async def post(
    server: Server, bodies: list[tuple[bytes, int]], connections: int, seconds: float, together: int = 1
) -> tuple[int, int]:
    """Send for so long, or until nothing is left; batches and rows that were acknowledged."""
    deadline, left, done = time.monotonic() + seconds, iter(bodies), [0, 0]

    async def client() -> None:
        sending = await Connection.open(server, "batch" if together == 1 else "batches")
        for body, rows in left:
            status = await sending.post(body)
            if status in (429, 503):
                await asyncio.sleep(0.2)
                continue
            assert status == 200, status
            done[0] += together
            done[1] += rows
            if time.monotonic() > deadline:
                break
        sending.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    return done[0], done[1]


class Connection:
    """Posts batches over one connection at next to no cost: client and server share the cores here."""

    def __init__(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._head, self._reader, self._writer = head, reader, writer

    @classmethod
    async def open(cls, server: Server, what: str = "batch") -> "Connection":
        head = (
            f"POST /v1/batches HTTP/1.1\r\nHost: {server.url}\r\nAuthorization: Bearer {server.token}\r\n"
            f"Content-Type: application/vnd.ampwatch.{what}\r\nContent-Length: "
        ).encode()
        return cls(head, *await asyncio.open_connection(*server.url.split(":")))

    async def post(self, body: bytes) -> int:
        self._writer.write(self._head + str(len(body)).encode() + b"\r\n\r\n" + body)
        await self._writer.drain()
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await self._reader.readexactly(int(length.split(b":")[1]))
        return int(answer.split(b" ", 2)[1])

    def close(self) -> None:
        self._writer.close()


async def ask(server: Server, run: str, stop: asyncio.Event) -> list[float]:
    """Milliseconds of reads, one after the other."""
    times = []
    headers = {"Authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(base_url=f"http://{server.url}", headers=headers, timeout=120) as http:
        while not stop.is_set():
            for path in ("/v1/runs", f"/v1/runs/{run}/series", f"/v1/runs/{run}/findings"):
                started = time.perf_counter()
                await http.get(path)
                times.append((time.perf_counter() - started) * 1000)
    return times


PROFILES = {
    "big": (big, 1, 1),
    "fifty": (fifty, 8, 1),
    "ranks": (ranks, 64, 1),
    "nodes": (nodes, 64, TOGETHER),
    "tensors": (tensor_rows, 1, 1),
    "catchup": (big, 1, 1),
}  # what is sent, over how many connections, and how many batches a request holds


def before(name: str, server: Server, bodies: list[tuple[bytes, int]], count: int) -> list[tuple[bytes, int]]:
    """Send what comes before the clock runs, and answer the rest."""
    first = {"catchup": 200, "ranks": count, "nodes": count // TOGETHER}.get(name, 0)
    asyncio.run(post(server, bodies[:first], 64, 600, PROFILES[name][2]))
    if name in ("ranks", "nodes"):
        drained(server)
    return bodies[first:]


async def profile(
    name: str, server: Server, bodies: list[tuple[bytes, int]], seconds: float
) -> tuple[int, int, list[float]]:
    _, connections, together = PROFILES[name]
    if name != "catchup":
        return *await post(server, bodies, connections, seconds, together), []
    stop = asyncio.Event()
    asking = asyncio.create_task(ask(server, "big", stop))
    done = await post(server, bodies, connections, seconds, together)
    stop.set()
    return *done, await asking


def drained(server: Server, most_s: float = 60) -> None:
    """Wait until the server has nothing more to fold or to diagnose."""
    before, deadline = -1.0, time.monotonic() + most_s
    while server.cpu_s() - before > 0.1 and time.monotonic() < deadline:
        before = server.cpu_s()
        time.sleep(3)


def run(name: str, seconds: float, count: int, url: str, compactor: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "ampwatch.db", url, compactor)
        with server.client() as client:
            client.get("/v1/runs").raise_for_status()
        make = PROFILES[name][0]
        make = partial(make, count=count) if name in ("ranks", "nodes") else make
        bodies = before(name, server, list(make(seconds)), count)
        time.sleep(3)  # until all of it has started
        idle_s, started, memory = server.cpu_s(), time.monotonic(), server.memory_mb()
        answering_s = server.cpu_s(answering=True)
        batches, rows, reads = asyncio.run(profile(name, server, bodies, seconds))
        took, ack_cpu_s = time.monotonic() - started, server.cpu_s() - idle_s
        answering_s = server.cpu_s(answering=True) - answering_s
        drained(server)
        cpu_s, written, peak = server.cpu_s() - idle_s, server.written_bytes(), server.memory_mb(peak=True)
        server.stop()
        stored = sum(path.stat().st_size for path in Path(folder).glob("ampwatch.db*"))
    asked = (
        f"{statistics.median(reads):.0f} / {statistics.quantiles(reads, n=20)[-1]:.0f}"
        if len(reads) > 1
        else ""
    )
    return [
        name, f"{batches / took:,.0f}", f"{rows / took:,.0f}", f"{batches / answering_s:,.0f}",
        f"{batches / ack_cpu_s:,.0f}", f"{rows / cpu_s:,.0f}",
        f"{written / max(1, rows):,.0f}", f"{stored / max(1, rows):,.0f}", f"{memory:.0f} → {peak:.0f}", asked,
    ]  # fmt: skip


PEER_CODE = """
import os, sys, time, tempfile
which, steps, names = sys.argv[1], int(sys.argv[2]), [f"m{i}" for i in range(20)]
folder = tempfile.mkdtemp(); os.chdir(folder)
os.environ |= {"TRACKIO_DIR": folder, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
if which == "mlflow":
    import mlflow
    from mlflow.entities import Metric
    mlflow.set_tracking_uri(f"sqlite:///{folder}/ml.db"); mlflow.set_experiment("x")
    client = mlflow.MlflowClient()
    with mlflow.start_run() as run:
        started = time.perf_counter()
        for step in range(0, steps, 50):
            client.log_batch(run.info.run_id, [Metric(n, s * .1, int(time.time() * 1000), s) for s in range(step, step + 50) for n in names])
elif which == "tensorboard":
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    started = time.perf_counter(); writer = EventFileWriter(folder)
    for step in range(steps):
        for name in names:  # what torch's SummaryWriter.add_scalar writes
            value = Summary.Value(tag=name, simple_value=step * .1)
            writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
    writer.close()
elif which == "wandb":
    import wandb
    started = time.perf_counter(); run = wandb.init(project="p", dir=folder)
    for step in range(steps): run.log({name: step * .1 for name in names})
    run.finish()
else:
    import trackio
    started = time.perf_counter(); trackio.init(project="p", name="r")
    for step in range(steps): trackio.log({name: step * .1 for name in names})
    trackio.finish()
took = time.perf_counter() - started
size = sum(os.path.getsize(os.path.join(a, f)) for a, _, files in os.walk(folder) for f in files)
print(f"{steps / took:,.0f} {size / steps:,.0f}")
"""


def peer(name: str, place: Path) -> list[str]:
    python = place / name / "bin" / "python"
    if not python.exists():
        venv.create(place / name, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PEERS[name].split()], check=True)
    done = subprocess.run(
        [python, "-c", PEER_CODE, name, str(PEER_STEPS[name])], capture_output=True, text=True
    )
    if done.returncode:
        return [name, "failed", done.stderr.strip().splitlines()[-1][:60]]
    return [name, *done.stdout.strip().splitlines()[-1].split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profiles", nargs="*", default=list(PROFILES))
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--ranks", type=int, default=8000)
    parser.add_argument("--database", default="", help="URL of PostgreSQL")
    parser.add_argument(
        "--compactor", choices=["process", "thread"], default="process", help="as of ampwatch serve"
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "ampwatch-peers")
    given = parser.parse_args()
    heads = (
        "batches/s",
        "rows/s",
        "batches/s a core, answering",
        "batches/s a core",
        "rows/s a core, folded",
        "B written a row",
        "B stored a row",
    )
    shown = Table("profile", *heads, "MB", "reads, ms p50 / p95")
    for name in given.profiles:
        shown.add_row(*run(name, given.seconds, given.ranks, given.database, given.compactor))
    CONSOLE.print(shown)
    if given.peers:
        others = Table("tracker, 20 scalars a step", "steps/s", "B stored a step")
        for name in PEERS:
            others.add_row(*peer(name, given.environments))
        CONSOLE.print(others)


if __name__ == "__main__":
    main()
