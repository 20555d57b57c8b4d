"""`/v1/compare`: several runs beside each other."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from ampwatch_dashboard import figures
from ampwatch_dashboard.figures import Theme
from ampwatch_server import schemas
from ampwatch_server.problems import Problem
from ampwatch_server.store.compare import MOST_RUNS, compare_runs
from ampwatch_server.store.processes import begins_of

from .common import Asked, ServiceOf, answer, problems, require, run_id, split_names
from .series import SERIES, is_series

router = APIRouter(prefix="/compare", tags=["compare"], dependencies=[Depends(require("read"))])


def runs_asked(
    request: Request,
    service: ServiceOf,
    runs: Annotated[
        str, Query(description=f"ids, separated by commas, at most {MOST_RUNS}", examples=["baseline,fp16"])
    ],
) -> list[str]:
    """The runs to compare, each once."""
    found = list(dict.fromkeys(name.strip() for name in runs.split(",") if name.strip()))
    if not 1 <= len(found) <= MOST_RUNS:
        raise Problem(422, f"got {len(found)} runs, it must be 1 to {MOST_RUNS}", field="runs")
    return [run_id(run, request, service) for run in found]


RunsAsked = Annotated[list[str], Depends(runs_asked)]


@router.get("", response_model=schemas.Comparison, responses=problems(404))
def compare(runs: RunsAsked, service: ServiceOf, asked: Asked, names: str = "scale,loss") -> Response:
    """Runs beside each other: each as by itself, their columns over attempts, and in what they differ."""
    wanted = split_names(names, is_series, f"one of {', '.join(SERIES)}, or log.<name>")
    with service.database.read() as connection:
        return answer(compare_runs(connection, service.tails, service.settings, runs, wanted, asked))


@router.get("/figure", response_model=schemas.Figure, responses=problems(404))
def compare_figure(runs: RunsAsked, service: ServiceOf, asked: Asked, theme: Theme = "light") -> Response:
    """Scale, loss and norm of several runs over attempts, a colour each; a Plotly figure."""
    asked = asked._replace(through=True)
    with service.database.read() as connection:
        found = compare_runs(
            connection, service.tails, service.settings, runs, ["scale", "loss", "norm"], asked
        )
        begins = {producer: at for run in runs for producer, at in begins_of(connection, run).items()}
    return answer(figures.compare(found, theme, begins))
