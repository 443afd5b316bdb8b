"""Messages decode to what was encoded, and all other bytes are refused."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import AdapterId, ModelId, Request, RequestId, Sampling
from hotswap.abc import KVLayout
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.errors import InstanceLost, MigrationAborted, UnknownAdapter
from tests.backends.transports.recording import LAYOUT

IDS = st.integers(0, 2**31 - 1)
TOKENS = st.lists(IDS, max_size=50).map(tuple)
VALID_TEXT = st.text(st.characters(codec="utf-8"))
SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.integers(3, 10**6),
    min_tokens=st.integers(0, 3),
    temperature=st.floats(0, 100) | st.just(1),
    top_k=st.integers(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 10),
    presence_penalty=st.floats(-2, 2) | st.just(1),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
    suppress_tokens=TOKENS,
    begin_suppress_tokens=TOKENS,
    forced_end_tokens=TOKENS,
    bad_words=st.lists(st.text(min_size=1), max_size=3),
    bad_words_ids=st.lists(TOKENS.filter(bool), max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
    skip_special_tokens=st.booleans(),
    truncate_prompt_tokens=st.none() | st.integers(1, 100),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    logprobs_of=st.sampled_from(["raw", "sampled"]),
)
GRAMMARS = (
    st.builds(Sampling, regex=VALID_TEXT)
    | st.builds(Sampling, grammar=VALID_TEXT)
    | st.builds(Sampling, json_schema=st.dictionaries(VALID_TEXT, st.integers()))
)
REQUESTS = st.builds(
    Request,
    id=st.text().map(RequestId),
    model=st.text().map(ModelId),
    prompt=TOKENS.filter(bool),
    sampling=SAMPLINGS | GRAMMARS,
    generated=TOKENS,
    adapter=st.none() | st.text().map(AdapterId),
    priority=st.integers(),
)
LAYOUTS = st.builds(
    KVLayout,
    model=st.text().map(ModelId),
    weights=st.text(),
    adapter=st.none() | st.text().map(AdapterId),
    block_tokens=st.integers(1, 64),
    layers=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.text()), max_size=5
    ).map(tuple),
    block_bytes=st.integers(0, 2**40),
    computed_by=st.text(),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(REQUESTS)
def test_a_request_comes_back(request: Request) -> None:
    message = wire.unpack(wire.pack("open", 1, **wire.request_fields(request)))
    assert wire.request_of(message, wire.tokens_of(wire.pack_tokens(request.tokens))) == request


@pytest.mark.parametrize("text", ["[" * 1000, '\\"{[' * 250])
def test_a_request_whose_texts_have_countless_brackets_comes_back(text: str) -> None:
    """They are no lists: no client may break a link by a stop string or a schema."""
    sampling = Sampling(stop=[f"{text}{n}" for n in range(40)], json_schema={"description": text * 40})
    request = Request(id=RequestId("r"), model=ModelId("m"), prompt=(1,), sampling=sampling)
    message = wire.unpack(wire.pack("open", 1, **wire.request_fields(request)))
    assert wire.request_of(message, request.tokens) == request


@given(LAYOUTS)
def test_a_layout_comes_back(layout: KVLayout) -> None:
    back = wire.layout_of(wire.unpack(wire.pack("done", 1, layout=wire.layout_fields(layout))))
    assert (back, back.computed_by) == (layout, layout.computed_by)


def test_errors_come_back_with_stage_and_message() -> None:
    def back(error: Any) -> Any:
        return wire.error_of(wire.unpack(wire.pack_error(1, "open", error)))

    aborted = back(MigrationAborted("no room", stage="reserve"))
    assert (type(aborted), aborted.stage, str(aborted)) == (MigrationAborted, "reserve", "no room")
    lost = back(InstanceLost("gone"))
    assert (type(lost), str(lost)) == (InstanceLost, "gone")
    other = back(UnknownAdapter("no such"))
    assert (type(other), other.stage, str(other)) == (MigrationAborted, "open", "no such")
    assert wire.error_of(wire.unpack(wire.pack("done", 1))) is None


@given(st.binary(max_size=50) | JSON.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_message_are_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        wire.unpack(message)


@given(st.dictionaries(st.sampled_from(["version", "verb", "number"]), JSON), st.data())
def test_fields_of_other_types_are_refused(changes: dict[str, object], data: st.DataObject) -> None:
    request = Request(id=RequestId("r"), model=ModelId("m"), prompt=(1, 2), generated=(3,))
    fields: dict[str, Any] = json.loads(wire.pack("open", 1, **wire.request_fields(request)))
    layout: dict[str, Any] = json.loads(wire.pack("done", 1, layout=wire.layout_fields(LAYOUT)))
    parameters = [field.name for field in dataclasses.fields(Sampling)]
    changed = ((fields, fields), (layout, layout), (fields["sampling"], parameters), (layout["layout"],) * 2)
    for said, names in changed:
        said[data.draw(st.sampled_from(sorted(names)))] = data.draw(JSON)
    fields.update(changes)
    for said, read in (
        (fields, lambda message: wire.request_of(message, request.tokens)),
        (layout, wire.layout_of),
        (fields, wire.error_of),
    ):
        with suppress(ProtocolError):
            read(wire.unpack(json.dumps(said).encode()))


def test_a_payload_that_is_no_tokens_is_refused() -> None:
    with pytest.raises(ProtocolError, match="7 bytes"):
        wire.tokens_of(memoryview(bytes(7)))
