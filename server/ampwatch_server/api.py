"""The API's own description, `/openapi.json`, as people read it at `/docs`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .examples import add_examples


def describe(app: FastAPI) -> None:
    """Give an app an OpenAPI document whose operations are called by what they do, and which says how to sign in."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            app.openapi_schema = _told(document)
        return app.openapi_schema

    # FastAPI's own way to change the document
    app.openapi = openapi  # type: ignore[method-assign]


def _told(document: dict[str, Any]) -> dict[str, Any]:
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["summary"], _, rest = operation["description"].partition("\n")
            operation["description"] = rest.strip()
    add_examples(document)
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    return document
