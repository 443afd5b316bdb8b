"""Every error of hotswap has an answer of its own, and clients learn no more than they should."""

from __future__ import annotations

import inspect

import pytest
from pydantic import ValidationError

from hotswap import errors
from hotswap.door.errors import ROWS, Refusal, is_retried, refusal_of
from hotswap.door.openapi import document
from hotswap.door.protocol import ChatBody
from hotswap.errors import ConfigError, HotswapError, InvalidRequest, QueueFull, ShardMissing

ALL = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, HotswapError)]


def an(error: type[HotswapError]) -> HotswapError:
    """An error of a class, whatever its constructor takes."""
    options: dict[str, object] = {
        name: 1.5 if name.endswith("_s") else "load"
        for name, parameter in inspect.signature(error.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return error("What happened.", **options)


@pytest.mark.parametrize("error", ALL)
def test_every_error_has_a_row_of_its_own(error: type[HotswapError]) -> None:
    row, refusal = ROWS[error], refusal_of(an(error))
    assert (refusal.status, refusal.code, refusal.kind) == (row.status, row.code, row.kind)
    assert (refusal.message == "What happened.") is not row.private
    # Clients of OpenAI's try again by themselves after these, unless they are told not to.
    if is_retried(refusal.status):
        assert (refusal.headers.get("x-should-retry") == "false") is not row.retry
        assert ("retry-after" in refusal.headers) is row.retry
    else:
        assert refusal.headers == {}


def test_the_table_has_no_row_too_many() -> None:
    assert set(ROWS) == set(ALL)


def test_a_full_queue_says_when_to_come_back() -> None:
    headers = refusal_of(QueueFull("Full.", retry_after_s=1.234)).headers
    assert headers == {"retry-after": "2", "retry-after-ms": "1234"}


def test_another_error_is_internal_and_its_text_hidden() -> None:
    refusal = refusal_of(RuntimeError("secret"))
    assert (refusal.status, refusal.code) == (500, "internal_error")
    assert "secret" not in str(refusal.body)


def test_operators_are_told_what_clients_are_not() -> None:
    error = ShardMissing("There is no /srv/weights/a.")
    assert "/srv" not in refusal_of(error).message
    assert "/srv" in refusal_of(error, to_operator=True).message
    assert refusal_of(ConfigError("x is 1; give 2."), to_operator=True).status == 400


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature is 3; give less.", "temperature"),
        ("messages[2].content[0].text is 3; give a string.", "messages[2].content[0].text"),
        ("The prompt is empty; give a token.", "prompt"),
        ("The chat has 9 characters.", "messages"),
        ("json_schema cannot be used.", "response_format"),
        ("Model 'a' has no tokenizer.", None),
    ],
)
def test_the_field_at_fault_is_named(message: str, param: str | None) -> None:
    assert refusal_of(InvalidRequest(message)).param == param


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ('{"messages": [{}]}', "model", "missing_required_parameter"),
        ('{"model": "a", "messages": [{}], "what": 1}', "what", "unknown_parameter"),
        (
            '{"model": "a", "messages": [{}], "stream_options": {"x": 1}}',
            "stream_options.x",
            "unknown_parameter",
        ),
        ('{"model": 5, "messages": [{}]}', "model", "invalid_value"),
        ('{"model": "a", "messages": "hello"}', "messages", "invalid_value"),
        ("[", None, "invalid_value"),
    ],
)
def test_a_field_that_is_wrong_is_named_by_its_place(body: str, param: str | None, code: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate_json(body)
    refusal = refusal_of(caught.value)
    assert (refusal.status, refusal.param, refusal.code) == (400, param, code)


def test_a_refusal_answers_as_it_is() -> None:
    refusal = Refusal(418, "I am a teapot.", "teapot")
    assert refusal_of(refusal) is refusal


@pytest.mark.parametrize("status", [408, 409, 429, 500, 501, 502, 503, 504])
def test_a_refusal_says_when_to_try_again_or_that_it_is_of_no_use(status: int) -> None:
    assert Refusal(status, "No.", "no").headers == {"x-should-retry": "false"}
    assert Refusal(status, "No.", "no", headers={"retry-after": "1"}).headers == {"retry-after": "1"}


def test_the_document_tells_the_headers_of_every_answer_that_is_tried_again() -> None:
    paths = document()["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                told = set(answer.get("headers", ()))
                wanted = {"retry-after", "retry-after-ms", "x-should-retry"}
                is_probe = (path, status) == ("/ready", "503")  # no client of OpenAI's asks for it
                assert told == (wanted if is_retried(int(status)) and not is_probe else set()), (path, status)
