"""Plotly figures of a run, as data: the JSON of the API in, what `Plotly.react` draws out.

Their axis counts attempts through the processes of a rank, one after the other, and so do `from` and `to`.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ampwatch_dashboard import figures
from ampwatch_dashboard.figures import Theme
from ampwatch_server import schemas
from ampwatch_server.store import series, tensors
from ampwatch_server.store.findings import findings_of
from ampwatch_server.store.marks import MARKED, MARKS, list_marks
from ampwatch_server.store.processes import begins_of

from .common import Asked, RunId, ServiceOf, SourceAsked, Stream, answer, problems, require
from .revalidate import Tagged, TaggedRoute
from .series import HeatmapAsked, Rows, StatName

router = APIRouter(
    prefix="/runs/{run}/figures",
    tags=["figures"],
    dependencies=[Depends(require("read")), Tagged],
    route_class=TaggedRoute,
)


@router.get("/timeline", response_model=schemas.Figure, responses=problems(404))
def timeline(
    run: RunId,
    service: ServiceOf,
    asked: Asked,
    source: SourceAsked,
    theme: Theme = "light",
    stream: Stream = None,
) -> Response:
    """Scale, loss and norm over attempts, with the events that changed the scale and the findings."""
    names = ["scale", "loss", "norm"]
    asked = asked._replace(through=True)
    with service.database.read() as connection:
        columns = series.read_series(
            connection, service.tails, run, names, asked, source=source, stream=stream
        )
        marks = list_marks(
            connection, run, types=MARKED, first=asked.first, last=asked.last, source=source, most=MARKS
        )
        found = findings_of(connection, run)
        begins = begins_of(connection, run)
    return answer(figures.timeline(columns, marks, found["findings"], theme, begins))


@router.get("/heatmap", response_model=schemas.Figure, responses=problems(404))
def heatmap(
    run: RunId,
    service: ServiceOf,
    asked: HeatmapAsked,
    source: SourceAsked,
    theme: Theme = "light",
    stat: StatName = "lost_share",
    rows: Rows = None,
) -> Response:
    """Tensors over attempts."""
    asked = asked._replace(through=True)
    with service.database.read() as connection:
        data = tensors.read_heatmap(connection, service.tails, run, stat, asked, source=source, rows=rows)
        begins = begins_of(connection, run)
    return answer(figures.heatmap(data, theme, begins))


@router.get("/histogram", response_model=schemas.Figure, responses=problems(404))
def histogram(
    run: RunId,
    service: ServiceOf,
    asked: Asked,
    source: SourceAsked,
    tensor: Annotated[int, Query(ge=0, lt=2**31)],
    theme: Theme = "light",
) -> Response:
    """The histograms of one tensor over attempts."""
    asked = asked._replace(through=True)
    with service.database.read() as connection:
        data = tensors.read_histograms(connection, service.tails, run, tensor, asked, source)
        begins = begins_of(connection, run)
    return answer(figures.histogram(data, theme, begins))
