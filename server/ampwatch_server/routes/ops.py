"""`/metrics`, `/healthz`, `/readyz`."""

from __future__ import annotations

import sqlalchemy as sa
from fastapi import APIRouter, Depends
from starlette.responses import PlainTextResponse, Response

from .common import ServiceOf, problems, require

router = APIRouter(tags=["operations"])


@router.get(
    "/metrics",
    dependencies=[Depends(require("read", whole=True))],
    response_class=PlainTextResponse,
    responses=problems(),
)
def metrics(service: ServiceOf) -> Response:
    """Prometheus text."""
    return PlainTextResponse(service.metrics.text(service.gauges()), media_type="text/plain; version=0.0.4")


@router.get("/healthz", response_class=PlainTextResponse)
def healthz() -> Response:
    """Whether the process answers."""
    return PlainTextResponse("ok\n")


@router.get("/readyz", response_class=PlainTextResponse, responses={503: {"description": "it cannot store"}})
def readyz(service: ServiceOf) -> Response:
    """Whether batches can be stored: a transaction that writes is begun and committed. 503 where it cannot."""
    service.database.write(lambda connection: connection.execute(sa.text("SELECT 1")))
    return PlainTextResponse("ok\n")
