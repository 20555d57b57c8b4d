"""The report of a run: gathered from the store, written by the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from sqlalchemy.engine import Connection

from ampwatch.records import EVENT_TYPES
from ampwatch_dashboard import figures
from ampwatch_dashboard.figures import Theme
from ampwatch_dashboard.report import report

from .service import Service
from .store import runs, series, tensors
from .store.events import list_events
from .store.findings import findings_of
from .store.marks import MARKED, MARKS, list_marks
from .store.processes import begins_of
from .store.series import Range

_INTRODUCING: Final = frozenset(
    {
        "tensors",
        "replicas",
        "origin",
        "observers",
        "heartbeat",
        "backward_order",
        "run",
        "scaler",
        "stream",
        "optimizers",
    }
)
_EVENTS: Final = 200
_ROWS: Final = 40
_STATS: Final = {"lost_share": "Underflow", "nonfinite": "inf and NaN"}


def write_report(service: Service, run: str, theme: Theme, plotly: Path) -> str:
    """One run as an HTML file that needs nothing else. RunNotFound.

    Arguments:
        plotly: the file plotly.min.js, which becomes part of it.
    """
    with service.database.read() as connection:
        about = runs.get_run(connection, service.settings, run)
        found = findings_of(connection, run)["findings"]
        told = sorted(EVENT_TYPES - _INTRODUCING)
        events = list_events(connection, run, types=told, first=None, last=None, cursor=None, limit=_EVENTS)
        plots = {"Timeline": _timeline(connection, service, run, found, theme)}
        plots |= {title: _heatmap(connection, service, run, stat, theme) for stat, title in _STATS.items()}
    drawn = {title: figure for title, figure in plots.items() if any(trace["x"] for trace in figure["data"])}
    return report(about, found, events, drawn, plotly.read_text(encoding="utf-8"), theme)


def _timeline(
    connection: Connection, service: Service, run: str, findings: list[dict[str, Any]], theme: Theme
) -> dict[str, Any]:
    asked = Range(points=1200, through=True)
    columns = series.read_series(connection, service.tails, run, ["scale", "loss", "norm"], asked)
    marks = list_marks(connection, run, types=MARKED, first=0, last=None, most=MARKS)
    return figures.timeline(columns, marks, findings, theme, begins_of(connection, run))


def _heatmap(connection: Connection, service: Service, run: str, stat: str, theme: Theme) -> dict[str, Any]:
    asked = Range(points=200, through=True)
    data = tensors.read_heatmap(connection, service.tails, run, stat, asked, rows=_ROWS)
    return figures.heatmap(data, theme, begins_of(connection, run))
