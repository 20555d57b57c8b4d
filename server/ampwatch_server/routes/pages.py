"""Pages and files: the dashboard, the API's documentation, signing in. Every URL in them is relative."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles

from ampwatch_dashboard import STATIC
from ampwatch_server.assets import PLOTLY, package
from ampwatch_server.auth import SESSION_S, Grant
from ampwatch_server.problems import Problem

from .common import ServiceOf, cookie_of, grant_of, problems, require

router = APIRouter(include_in_schema=False)


_OWN: Final = Path(__file__).parent.parent / "static"
_ASSETS: Final = {
    "plotly.min.js": PLOTLY,
    "swagger-ui-bundle.js": package("fastapi_offline") / "static" / "swagger-ui-bundle.js",
    "swagger-ui.css": package("fastapi_offline") / "static" / "swagger-ui.css",
    "docs.js": _OWN / "docs.js",
    "signin.css": _OWN / "signin.css",
}
_DAY: Final = {"Cache-Control": "max-age=86400"}
_REVALIDATE: Final = {"Cache-Control": "no-cache"}


class RevalidatedFiles(StaticFiles):
    """Static files that a browser asks for again each time, and gets a 304 for: an upgrade is seen at once."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """The file, with its ETag."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(_REVALIDATE)
        return response


@router.get("/")
def runs_page(request: Request, service: ServiceOf) -> Response:
    """The list of runs."""
    if grant_of(request, service) is None:
        return _sign_in("", "This browser is not signed in.")
    return FileResponse(STATIC / "index.html", headers=_REVALIDATE)


@router.get("/run/{run}")
def run_page(run: str, request: Request, service: ServiceOf) -> Response:  # noqa: ARG001 - the page reads it
    """One run; the page itself says so where there is none."""
    if grant_of(request, service) is None:
        return _sign_in("../", "This browser is not signed in.")
    return FileResponse(STATIC / "run.html", headers=_REVALIDATE)


@router.get("/what-if/{run}")
def what_if_page(run: str, request: Request, service: ServiceOf) -> Response:  # noqa: ARG001 - the page reads it
    """Another setting replayed over one run."""
    if grant_of(request, service) is None:
        return _sign_in("../", "This browser is not signed in.")
    return FileResponse(STATIC / "whatif.html", headers=_REVALIDATE)


@router.get("/compare")
def compare_page(request: Request, service: ServiceOf) -> Response:
    """Several runs beside each other."""
    if grant_of(request, service) is None:
        return _sign_in("", "This browser is not signed in.")
    return FileResponse(STATIC / "compare.html", headers=_REVALIDATE)


@router.get("/settings")
def settings_page(request: Request, service: ServiceOf) -> Response:
    """Alerts, tokens, the audit; the page itself says so to who may not see them."""
    if grant_of(request, service) is None:
        return _sign_in("", "This browser is not signed in.")
    return FileResponse(STATIC / "settings.html", headers=_REVALIDATE)


@router.get("/docs")
def docs_page(request: Request, service: ServiceOf) -> Response:
    """The API's documentation."""
    if grant_of(request, service) is None:
        return _sign_in("", "This browser is not signed in.")
    return FileResponse(_OWN / "docs.html", headers=_REVALIDATE)


@router.get("/openapi.json", responses=problems())
def openapi(request: Request, _: Annotated[Grant, Depends(require("read"))]) -> Response:
    """The API's description."""
    app: FastAPI = request.app
    return JSONResponse(app.openapi())


@router.get("/link/{code}")
def link(code: str, request: Request, service: ServiceOf) -> Response:
    """Exchange a one-time link for a session."""
    session = service.auth.redeem(code)
    if session is None:
        return _sign_in("../", "This link has been used already, or is too old.")
    service.link_opened()
    response = RedirectResponse("../", 303, {"Cache-Control": "no-store"})
    response.set_cookie(
        cookie_of(request),
        session,
        max_age=int(SESSION_S),
        path=f"{service.settings.root_path}/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return response


@router.get("/assets/{name}")
def asset(name: str, request: Request) -> Response:
    """A file of an installed package; a browser keeps it for a day."""
    if name not in _ASSETS:
        raise Problem(404, f"there is no asset {name!r}")
    path = _ASSETS[name]
    response = FileResponse(path, headers=_DAY, stat_result=path.stat())
    if response.headers["etag"] == request.headers.get("if-none-match", "").removeprefix("W/"):
        return NotModifiedResponse(response.headers)
    return response


def install(app: FastAPI) -> None:
    """Add the pages, and the dashboard's files under `/static`."""
    app.include_router(router)
    app.mount("/static", RevalidatedFiles(directory=STATIC), name="static")


def _sign_in(root: str, reason: str) -> Response:
    page = string.Template((_OWN / "signin.html").read_text(encoding="utf-8"))
    return HTMLResponse(page.substitute(root=root, reason=reason), 401, {"Cache-Control": "no-store"})
