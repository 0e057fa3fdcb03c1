"""OpenAPI schemas of the images API, from the rules that check a request: nothing written twice."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from sglang.multimodal_gen.configs.rules import Choice, Flag, Integer, Number
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.entrypoints.openai_protocol import (
    OPTION_NAMES,
    SAMPLING_NAMES,
    UPLOADED,
    ImageOptions,
    quality_rule,
)

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
IMAGES = {
    "type": "object",
    "required": ["created", "data"],
    "properties": {
        "created": {"type": "integer"},
        "data": {"type": "array", "minItems": 1, "items": {"type": "object"}},
        "size": {"type": "string"},
        "output_format": {"type": "string"},
        "warnings": {"type": "array", "items": {"type": "string"}},
    },
}


def json_body() -> dict[str, Any]:
    """The `requestBody` of a generation."""
    return {"required": True, "content": {"application/json": {"schema": _request_schema()}}}


def form_body() -> dict[str, Any]:
    """The `requestBody` of an edit."""
    schema = _request_schema()
    schema["properties"][UPLOADED] = {"type": "string", "format": "binary"}
    schema["required"] = ["prompt", UPLOADED]
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


def answers(success: dict[str, Any] | None = None, *statuses: int) -> dict[int, dict[str, Any]]:
    """`responses` of a route: its success and the error statuses that it has of its own."""
    error = {"application/json": {"schema": ERROR}}
    found: dict[int, dict[str, Any]] = {
        status: {"description": "error", "content": error} for status in statuses
    }
    content = {"application/json": {"schema": success or {"type": "object"}}}
    return {200: {"description": "success", "content": content}, **found}


def _request_schema() -> dict[str, Any]:
    named = {f.name: f for f in (*fields(SamplingParams), *fields(ImageOptions))}
    properties = {name: _property(named[name]) for name in (*OPTION_NAMES, *SAMPLING_NAMES)}
    properties["quality"] |= _choice(quality_rule())
    return {"type": "object", "required": ["prompt"], "properties": properties}


def _property(field: Any) -> dict[str, Any]:
    rule = field.metadata["rule"]
    schema = _schema_of(rule) | {"description": field.metadata["help"]}
    if field.default is not MISSING and field.default is not None:
        schema["default"] = field.default
    return schema


def _schema_of(rule: Any) -> dict[str, Any]:
    for kind, build in _BUILDERS.items():
        if isinstance(rule, kind):
            return build(rule)
    return {"type": "string"}


def _choice(rule: Choice) -> dict[str, Any]:
    return {"type": "string", "enum": [*rule.values, *rule.aliases]}


_BUILDERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    Integer: lambda rule: {"type": "integer", "minimum": rule.low, "maximum": rule.high},
    Number: lambda rule: {"type": "number", "minimum": rule.low, "maximum": rule.high},
    Flag: lambda rule: {"type": "boolean"},
    Choice: _choice,
}
