"""The application: routes, errors and guards around a service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from anyio.to_thread import run_sync
from fastapi import FastAPI
from starlette.types import ASGIApp

from . import problems
from .api import describe
from .compression import Compression
from .diagnoser import Engine, windowed
from .logs import RequestLog
from .routes import admin, batches, compare, exports, figures, live, ops, pages, replay, runs, series
from .security import Guard
from .service import Service
from .settings import Settings

PREFIX = "/v1"


def create_app(settings: Settings, engine: Callable[[], Engine] = windowed) -> FastAPI:
    """The ASGI application of a server. The database is opened and brought up to date here; threads start with it.

    Arguments:
        settings.
        engine: makes the diagnosis of a run.
    Errors: AmpwatchError where the database cannot be opened.
    """
    service = Service(settings, engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.hub.close()
            await run_sync(service.stop)

    app = FastAPI(
        title="ampwatch",
        version=_version(),
        description="Gradients and loss scales of mixed-precision training: batches in, series and findings out.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # asks the environment at each request
    )
    app.state.service = service
    problems.install(app)
    app.add_middleware(Compression)
    app.add_middleware(Guard, settings=settings)
    app.add_middleware(RequestLog)
    for module in (runs, batches, series, figures, compare, exports, replay, live, admin):
        app.include_router(module.router, prefix=PREFIX)
    app.include_router(ops.router)
    pages.install(app)
    describe(app)
    return app


def served(app: FastAPI) -> ASGIApp:
    """What a server runs: the application, past whose framework batches go."""
    service: Service = app.state.service
    settings = service.settings
    path = f"{PREFIX}{batches.PATH}"
    paths = (path, f"{settings.root_path}{path}")  # a proxy strips its prefix, or does not
    return batches.Shortcut(app, service, lambda handler: RequestLog(Guard(handler, settings)), paths)


def _version() -> str:
    try:
        return version("ampwatch")
    except PackageNotFoundError:  # run from a source tree
        return "0"
