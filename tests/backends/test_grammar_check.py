"""Grammars are judged without their model as with it, and misspelled keywords of schemas are told."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from hotswap import Sampling
from hotswap.backends import grammars
from hotswap.backends.grammar_check import GrammarCheck
from hotswap.backends.torch.grammar import GrammarCompiler
from hotswap.errors import InvalidRequest
from tests.text_tokenizers import SPECIAL, byte_level

VOCABULARY = 512
END = byte_level().id_of(SPECIAL) or 0

GOOD: list[dict[str, Any]] = [
    {"regex": "[a-z]+"},
    {"regex": "(a|b){2,900}"},
    {"grammar": 'start: "a" | "b" start'},
    {"json_schema": {"type": "object"}},
    {"json_schema": {"type": "object", "x-order": 3, "properties": {"requird": {"type": "integer"}}}},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a("}, "regex cannot be used.*unclosed group"),
    ({"grammar": "start: missing"}, "grammar cannot be used.*missing"),
    ({"json_schema": {"type": "nonsense"}}, "json_schema cannot be used.*nonsense"),
    ({"json_schema": {"$ref": "#/missing"}}, "json_schema cannot be used.*missing"),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "json_schema"),
]


@pytest.mark.parametrize("fields", GOOD, ids=repr)
def test_a_grammar_that_a_model_can_be_held_to_is_taken(fields: dict[str, Any]) -> None:
    sampling = Sampling(**fields)
    GrammarCompiler(byte_level(), VOCABULARY, (END,)).compile(sampling, ())
    GrammarCheck().check(*sampling.grammar_field)


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=repr)
def test_a_wrong_one_is_refused_as_it_would_be_with_the_model(fields: dict[str, Any], message: str) -> None:
    sampling, check = Sampling(**fields), GrammarCheck()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=message) as alone:
            check.check(*sampling.grammar_field)
    with pytest.raises(InvalidRequest) as compiled:
        GrammarCompiler(byte_level(), VOCABULARY, (END,)).compile(sampling, ())
    assert str(alone.value) == str(compiled.value)


def test_a_grammar_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck()
    check.check("regex", "[a-z]+")
    monkeypatch.delattr(grammars, "LLMatcher")
    check.check("regex", "[a-z]+")


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "object", "requird": ["a"]}, "'requird' at '#' (did you mean 'required'?)"),
        ({"proprties": {"a": {"typ": 1}}}, "'proprties' at '#' (did you mean 'properties'?)"),
        ({"properties": {"a": {"any_of": []}}}, "'any_of' at '#/properties/a' (did you mean 'anyOf'?)"),
        ({"anyOf": [{}, {"minlength": 3}]}, "'minlength' at '#/anyOf/1' (did you mean 'minLength'?)"),
        ({"items": {"type": "string", "enumm": ["a"]}}, "'enumm' at '#/items' (did you mean 'enum'?)"),
    ],
)
def test_a_keyword_that_seems_misspelled_is_told_once(
    schema: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    check = GrammarCheck()
    with caplog.at_level(logging.WARNING, "hotswap"):
        for _ in range(3):
            check.check("json_schema", json.dumps(schema))
    (record,) = caplog.records
    assert told in record.getMessage()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"requird": {}, "typ": {"title": "x"}}, "required": ["requird"]},
        {"title": "x", "description": "y", "default": {"typ": 1}, "examples": [{"typ": 1}], "nullable": True},
        {"x-order": 1, "owner": "me", "enum": ["a"]},
        {"const": {"typ": 1}},
        {"$defs": {"typ": {"type": "string"}}, "$ref": "#/$defs/typ"},
    ],
    ids=repr,
)
def test_names_annotations_and_extensions_are_not_told(
    schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hotswap"):
        GrammarCheck().check("json_schema", json.dumps(schema))
    assert not caplog.records


def test_a_schema_of_thousands_of_misspelled_keywords_is_told_in_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "hotswap"):
        GrammarCheck().check("json_schema", json.dumps({f"require{n}": n for n in range(5000)}))
    assert len(caplog.records[0].getMessage()) < 400
