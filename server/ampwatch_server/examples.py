"""Examples for the API's documentation, made from its schemas: what a field names as an example, else one of its type."""

from __future__ import annotations

from typing import Any, Final

_BY_TYPE: Final[dict[str, Any]] = {"string": "", "integer": 0, "number": 0.0, "boolean": False, "null": None}
_JSON: Final = "application/json"


def add_examples(document: dict[str, Any]) -> None:
    """Give every JSON body and answer of an OpenAPI document that has a schema and no example one of its own."""
    for methods in document["paths"].values():
        for operation in methods.values():
            bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
            for media in (body.get("content", {}).get(_JSON, {}) for body in bodies):
                if {"$ref", "anyOf"} & media.get("schema", {}).keys() and "example" not in media:
                    media["example"] = example_of(media["schema"], document["components"]["schemas"])


def example_of(schema: dict[str, Any], known: dict[str, Any]) -> Any:
    """A value that a JSON schema allows. Its references are to `known`."""
    if "$ref" in schema:
        return example_of(known[schema["$ref"].rpartition("/")[2]], known)
    if "example" in schema:
        return schema["example"]
    for name in ("examples", "enum"):
        if schema.get(name):
            return schema[name][0]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return example_of(schema["anyOf"][0], known)
    return _of_type(schema, known)


def _of_type(schema: dict[str, Any], known: dict[str, Any]) -> Any:
    kind = schema.get("type")
    if kind == "array":
        return [example_of(schema["items"], known)] if schema.get("items") else []
    if kind == "object":
        return {name: example_of(part, known) for name, part in schema.get("properties", {}).items()}
    return _BY_TYPE.get(kind or "null")
