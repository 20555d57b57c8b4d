"""Reads of long runs: 100 k and 2 M attempts of 300 tensors, cold, warm, and while batches come in.

    python benchmarks/queries.py [--attempts 100000 2000000] [--tensors 300] [--repeats 40] [--keep DIR]

The attempts go through inbox and compactor, with the diagnosis on. The tensor rows (24 M of them at 2 M attempts, 15 GB as
they are sent) are folded by the fold's own functions, 16 different windows of 1,024 attempts over and over. A server of its own
process answers; times are those of a client on the same machine. Cold: the file is out of the page cache.
"CPU" is what the server spent on a request, which other work on the machine does not lengthen.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import tables
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ampwatch import records
from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.records import Event
from ampwatch_server.db import Database
from ampwatch_server.diagnoser import RunDiagnosis, stored_batches
from ampwatch_server.lease import Lease
from ampwatch_server.limits import check
from ampwatch_server.roll import roll
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings, database_url
from ampwatch_server.store import codec
from ampwatch_server.store.cover import Where, level_points
from ampwatch_server.store.place import Window, write_chunks, write_parts
from ampwatch_server.store.rows import union
from ampwatch_server.store.tail import decode
from ampwatch_server.store.windows import WINDOW, point_size

BATCH = 10 * WINDOW
VARIANTS = 16
PRODUCER = "ab" * 16
CONSOLE = Console(width=110)


def build(service: Service, attempts: int, tensors: int) -> None:
    """Store a finished run."""
    rng = np.random.default_rng(0)
    seq = 0
    for first in track(range(0, attempts, BATCH), f"{attempts:,} attempts", console=CONSOLE):
        rows = tables.attempts(rng, first, min(BATCH, attempts - first))
        events = [Event("skip", 1.7e9 + int(a) * 0.25, int(a), int(a)) for a in rows["attempt"][499::500]]
        events += tables.described(tensors) if first == 0 else []
        key = {"producer": PRODUCER, "run": "run", "rank": 0}
        for batch in (
            records.pack_events(events, seq=seq, **key),
            tables.batch("attempts", rows, seq + 1, "run", PRODUCER),
        ):
            service.inbox.append(batch, check(batch)).result()
        seq += 2
        service.compactor.process("run")
    fold_tensors(service, rng, attempts, tensors)
    end = records.pack_events([Event("finish", 1.7e9, data={"attempts": attempts})], seq=seq, **key)
    service.inbox.append(end, check(end)).result()
    service.compactor.process("run")


def fold_tensors(service: Service, rng: np.random.Generator, attempts: int, count: int) -> None:
    """Chunks and parts of every window, then the levels above."""
    variants = []
    for i in range(VARIANTS):
        rows = tables.tensors(rng, np.arange(0, WINDOW, tables.EVERY), count)
        table = union([decode(tables.batch("tensors", rows, i, "run", PRODUCER))])
        assert table is not None
        points = level_points("tensors", table, point_size("tensors", 1))
        variants.append((table, points))
    where = Where(1, "tensors", 0)
    firsts = list(range(0, attempts, WINDOW))
    for some in track([firsts[i : i + 16] for i in range(0, len(firsts), 16)], "tensors", console=CONSOLE):
        chosen = {first: variants[(first // WINDOW) % VARIANTS] for first in some}
        chunks = {Window(where, 0, first): moved(v[0], first) for first, v in chosen.items()}
        parts = {Window(where, 1, first): moved(v[1], first) for first, v in chosen.items()}
        counts = {Window(where, 0, first): len(v[0]["attempt"]) for first, v in chosen.items()}
        service.database.write(
            lambda c, d=chunks, n=counts, p=parts: (write_chunks(c, d, n), write_parts(c, p))
        )
    service.database.write(lambda c: c.exec_driver_sql("UPDATE producers SET rolled = 0"))
    lease = Lease("run", "benchmark", service.settings)
    service.database.write(lambda c: c.exec_driver_sql("UPDATE run_state SET holder = 'benchmark'"))
    with CONSOLE.status("levels above"):
        roll(service.database, lease, 1, attempts)
    service.database.write(lease.release)


def moved(table: records.Table, by: int) -> codec.Encoded:
    """A window at another place."""
    return codec.encode(table | {"attempt": table["attempt"] + by})


class Server:
    """A server in a process of its own, which stores into this file, or at this URL."""

    def __init__(self, database: Path, url: str = "", compactor: str = "process") -> None:
        environ = os.environ | {"XDG_CONFIG_HOME": str(database.parent), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "ampwatch", "serve", "--port", "0", "--compactor", compactor]
        self._process = subprocess.Popen(
            [*command, "--database", url or str(database)],
            env=environ,
            cwd=database.parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        told = next(line for line in self._process.stdout if "http://" in line)
        self.link = f"http://{told.split('http://')[1].split()[0]}"  # signs one browser in
        self.url = self.link.split("/")[2]
        self.token = (database.parent / "ampwatch" / "token").read_text().strip()

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=f"http://{self.url}", headers=headers, timeout=120)

    def processes(self) -> list[int]:
        """The one that answers, and the one that the compactor has of its own."""
        found = [self._process.pid]
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            with suppress(OSError):  # of a thread that has ended meanwhile
                found += map(int, path.read_text().split())
        return found

    def cpu_s(self, *, answering: bool = False) -> float:
        """CPU time so far, s, of all its processes, or of the one that answers."""
        pids = self.processes()[: 1 if answering else None]
        fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self, *, peak: bool = False) -> float:
        """Resident memory of all its processes, now or at most."""
        return sum(self._of_each("status", "VmHWM:" if peak else "VmRSS:")) / 1024

    def written_bytes(self) -> int:
        """What its processes have given to the disk."""
        return sum(self._of_each("io", "write_bytes"))

    def _of_each(self, file: str, name: str) -> list[int]:
        lines = [
            line for pid in self.processes() for line in Path(f"/proc/{pid}/{file}").read_text().splitlines()
        ]
        return [int(line.split()[1]) for line in lines if line.startswith(name)]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def drop_from_cache(database: Path) -> None:
    for path in database.parent.glob(f"{database.name}*"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def asked(attempts: int) -> dict[str, str]:
    near, far = attempts // 2, attempts // 2 + 5000
    return {
        "runs": "/v1/runs",
        "series, whole": "/v1/runs/run/series?names=scale,loss,norm",
        "series, 5,000 attempts": f"/v1/runs/run/series?names=scale,loss,norm&from={near}&to={far}",
        "heatmap, whole": "/v1/runs/run/heatmap",
        "heatmap, 5,000 attempts": f"/v1/runs/run/heatmap?from={near}&to={far}",
        "heatmap, half": f"/v1/runs/run/heatmap?from={near}",
        "events, a page": "/v1/runs/run/events?limit=200",
        "findings": "/v1/runs/run/findings",
    }


def timed(client: httpx.Client, path: str) -> float:
    started = time.perf_counter()
    client.get(path).raise_for_status()
    return (time.perf_counter() - started) * 1000


def measure(database: Path, attempts: int, repeats: int, compactor: str) -> dict[str, list[str]]:
    """Milliseconds of each question: cold, p50, p95, CPU, and p50 and p95 while batches come in."""
    found: dict[str, list[str]] = {}
    server = Server(database, compactor=compactor)
    time.sleep(3)  # until all of it has started
    with server.client() as client:
        for name, path in asked(attempts).items():
            drop_from_cache(database)
            cold = timed(client, path)
            before, times = server.cpu_s(), [timed(client, path) for _ in range(repeats)]
            cpu_ms = (server.cpu_s() - before) / repeats * 1000
            found[name] = [f"{cold:.0f}", *quantiles(times), f"{cpu_ms:.1f}"]
    stop = multiprocessing.Event()
    sender = multiprocessing.Process(target=send, args=(server.url, server.token, stop))
    sender.start()
    time.sleep(3)
    with server.client() as client:
        for name, path in asked(attempts).items():
            found[name] += quantiles([timed(client, path) for _ in range(repeats)])
    stop.set()
    sender.join()
    server.stop()
    return found


def taken_over(database: Path) -> str:
    """What a server spends that takes the run over: its diagnosis is made anew."""
    opened = Database(database_url(str(database)))
    started = time.process_time()
    with opened.read() as connection:
        diagnosis = RunDiagnosis(Diagnosis(), stored_batches(connection, "run"))
    read_s = time.process_time() - started
    diagnosis.result()
    opened.close()
    return f"taken over: {read_s:.1f} s CPU to read, {time.process_time() - started - read_s:.1f} s to judge"


def quantiles(times: list[float]) -> list[str]:
    return [f"{statistics.median(times):.1f}", f"{statistics.quantiles(times, n=20)[-1]:.1f}"]


def send(url: str, token: str, stop: threading.Event, per_s: int = 100) -> None:
    """100,000 attempts a second in batches of 1,000: half of the rate that a server must take."""
    rng, producer = np.random.default_rng(1), os.urandom(16).hex()
    rows = tables.attempts(rng, 0, 1000)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/vnd.ampwatch.batch"}
    started, sent = time.monotonic(), 0
    with httpx.Client(base_url=f"http://{url}", headers=headers, timeout=60) as client:
        while not stop.is_set():
            table = rows | {"attempt": rows["attempt"] + sent * 1000}
            body = records.to_bytes(tables.batch("attempts", table, sent, "other", producer))
            client.post("/v1/batches", content=body).raise_for_status()
            sent += 1
            time.sleep(max(0.0, started + sent / per_s - time.monotonic()))
    took = time.monotonic() - started
    CONSOLE.print(f"meanwhile {sent * 1000 / took:,.0f} attempts/s came in")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attempts", type=int, nargs="+", default=[100_000, 2_000_000])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument(
        "--keep", type=Path, help="folder to build in, and to read from where it was built before"
    )
    parser.add_argument(
        "--compactor", choices=["process", "thread"], default="process", help="as of ampwatch serve"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for attempts in given.attempts:
            place = (given.keep or Path(folder)) / str(attempts)
            database = place / "ampwatch.db"
            started = time.monotonic()
            if not database.exists():
                place.mkdir(parents=True)
                service = Service(Settings(str(database)), Diagnosis)
                build(service, attempts, given.tensors)
                service.database.close()
            size = sum(path.stat().st_size for path in place.glob("ampwatch.db*"))
            samples = attempts // tables.EVERY * given.tensors
            CONSOLE.print(
                f"{attempts:,} attempts, {given.tensors} tensors ({samples:,} samples): {size / 1e6:,.0f} MB, "
                f"built in {time.monotonic() - started:.0f} s"
            )
            shown = Table("ms", "cold", "p50", "p95", "CPU", "p50 ingesting", "p95 ingesting")
            for name, figures in measure(database, attempts, given.repeats, given.compactor).items():
                shown.add_row(name, *figures)
            CONSOLE.print(shown)
            CONSOLE.print(taken_over(database))


if __name__ == "__main__":
    main()
