"""What the benchmark of grammars takes for right: documents of their schemas, and nothing else."""

from __future__ import annotations

import json
from random import Random

import pytest

from benchmarks.grammar import people
from benchmarks.json_schemas import fault, random_schema

KEYWORDS = ("anyOf", "oneOf", "allOf", "$ref", "pattern", "prefixItems", "enum", "const", "multipleOf")


def test_random_schemas_have_all_kinds_and_are_the_same_for_a_seed() -> None:
    pytest.importorskip("jsonschema").Draft202012Validator.check_schema(people(0))
    made = [json.dumps(random_schema(Random(seed))) for seed in range(200)]
    assert made == [json.dumps(random_schema(Random(seed))) for seed in range(200)]
    for keyword in KEYWORDS:
        assert sum(f'"{keyword}"' in schema for schema in made) >= 5, keyword


def test_a_document_of_another_schema_is_a_fault() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}, "required": ["a"]}
    assert not fault('{"a": 3}', schema)
    for wrong in ('{"a": 4}', "{}", '{"a": 3', ""):
        assert fault(wrong, schema)
