"""Random JSON schemas whose documents are short, and a check of documents that knows nothing of grammars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

__all__ = ["schemas", "validates"]

_NAMES = st.sampled_from(["a", "b", "key", "two words", "é", 'quote"', "0"])
_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-1000, 1000), st.text(alphabet='ab"\\\né😀 ', max_size=5)
)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas whose documents have a few hundred characters at most."""
    return st.recursive(_leaves(), _composed, max_leaves=6)


def validates(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a document is of a schema, with the keywords that `schemas` uses."""
    if "anyOf" in schema:
        return any(validates(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(_same(value, one) for one in schema["enum"])
    if "const" in schema:
        return _same(value, schema["const"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema["maxLength"]
        case "array":
            if (
                not isinstance(value, list)
                or not schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            ):
                return False
            return all(validates(item, schema["items"]) for item in value)
        case _:
            if not isinstance(value, dict) or not set(schema["required"]) <= set(value):
                return False
            known = schema["properties"]
            return all(name in known and validates(item, known[name]) for name, item in value.items())


def _same(left: object, right: object) -> bool:
    return type(left) is type(right) and left == right


def _leaves() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-300, 300), st.integers(0, 100_000))
    return st.one_of(
        st.just({"type": "null"}),
        st.just({"type": "boolean"}),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        st.integers(0, 4).map(lambda n: {"type": "string", "minLength": n // 2, "maxLength": 2 * n}),
        _VALUES.map(lambda value: {"const": value}),
        st.lists(_VALUES, min_size=1, max_size=4, unique_by=repr).map(lambda values: {"enum": values}),
    )


def _composed(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.tuples(inner, st.integers(0, 1), st.integers(1, 2)).map(
        lambda made: {"type": "array", "items": made[0], "minItems": made[1], "maxItems": made[2]}
    )
    objects = st.tuples(st.dictionaries(_NAMES, inner, max_size=3), st.randoms(use_true_random=False)).map(
        lambda made: {
            "type": "object",
            "properties": made[0],
            "required": [name for name in made[0] if made[1].random() < 0.7],
            "additionalProperties": False,
        }
    )
    return st.one_of(
        arrays, objects, st.lists(inner, min_size=1, max_size=3).map(lambda ones: {"anyOf": ones})
    )
