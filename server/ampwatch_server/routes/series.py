"""Series, tensors, heatmaps and histograms of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import Response

from ampwatch.records import ATTEMPT_COLUMNS, is_added
from ampwatch_server import schemas
from ampwatch_server.store import series as store
from ampwatch_server.store import tensors
from ampwatch_server.store.series import Range
from ampwatch_server.store.stats import NAMES

from .common import (
    MAX_INTEGER,
    Asked,
    Cursor,
    Limit,
    RunId,
    ServiceOf,
    SourceAsked,
    Stream,
    answer,
    problems,
    require,
    split_names,
)
from .revalidate import Tagged, TaggedRoute

router = APIRouter(tags=["series"], dependencies=[Depends(require("read")), Tagged], route_class=TaggedRoute)

SERIES = tuple(name for name in ATTEMPT_COLUMNS if name not in ("attempt", "stream", "step", "time"))
TensorId = Annotated[int, Path(ge=0, lt=2**31)]
StatName = Literal["lost_share", "subnormal_share", "zero_share", "headroom_log2", "norm", "nonfinite"]
Rows = Annotated[int | None, Query(ge=1, description="only so many tensors, those with the worst values")]
Columns = Annotated[int, Query(ge=1, le=2000)]


def is_series(name: str) -> bool:
    """Whether a name is a column of attempts, or one that was added: by log(), or of one optimizer."""
    return name in SERIES or is_added(name)


def columns_asked(
    first: Annotated[int, Query(alias="from", ge=0, le=MAX_INTEGER)] = 0,
    last: Annotated[int | None, Query(alias="to", ge=0, le=MAX_INTEGER)] = None,
    columns: Columns = 200,
) -> Range:
    """The range parameters of a heatmap."""
    return Range(first, last, columns)


HeatmapAsked = Annotated[Range, Depends(columns_asked)]


@router.get("/runs/{run}/series", response_model=schemas.Series, responses=problems(404))
def get_series(
    run: RunId,
    service: ServiceOf,
    asked: Asked,
    source: SourceAsked,
    names: str = "scale,loss",
    stream: Stream = None,
) -> Response:
    """Columns over attempts. Smallest and largest values are kept whatever a point covers."""
    wanted = split_names(names, is_series, f"one of {', '.join(SERIES)}, or log.<name>")
    with service.database.read() as connection:
        found = store.read_series(connection, service.tails, run, wanted, asked, source=source, stream=stream)
    return answer(found)


@router.get("/runs/{run}/tensors", response_model=schemas.TensorPage, responses=problems(404))
def list_tensors(
    run: RunId, service: ServiceOf, source: SourceAsked, cursor: Cursor = None, limit: Limit = 500
) -> Response:
    """The gradient tensors of a run."""
    with service.database.read() as connection:
        return answer(tensors.list_tensors(connection, run, cursor, limit, source))


@router.get("/runs/{run}/tensors/{tensor}/series", response_model=schemas.Series, responses=problems(404))
def get_tensor_series(
    run: RunId,
    tensor: TensorId,
    service: ServiceOf,
    asked: Asked,
    source: SourceAsked,
    names: str = "norm,headroom_log2",
) -> Response:
    """Statistics of one tensor over attempts."""
    wanted = split_names(names, NAMES.__contains__, f"one of {', '.join(NAMES)}")
    with service.database.read() as connection:
        found = store.read_tensor_series(connection, service.tails, run, tensor, wanted, asked, source)
    return answer(found)


@router.get(
    "/runs/{run}/tensors/{tensor}/histograms",
    response_model=schemas.Histograms,
    responses=problems(404),
)
def get_histograms(
    run: RunId, tensor: TensorId, service: ServiceOf, asked: Asked, source: SourceAsked
) -> Response:
    """Histograms of log2 |scaled gradient| of one tensor over attempts."""
    with service.database.read() as connection:
        return answer(tensors.read_histograms(connection, service.tails, run, tensor, asked, source))


@router.get("/runs/{run}/heatmap", response_model=schemas.Heatmap, responses=problems(404))
def get_heatmap(
    run: RunId,
    service: ServiceOf,
    asked: HeatmapAsked,
    source: SourceAsked,
    stat: StatName = "lost_share",
    rows: Rows = None,
) -> Response:
    """One statistic of all tensors over attempts, the worst value of each column."""
    with service.database.read() as connection:
        return answer(
            tensors.read_heatmap(connection, service.tails, run, stat, asked, source=source, rows=rows)
        )
