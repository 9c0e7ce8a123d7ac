"""What OpenAPI says beyond what the routes' signatures say: bodies that we read ourselves, and every error."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from embedq_gateway.inputs import InputType

Json = dict[str, Any]

_DESCRIPTIONS = {
    400: "The request is wrong; `error.param` names what.",
    401: "No API key, or an unknown one.",
    404: "No such thing, or another key's.",
    408: "The body did not arrive in time.",
    413: "The request is too large.",
    415: "The body is of another type.",
    416: "The file has no such range.",
    422: "A document cannot be embedded; `error.param` names it.",
    429: "Overloaded; try again after `Retry-After` seconds.",
    500: "A defect of the gateway.",
    503: "The queue cannot be used at the moment; try again after `Retry-After` seconds.",
    504: "No vectors in time; the work was cancelled.",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = Field(description="The part of the request that is wrong.")
    code: str | None = Field(description="Stable; for programs.")


class ErrorBody(BaseModel):
    """Body of every answer that is no success."""

    error: ErrorDetail


def errors(*statuses: int) -> dict[int | str, Json]:
    """For `responses` of a route."""
    return {status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}


READS_BODY = (400, 408, 413, 415)
STORED = (401, 503)
EMBEDS = (*READS_BODY, 401, 404, 422, 429, 503, 504)


def json_body(schema: Json) -> Json:
    """For `openapi_extra` of a route that reads a JSON body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: list[str], properties: Json) -> Json:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}


def _input(max_inputs: int) -> Json:
    bounds = {"minItems": 1, "maxItems": max_inputs}
    return {
        "anyOf": [_TEXT, {"type": "array", "items": _TEXT, **bounds}, _IDS, {"type": "array", "items": _IDS, **bounds}]
    }


_DIMENSIONS = _nullable({"type": "integer", "minimum": 1, "description": "At most the model's."})
_PROMPT = _nullable({"type": "string", "description": "Name of a prompt of the model, put before each text."})

EMBEDDINGS_REQUEST = _object(
    ["input", "model"],
    {
        "input": _input(2048),
        "model": {"type": "string"},
        "encoding_format": _nullable({"type": "string", "enum": ["float", "base64"]}),
        "dimensions": _DIMENSIONS,
        "user": _nullable({"type": "string"}),
        "prompt_name": _PROMPT,
        "input_type": _nullable({"type": "string", "enum": list(get_args(InputType))}),
        "truncate": _nullable({"type": "boolean", "description": "Cut texts above the model's maximum."}),
    },
)
TEI_REQUEST = _object(
    ["inputs"],
    {
        "inputs": _input(2048),
        "normalize": _nullable({"type": "boolean"}),
        "truncate": _nullable({"type": "boolean"}),
        "truncation_direction": _nullable({"type": "string", "enum": ["right", "left", "Right", "Left"]}),
        "prompt_name": _PROMPT,
        "dimensions": _DIMENSIONS,
        "model": _nullable({"type": "string"}),
    },
)
BATCH_REQUEST = _object(
    ["input_file_id", "endpoint", "completion_window"],
    {
        "input_file_id": {"type": "string"},
        "endpoint": {"type": "string", "enum": ["/v1/embeddings"]},
        "completion_window": {
            "type": "string",
            "pattern": "^[1-9][0-9]{0,6}[smhd]$",
            "description": "A number and s, m, h or d; at most 30 days.",
        },
        "metadata": _nullable({"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string"}}),
        "output_expires_after": _nullable(
            _object(
                ["anchor", "seconds"],
                {
                    "anchor": {"type": "string", "enum": ["created_at"]},
                    "seconds": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                },
            )
        ),
    },
)
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                    "additionalProperties": False,
                }
            }
        },
    }
}


def describe(app: FastAPI, *, keys_required: bool) -> Json:
    """The document, without FastAPI's own 422: what it refuses is answered with 400 in our shape.

    Without API keys nothing asks for one.
    """
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
        )
        for path in document["paths"].values():
            for operation in path.values():
                body = operation["responses"].get("422", {}).get("content", {})
                if "HTTPValidationError" in str(body):
                    del operation["responses"]["422"]
                if not keys_required:
                    operation["responses"].pop("401", None)
                    operation.pop("security", None)
        if not keys_required:
            document["components"].pop("securitySchemes", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
