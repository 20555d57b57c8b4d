"""A store for one command: recorded runs read into a database that is gone with it."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ampwatch import spool
from ampwatch.diagnosis.engine import Diagnosis
from ampwatch_dashboard.figures import Theme

from .assets import PLOTLY
from .inbox import Stored
from .limits import check
from .reports import write_report
from .service import Service
from .settings import Settings
from .store.export import Asked, Exporter, Format, Kind

_UNDER_WAY: Final = 64  # batches handed over and not committed yet


@contextmanager
def store_of(directory: Path) -> Iterator[Service]:
    """A service without HTTP that holds what a folder of recorded runs holds, diagnosed. InvalidBatch, RunNotFound."""
    with tempfile.TemporaryDirectory(prefix="ampwatch-") as scratch:
        service = Service(Settings(database=str(Path(scratch) / "runs.db")), Diagnosis)
        try:
            for run in _fill(service, directory):
                service.compactor.process(run)
            yield service
        finally:
            service.database.close()


def export_folder(directory: Path, run: str, form: Format, kind: Kind) -> Iterator[bytes]:
    """The rows of a recorded run, piece by piece."""
    with store_of(directory) as service:
        yield from Exporter(service.database, service.tails, run, Asked(kind)).write(form)


def report_folder(directory: Path, run: str, theme: Theme) -> Iterator[bytes]:
    """The report of a recorded run."""
    with store_of(directory) as service:
        yield write_report(service, run, theme, PLOTLY).encode()


def _fill(service: Service, directory: Path) -> set[str]:
    runs: set[str] = set()
    under_way: deque[Future[Stored]] = deque()
    for batch in spool.read(directory):
        runs.add(batch.run)
        under_way.append(service.inbox.append(batch, check(batch)))
        if len(under_way) > _UNDER_WAY:
            under_way.popleft().result()
    for future in under_way:
        future.result()
    return runs
