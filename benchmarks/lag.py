"""How long news waits to be seen: of trouble on a server that has all it can do, and of many ranks that come by the clock.

    python benchmarks/lag.py [trouble|steady ...] [--seconds 20] [--ranks 8000]

trouble  ranks of one run send as fast as the server answers; twice a second a process of another run sends losses that are
         NaN. Told is how long after its answer the finding stands in the database
steady   the ranks of one run come by the clock, each every 15 s with its 75 attempts: 5 attempts a second of each. Told
         is `ampwatch_lag_seconds`, once a second

Seconds are by the clock, so that other work on the machine shows in them; "of a core" is CPU time of the server, all of its
threads, by the clock. The first batch of every rank is sent before.
"""

import argparse
import asyncio
import os
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

import httpx
import ingest
import numpy as np
import tables
from queries import Server
from rich.console import Console
from rich.table import Table

from ampwatch import records

CONNECTIONS = 64
ATTEMPTS, EVERY_S = 75, 15.0  # of a batch of `steady`, and from one batch of a rank to the next
PATIENCE_S = 60.0


async def send_trouble(server: Server, database: Path, stop: asyncio.Event) -> list[float]:
    """Runs of one batch of NaN, twice a second; seconds from each answer to its finding."""
    rows = tables.attempts(np.random.default_rng(1), 0, 5)
    rows |= {"loss": np.full(5, np.nan), "found_inf": np.ones(5), "skipped": np.ones(5)}
    sending, watching = await ingest.Connection.open(server), []
    while not stop.is_set():
        run = f"trouble-{len(watching)}"
        batch = tables.batch("attempts", rows, 0, run, os.urandom(16).hex())
        assert await sending.post(records.to_bytes(batch)) == 200
        watching.append(asyncio.create_task(until_found(database, run)))
        await asyncio.sleep(0.5)
    return list(await asyncio.gather(*watching))


async def until_found(database: Path, run: str) -> float:
    began = time.monotonic()
    reading = sqlite3.connect(f"file:{database}?mode=ro", uri=True, isolation_level=None)
    while time.monotonic() < began + PATIENCE_S:
        if reading.execute("SELECT 1 FROM findings WHERE run = ?", (run,)).fetchone():
            break
        await asyncio.sleep(0.02)
    reading.close()
    return time.monotonic() - began


async def trouble(server: Server, database: Path, count: int, seconds: float) -> tuple[float, list[float]]:
    bodies = list(ingest.ranks(2 * seconds, count))
    await ingest.post(server, bodies[:count], CONNECTIONS, 600)
    ingest.drained(server)
    idle_s, stop = server.cpu_s(), asyncio.Event()
    telling = asyncio.create_task(send_trouble(server, database, stop))
    await ingest.post(server, bodies[count:], CONNECTIONS, seconds)
    busy_s = server.cpu_s() - idle_s
    stop.set()
    return busy_s, await telling


async def steady(server: Server, _: Path, count: int, seconds: float) -> tuple[float, list[float]]:
    rows = tables.attempts(np.random.default_rng(0), 0, ATTEMPTS)
    producers = [os.urandom(16).hex() for _ in range(count)]

    def body(i: int) -> tuple[bytes, int]:
        seq, rank = divmod(i, count)
        table = rows | {"attempt": rows["attempt"] + seq * ATTEMPTS}
        batch = tables.batch("attempts", table, seq, "steady", producers[rank], rank)
        return records.to_bytes(batch), ATTEMPTS

    await ingest.post(server, [body(i) for i in range(count)], CONNECTIONS, 600)
    ingest.drained(server)
    bodies = [body(count + i) for i in range(int(seconds * count / EVERY_S))]
    idle_s, began, stop = server.cpu_s(), time.monotonic(), asyncio.Event()
    sampling = asyncio.create_task(lags(server, stop))

    async def client(first: int) -> None:
        sending = await ingest.Connection.open(server)
        for i in range(first, len(bodies), CONNECTIONS):
            await asyncio.sleep(began + i * EVERY_S / count - time.monotonic())
            assert await sending.post(bodies[i][0]) == 200

    await asyncio.gather(*(client(first) for first in range(CONNECTIONS)))
    busy_s = server.cpu_s() - idle_s
    stop.set()
    return busy_s, await sampling


async def lags(server: Server, stop: asyncio.Event) -> list[float]:
    found = []
    headers = {"Authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(base_url=f"http://{server.url}", headers=headers, timeout=120) as http:
        while not stop.is_set():
            lines = (await http.get("/metrics")).text.splitlines()
            found += [float(line.split()[1]) for line in lines if line.startswith("ampwatch_lag_seconds ")]
            await asyncio.sleep(1)
    return found


PROFILES = {"trouble": trouble, "steady": steady}


def measure(name: str, count: int, seconds: float) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "ampwatch.db"
        server = Server(database)
        busy_s, waited = asyncio.run(PROFILES[name](server, database, count, seconds))
        peak = server.memory_mb(peak=True)
        server.stop()
    median, late = statistics.median(waited), statistics.quantiles(waited, n=20)[-1]
    return [name, f"{busy_s / seconds:.2f}", f"{median:.1f} / {late:.1f} of {len(waited)}", f"{peak:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profiles", nargs="*", default=list(PROFILES))
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--ranks", type=int, default=8000)
    given = parser.parse_args()
    shown = Table("profile", "of a core", "waited, s p50 / p95", "MB at most")
    for name in given.profiles:
        shown.add_row(*measure(name, given.ranks, given.seconds))
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
