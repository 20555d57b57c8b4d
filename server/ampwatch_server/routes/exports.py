"""A run as a file: its rows, and the report."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query
from starlette.responses import HTMLResponse, Response, StreamingResponse

from ampwatch_dashboard.figures import Theme
from ampwatch_server.assets import PLOTLY
from ampwatch_server.reports import write_report
from ampwatch_server.store.export import Asked, Exporter, Format, Kind

from .common import MAX_INTEGER, RunId, ServiceOf, SourceAsked, problems, require

router = APIRouter(tags=["exports"], dependencies=[Depends(require("read"))])

MEDIA: Final[dict[Format, str]] = {
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "ndjson": "application/x-ndjson",
}
_FILES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "a file",
        "content": {
            "text/csv": {
                "schema": {"type": "string"},
                "example": "rank,producer,attempt,scale\r\n0,5f0c…,0,65536.0\r\n",
            },
            "application/json": {
                "schema": {"type": "object"},
                "example": {
                    "run": "r",
                    "kind": "attempts",
                    "rows": [{"rank": 0, "attempt": 0, "scale": 65536.0}],
                },
            },
            "application/x-ndjson": {
                "schema": {"type": "string"},
                "example": '{"rank":0,"attempt":0,"scale":65536.0}\n',
            },
        },
    }
}

_PAGE: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/html": {"schema": {"type": "string"}, "example": "<!doctype html>…"}}}
}


@router.get("/runs/{run}/export", response_class=StreamingResponse, responses=_FILES | problems(404))
def export(
    run: RunId,
    service: ServiceOf,
    source: SourceAsked,
    form: Annotated[Format, Query(alias="format")] = "csv",
    kind: Kind = "attempts",
    first: Annotated[int, Query(alias="from", ge=0, le=MAX_INTEGER, description="first attempt")] = 0,
    last: Annotated[
        int | None, Query(alias="to", ge=0, le=MAX_INTEGER, description="last attempt, inclusive")
    ] = None,
) -> Response:
    """Every row as it was recorded, as a file that is sent while it is read."""
    exporter = Exporter(service.database, service.tails, run, Asked(kind, source, first, last))
    headers = {
        "Content-Disposition": f'attachment; filename="{run}-{kind}.{form}"',
        "Cache-Control": "no-store",
    }
    return StreamingResponse(exporter.write(form), headers=headers, media_type=MEDIA[form])


@router.get("/runs/{run}/report", response_class=HTMLResponse, responses=_PAGE | problems(404))
def get_report(run: RunId, service: ServiceOf, theme: Theme = "light") -> Response:
    """The run as one HTML file that needs nothing else: verdict, findings, plots, events."""
    headers = {"Content-Disposition": f'attachment; filename="{run}.html"', "Cache-Control": "no-store"}
    return HTMLResponse(write_report(service, run, theme, PLOTLY), headers=headers)
