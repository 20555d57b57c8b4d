"""What another setting would have done: `POST …/replay`, and what to set: `GET …/recommendations`."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from ampwatch.replay.policies import POLICIES
from ampwatch.replay.recommend import recommend
from ampwatch.replay.whatif import defaults_of, what_if
from ampwatch_dashboard import figures
from ampwatch_dashboard.figures import Theme
from ampwatch_server import schemas
from ampwatch_server.store.blob import jsonable

from .common import RunId, ServiceOf, SourceAsked, answer, problems, require
from .revalidate import Tagged, TaggedRoute

router = APIRouter(tags=["replay"], dependencies=[Depends(require("read"))], route_class=TaggedRoute)

Scaler = Annotated[int, Query(ge=0, lt=2**31, description="index of the scaler, where a run has several")]
Points = Annotated[int, Query(ge=1, le=20_000, description="points wanted of each path")]
FigureTheme = Annotated[
    Theme | None, Query(description="with a Plotly figure of the replayed path over the recorded one")
]
_POINTS: Final = 600


@router.post("/runs/{run}/replay", response_model=schemas.Replay, responses=problems(404))
def post_replay(
    run: RunId,
    asked: schemas.ReplayAsked,
    service: ServiceOf,
    source: SourceAsked,
    scaler: Scaler = 0,
    points: Points = _POINTS,
    theme: FigureTheme = None,
) -> Response:
    """Replay a policy over a recorded run: steps lost, the path of the scale, underflow, each with its bounds.

    Exact for the policy; approximate for the training, which would have gone another way.
    """
    known = service.recordings.read(run, source, scaler)
    parameters: dict[str, Any] = dict(asked.parameters)
    replayed = what_if(known.recording, asked.policy, parameters, known.ceilings)
    found = jsonable(replayed.as_dict(points))
    return answer(found | {"figure": None if theme is None else figures.replay(found, theme)})


@router.get(
    "/runs/{run}/recommendations",
    response_model=schemas.Recommendations,
    dependencies=[Tagged],
    responses=problems(404),
)
def get_recommendations(run: RunId, service: ServiceOf, source: SourceAsked, scaler: Scaler = 0) -> Response:
    """Settings that would have served the run better, each with what it would have done; the most useful first."""
    recording = service.recordings.read(run, source, scaler).recording
    found = [one.as_dict() for one in recommend(recording)]
    return answer(jsonable({"scaler": dict(recording.scaler), "recommendations": found}))


@router.get("/policies", response_model=schemas.Policies, responses=problems())
def get_policies() -> Response:
    """The policies that can be replayed, with their parameters' defaults."""
    return answer({"policies": {name: jsonable(defaults_of(name)) for name in POLICIES}})
