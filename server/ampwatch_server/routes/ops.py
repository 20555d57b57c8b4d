"""`/metrics`, `/healthz`, `/readyz`."""

from __future__ import annotations

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
    """Whether batches can be stored: a transaction that writes is committed, once a second at most. 503 where it cannot."""
    service.prove_ready()
    return PlainTextResponse("ok\n")
