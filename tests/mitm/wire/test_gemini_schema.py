"""Google's schemas become JSON schema; JSON schema stays what it is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.errors import BadRequest
from polar_mitm.wire.fields import Fields, compact
from polar_mitm.wire.gemini_schema import camel, json_schema

_NAMES = st.sampled_from(["type", "nullable", "a_b", "format", "items", "é"])
JSON_SCHEMA = st.recursive(
    st.sampled_from(
        [{}, {"type": "string"}, {"type": ["integer", "null"]}, {"enum": ["STRING", 1]}, {"$ref": "#/$defs/a"}]
    ),
    lambda inner: (
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(_NAMES, inner, max_size=3)})
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 9)})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)})
        | st.fixed_dictionaries(
            {"additionalProperties": inner | st.booleans(), "$defs": st.dictionaries(_NAMES, inner)}
        )
    ),
    max_leaves=8,
)


def _converted(schema):
    return json.loads(json_schema(Fields({"schema": schema}), "schema"))


def test_a_schema_of_google_becomes_json_schema():
    """Types, formats, counts, null and order; names and values that are the user's own stay."""
    schema = {
        "type": "OBJECT",
        "property_ordering": ["b_c", "type"],
        "properties": {
            "type": {"type": "STRING", "enum": ["STRING", "x"], "format": "enum", "nullable": True},
            "b_c": {"type": "ARRAY", "minItems": "1", "items": {"anyOf": [{"type": "INTEGER", "format": "int32"}]}},
            "when": {"type": "STRING", "format": "date-time", "default": "NULL"},
        },
    }
    wanted = _converted(schema)
    assert list(wanted["properties"]) == ["b_c", "type", "when"]
    assert wanted == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["STRING", "x", None]},
            "b_c": {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "integer"}]}},
            "when": {"type": "string", "format": "date-time", "default": "NULL"},
        },
    }


def test_what_may_be_null_says_so_in_json_schema():
    """A type, alternatives, or neither."""
    assert _converted({"type": "NUMBER", "nullable": True}) == {"type": ["number", "null"]}
    assert _converted({"any_of": [{"type": "STRING"}], "nullable": True}) == {
        "anyOf": [{"type": "string"}, {"type": "null"}]
    }
    assert _converted({"nullable": False}) == {}


def test_definitions_are_named_as_in_json_schema():
    """Google's `defs` and `ref`, and what they hold."""
    given_ = {"defs": {"a": {"type": "STRING"}}, "ref": "#/$defs/a"}
    assert _converted(given_) == {"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"}


@given(JSON_SCHEMA)
def test_json_schema_stays_what_it_is(schema):
    """To the byte, keys in their order."""
    assert json_schema(Fields({"schema": schema}), "schema") == compact(schema)


def test_an_absent_schema_is_none():
    """And one that is no object is refused."""
    assert json_schema(Fields({}), "schema") is None
    with pytest.raises(BadRequest, match="schema: expected an object"):
        json_schema(Fields({"schema": [1]}), "schema")


def test_a_schema_nested_without_end_is_refused():
    """And not by a crash."""
    schema = {"type": "STRING"}
    for _ in range(200):
        schema = {"items": schema}
    with pytest.raises(BadRequest, match="schema: nested deeper"):
        json_schema(Fields({"schema": schema}), "schema")


@pytest.mark.parametrize(("name", "spelled"), [("top_k", "topK"), ("topK", "topK"), ("_x", "_x"), ("a_1", "a1")])
def test_a_field_has_one_spelling(name, spelled):
    """Google's camelCase."""
    assert camel(name) == spelled
