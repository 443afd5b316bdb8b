"""What crosses a link arrives as it was: errors with their causes, models, status, log-probabilities."""

from __future__ import annotations

import json
import math

import anyio
import pytest

from hotswap import Adapter, InstanceId, InstanceState, ModelId, ScoredPrompt, Token, TokenLogprob, errors
from hotswap.abc import EngineStatus, Frame, ModelCard
from hotswap.backends.fields import Fields
from hotswap.backends.remote import values
from hotswap.backends.remote.failures import error_of, failure
from hotswap.backends.remote.messages import frames_of, messages_of, said
from hotswap.backends.remote.values import (
    adapter_fields,
    adapter_of,
    add_to_prompt,
    card_fields,
    card_of,
    prompt_parts,
    scored,
    status_changes,
    status_of,
    token_of,
)
from hotswap.errors import (
    HotswapError,
    InstanceError,
    OutOfMemory,
    QueueFull,
    ShardCorrupt,
)
from hotswap.offline.virtual_time import virtual_time
from tests.backends.remote.support import request, rig
from tests.test_errors import classes, made


def crossed(fields: dict[str, object]) -> Fields:
    """Fields as they are at the other end."""
    return Fields(json.loads(json.dumps(fields, allow_nan=False)), "a message")


def error_there(error: Exception) -> HotswapError:
    return error_of(crossed(failure(error)))


@pytest.mark.parametrize("kind", [kind for kind in classes() if kind.__name__ in errors.__all__])
def test_an_error_crosses_with_its_type_its_text_and_its_attributes(kind: type[HotswapError]) -> None:
    error = made(kind)
    there = error_there(error)
    assert type(there) is kind
    assert str(there) == str(error)
    assert vars(there) == vars(error)


def test_an_error_crosses_with_its_causes() -> None:
    lowest = OSError("the disk is gone")
    middle, top = ShardCorrupt("a shard is damaged"), OutOfMemory("no room")
    middle.__cause__, top.__cause__ = lowest, middle
    there = error_there(top)
    assert type(there) is OutOfMemory
    assert type(there.__cause__) is ShardCorrupt
    assert type(there.__cause__.__cause__) is HotswapError, "not a class of the peer's choice"
    assert str(there.__cause__.__cause__) == "OSError: the disk is gone"


class OutOfPages(OutOfMemory):
    """An error of an engine of another's."""


def test_an_error_of_another_class_crosses_as_the_nearest_that_both_ends_have() -> None:
    assert type(error_there(OutOfPages("no pages"))) is OutOfMemory
    there = error_there(ZeroDivisionError("by zero"))
    assert type(there) is InstanceError
    assert str(there) == "ZeroDivisionError: by zero"


class Untold(Exception):
    """An error of a library whose text cannot be made."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def test_an_error_without_a_text_crosses_too() -> None:
    above = OutOfMemory("no room")
    above.__cause__ = Untold()
    for error in (Untold(), above):
        error_there(error)
    assert str(error_there(Untold())) == "Untold: its text cannot be made"


def test_an_error_that_only_the_other_end_knows_keeps_its_text() -> None:
    newer: dict[str, object] = {"kind": "FromTheFuture", "text": "too early", "about": {"x": 1}}
    there = error_of(crossed(newer))
    assert type(there) is InstanceError
    assert str(there) == "FromTheFuture: too early"


def test_a_circle_of_causes_a_long_text_and_an_infinite_attribute_cross_too() -> None:
    circle = QueueFull("x" * 100_000, retry_after_s=math.inf)
    circle.__cause__ = circle
    there = error_there(circle)
    assert type(there) is QueueFull
    assert len(str(there)) < 9000
    assert there.retry_after_s > 1e9


def test_models_and_adapters_cross_as_they_are() -> None:
    card = ModelCard(id=ModelId("a"), weight_bytes=1, max_context_tokens=2, eos_token_ids=(3, 4), weight=0.5)
    assert card_of(crossed(card_fields(card))) == card
    for adapter in (Adapter("x", "a", "/there"), Adapter("x", "a", epoch=2)):
        assert adapter_of(crossed(adapter_fields(adapter))) == adapter


def test_of_a_status_only_what_has_changed_crosses() -> None:
    one = EngineStatus(id=InstanceId("e0"), state=InstanceState.SERVING, model=ModelId("a"), num_running=1)
    two = one.updated(state=InstanceState.DRAINING, preempted=("r1", "r2"), model=None, warnings=("w",))
    empty = EngineStatus(id=InstanceId("e0"), state=InstanceState.EMPTY)
    assert status_of(crossed(status_changes(None, one)), empty) == one
    changes = status_changes(one, two)
    assert changes.keys() == {"state", "preempted", "model", "warnings"}
    assert status_of(crossed(changes), one) == two
    assert status_changes(two, two) == {}


async def test_a_time_of_a_status_crosses_as_what_has_passed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    here_s = anyio.current_time()
    one = EngineStatus(id=InstanceId("e0"), state=InstanceState.SERVING, kept_since_s=here_s - 5)
    told = crossed(status_changes(None, one))
    monkeypatch.setattr(values, "current_time", lambda: 1000.0)  # the clock of another machine
    there = status_of(told, one.updated(kept_since_s=None))
    assert there.kept_since_s == pytest.approx(995, abs=1)
    assert status_of(crossed(status_changes(one, one.updated(kept_since_s=None))), there).kept_since_s is None


def test_a_token_crosses_with_its_log_probabilities_those_of_impossible_tokens_too() -> None:
    top = (TokenLogprob(id=7, logprob=-0.25), TokenLogprob(id=9, logprob=-math.inf))
    token = Token(id=7, index=3, finish_reason="stop", logprob=-0.25, top_logprobs=top)
    assert token_of(scored(token), 3, "stop") == token


@pytest.mark.parametrize("num_tokens", [1, 2, 511, 512, 513, 2000])
def test_what_is_told_of_a_prompt_crosses_in_parts(num_tokens: int) -> None:
    prompt = ScoredPrompt(5)
    for at in range(1, num_tokens):
        prompt.add(at, -at / 7, range(at % 4), [-0.5 * n for n in range(at % 4)])
    there: ScoredPrompt | None = None
    for num_entries, payload in prompt_parts(prompt):
        there = add_to_prompt(there, num_entries, payload)
    assert there == prompt


def test_messages_of_any_size_cross_in_frames_that_a_link_takes() -> None:
    messages = [
        said("m", n, {"text": "x" * (n % 7) * 20_000}, memoryview(bytes([n % 256]) * (n % 5) * 300_000))
        for n in range(200)
    ]
    there = list[tuple[int, int, bytes]]()
    frames = list(frames_of(messages, 3))
    for number, (message, payload) in enumerate(frames, start=3):
        assert len(message) <= 1 << 20
        assert len(payload) <= 8 << 20
        for each in messages_of(Frame(message, memoryview(bytearray(payload))), number):
            there.append((each.number, len(each.fields.text("text")), bytes(each.payload)))
    assert there == [(n, n % 7 * 20_000, bytes([n % 256]) * (n % 5) * 300_000) for n in range(200)]
    assert 1 < len(frames) < 200


@virtual_time
async def test_a_request_that_no_frame_holds_is_refused_and_the_link_stays() -> None:
    async with rig() as made_:
        await made_.engine.load(made_.card, made_.store)
        grammar = "\u2603" * 120_000  # six characters each as JSON
        stop = tuple("\u2603" * 1023 + chr(9000 + n) for n in range(64))
        with pytest.raises(InstanceError, match="limits of a link"):
            async with made_.engine.stream(request(grammar=grammar, stop=stop)):
                pass
        async with made_.engine.stream(request()) as tokens:
            await anext(tokens)
        await made_.engine.unload()
