"""Google's schemas (a subset of OpenAPI) as JSON schema, which the model and the engine's grammar read.

Invariant: names and values that are the user's own (property names, enum values, defaults) stay as they are; only
keywords change. What is JSON schema already comes out equal. Nothing is checked for sense here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from polar_mitm.errors import BadRequest
from polar_mitm.wire.fields import Fields, compact

_DEPTH = 100
_ONE = {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
_SEVERAL = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
_DROPPED = {"nullable", "propertyOrdering"}
_RENAMED = {"defs": "$defs", "ref": "$ref"}
_NO_JSON_FORMATS = {"enum", "int32", "int64", "float", "double"}
"""Formats that say nothing in JSON schema; grammar engines refuse what they do not know."""

Schema = dict[str, Any]  # Any: JSON


def camel(name: str) -> str:
    """The camelCase spelling of a field; Google takes snake_case, too."""
    return re.sub(r"(?<=[a-z0-9])_([a-z0-9])", lambda match: match[1].upper(), name)


def json_schema(owner: Fields, name: str) -> str | None:
    """The field as compact JSON schema, None when absent. Raises BadRequest for no object or one nested too deep."""
    child = owner.child(name)
    if child is None:
        return None
    try:
        return compact(_schema(owner.value(name), _DEPTH))
    except RecursionError:
        raise BadRequest(f"{owner.at(name)}: nested deeper than {_DEPTH} schemas; flatten it") from None


def _schema(value: object, depth: int) -> object:
    if not isinstance(value, Mapping):
        return value  # `true`, or nonsense that the grammar will name
    if not depth:
        raise RecursionError
    given = {_keyword(str(name)): inner for name, inner in cast("Mapping[str, Any]", value).items()}  # Any: JSON
    out = {name: _value(name, inner, depth - 1) for name, inner in given.items() if name not in _DROPPED}
    if out.get("format") in _NO_JSON_FORMATS:
        del out["format"]
    _order(out, given.get("propertyOrdering"))
    return _nullable(out) if given.get("nullable") is True else out


def _keyword(name: str) -> str:
    return _RENAMED.get(name, camel(name))


def _value(name: str, value: Any, depth: int) -> Any:  # Any: JSON
    if name == "type":
        return _type(value)
    if name in _COUNTS and isinstance(value, str) and value.isdecimal():
        return int(value)  # Google writes 64-bit integers as strings
    if name in _NAMED and isinstance(value, Mapping):
        return {key: _schema(inner, depth) for key, inner in cast("Schema", value).items()}
    if name in _SEVERAL and isinstance(value, list):
        return [_schema(inner, depth) for inner in cast("list[Any]", value)]
    return _schema(value, depth) if name in _ONE else value


def _type(value: Any) -> Any:  # Any: JSON
    if isinstance(value, list):
        return [_type(one) for one in cast("list[Any]", value)]
    return value.lower() if isinstance(value, str) else value


def _order(schema: Schema, order: object) -> None:
    """Put the properties in the order in which they shall be written."""
    properties = schema.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        known = cast("Schema", properties)
        first = [name for name in cast("list[Any]", order) if isinstance(name, str) and name in known]
        schema["properties"] = {name: known[name] for name in (*first, *known)}


def _nullable(schema: Schema) -> Schema:
    if "anyOf" in schema and isinstance(schema["anyOf"], list):
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    if isinstance(schema.get("type"), str):
        schema = schema | {"type": [schema["type"], "null"]}
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema = schema | {"enum": [*schema["enum"], None]}
    return schema
