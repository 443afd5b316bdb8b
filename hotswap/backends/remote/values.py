"""Values as they cross a link: models, adapters, status, and what is told of tokens beside their ids."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from dataclasses import fields as fields_of
from typing import Any, Final, cast, get_args

from anyio.lowlevel import checkpoint

from hotswap.backends.fields import Fields
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.loop_time import current_time
from hotswap.model import Adapter, Layout, ModelCard
from hotswap.request import FinishReason, ModelId, ScoredPrompt, Token, TokenLogprob
from hotswap.view import EngineStatus, InstanceState

__all__ = [
    "FINISH_REASONS",
    "adapter_fields",
    "adapter_of",
    "add_to_prompt",
    "card_fields",
    "card_of",
    "prompt_parts",
    "scored",
    "status_changes",
    "status_of",
    "texts",
    "token_of",
    "tokens_in",
]

FINISH_REASONS: Final[tuple[FinishReason | None, ...]] = (None, "stop", "length")

_TURN_TOKENS = 1 << 14  # decoded at once on the event loop, in about a millisecond
_PROMPT_ENTRIES = 512  # of a scored prompt, in one message


def _text_or_none(fields: Fields, name: str) -> str | None:
    return None if fields.get(name) is None else fields.text(name)


# ---------------------------------------------------------------------- models and adapters


def card_fields(model: ModelCard) -> dict[str, object]:
    """Return the fields of a model."""
    return asdict(model)


def card_of(fields: Fields) -> ModelCard:
    """Return the model of a message."""
    vocabulary = None if fields.get("vocabulary") is None else fields.size("vocabulary")
    layouts: dict[str, Layout] = {layout: layout for layout in get_args(Layout)}
    if (layout := layouts.get(fields.text("layout"))) is None:
        raise fields.wrong(f"{fields.text('layout')[:40]!r} is no layout")
    return ModelCard(
        id=ModelId(fields.text("id")),
        weight_bytes=fields.size("weight_bytes"),
        max_context_tokens=fields.size("max_context_tokens"),
        architecture=fields.text("architecture"),
        eos_token_ids=fields.sizes("eos_token_ids"),
        kv_bytes_per_token=fields.size("kv_bytes_per_token"),
        min_replicas=fields.size("min_replicas"),
        weight=fields.number("weight"),
        vocabulary=vocabulary,
        layout=layout,
        is_gguf=fields.flag("is_gguf"),
    )


def adapter_fields(adapter: Adapter) -> dict[str, object]:
    """Return the fields of an adapter; its path is one of the other end's, too."""
    source = None if adapter.source is None else str(adapter.source)
    return {"id": adapter.id, "model": adapter.model, "source": source, "epoch": adapter.epoch}


def adapter_of(fields: Fields) -> Adapter:
    """Return the adapter of a message.

    Raises:
        ConfigError: it is none that could be registered.
    """
    return Adapter(
        fields.text("id"), fields.text("model"), _text_or_none(fields, "source"), epoch=fields.size("epoch")
    )


# ---------------------------------------------------------------------- status

_NAMES: Final = tuple(field.name for field in fields_of(EngineStatus) if field.name != "id")
_LISTS: Final = frozenset(("preempted", "adapters", "warnings"))
_TEXTS: Final = frozenset(("device_budget", "load_path", "node", "lost_because"))
_MODELS: Final = frozenset(("model", "preloaded"))


def status_changes(before: EngineStatus | None, now: EngineStatus) -> dict[str, object]:
    """Return the fields in which a status differs from the one told before; all but the id without one."""
    told, known = now.__dict__, {} if before is None else before.__dict__
    changed = {name: told[name] for name in _NAMES if name not in known or known[name] != told[name]}
    if now.kept_since_s is not None and "kept_since_s" in changed:
        changed["kept_since_s"] = current_time() - now.kept_since_s  # the other end has a clock of its own
    return changed


def status_of(fields: Fields, before: EngineStatus) -> EngineStatus:
    """Return a status with the changes of a message."""
    changes: dict[str, Any] = {}
    for name in fields.raw:
        if name not in _NAMES:
            raise fields.wrong(f"{name[:40]!r} is no field of a status")
        changes[name] = _status_field(fields, name)
    return before.updated(**changes)


def _status_field(fields: Fields, name: str) -> object:
    if name == "state":
        try:
            return InstanceState(fields.text(name))
        except ValueError:
            raise fields.wrong(f"{fields.text(name)[:40]!r} is no state") from None
    if name == "kept_since_s":
        return None if fields.get(name) is None else current_time() - fields.number(name)
    if name in _LISTS:
        return texts(fields, name)
    if name in _TEXTS:
        return fields.text(name)
    return _text_or_none(fields, name) if name in _MODELS else fields.size(name)


def texts(fields: Fields, name: str) -> tuple[str, ...]:
    """Return a field that is a list of texts."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise fields.wrong(f"the field {name!r} is not a list")
    items = cast("list[object]", value)
    if not all(isinstance(item, str) for item in items):
        raise fields.wrong(f"the field {name!r} is not a list of texts")
    return tuple(cast("list[str]", items))


# ---------------------------------------------------------------------- tokens


async def tokens_in(payload: bytes) -> tuple[int, ...]:
    """Decode the tokens of a payload, a part in each turn of the event loop.

    Raises:
        ProtocolError: there is no whole number of them.
    """
    tokens: list[int] = []
    turn_bytes = _TURN_TOKENS * wire.TOKEN_BYTES
    for at in range(0, len(payload), turn_bytes):
        tokens += wire.tokens_of(memoryview(payload)[at : at + turn_bytes])
        if at:
            await checkpoint()
    return tuple(tokens)


# ---------------------------------------------------------------------- log-probabilities


def scored(token: Token) -> memoryview:
    """Return a token and the most probable ones beside it, with their log-probabilities, as a payload."""
    ids = [token.id, *(each.id for each in token.top_logprobs)]
    logprobs = [token.logprob or 0.0, *(each.logprob for each in token.top_logprobs)]
    return _packed(ids, logprobs)


def token_of(payload: memoryview, index: int, reason: FinishReason | None) -> Token:
    """Return the token of a payload.

    Raises:
        ProtocolError: the payload is none of `scored`.
    """
    ids, logprobs = _unpacked(payload, len(payload) // 16)
    if not ids:
        raise ProtocolError("a token was told without its id")
    top = tuple(
        TokenLogprob(id=id, logprob=logprob) for id, logprob in zip(ids[1:], logprobs[1:], strict=True)
    )
    return Token(id=ids[0], index=index, finish_reason=reason, logprob=logprobs[0], top_logprobs=top)


def prompt_parts(prompt: ScoredPrompt) -> Iterator[tuple[int, memoryview]]:
    """Yield what is told of a prompt's tokens, some at a time: how many tokens, and a payload."""
    for at in range(0, len(prompt), _PROMPT_ENTRIES):
        entries = prompt[at : at + _PROMPT_ENTRIES]
        ids = [n for entry in entries for n in (entry.id, len(entry.top_logprobs))]
        ids += [each.id for entry in entries for each in entry.top_logprobs]
        # As many of one as of the other: the places of the counts are zeros.
        logprobs = [n for entry in entries for n in (entry.logprob or 0.0, 0.0)]
        logprobs += [each.logprob for entry in entries for each in entry.top_logprobs]
        yield len(entries), _packed(ids, logprobs)


def add_to_prompt(prompt: ScoredPrompt | None, num_entries: int, payload: memoryview) -> ScoredPrompt:
    """Add a part of `prompt_parts` to what was told before; the first entry of the first part begins it.

    Raises:
        ProtocolError: the payload is none of `prompt_parts`.
    """
    ids, logprobs = _unpacked(payload, len(payload) // 16)
    end = 2 * num_entries
    if not 0 < num_entries <= _PROMPT_ENTRIES or len(ids) < end or any(n < 0 for n in ids[:end]):
        raise ProtocolError("what is told of a prompt cannot be read")
    if end + sum(ids[1:end:2]) != len(ids):
        raise ProtocolError("what is told of a prompt has another length than it says")
    for place in range(0, end, 2):
        top, end = slice(end, end + ids[place + 1]), end + ids[place + 1]
        if prompt is None:
            prompt = ScoredPrompt(ids[place])
        else:
            prompt.add(ids[place], logprobs[place], ids[top], logprobs[top])
    assert prompt is not None, "there was an entry"
    return prompt


def _packed(ids: Sequence[int], logprobs: Sequence[float]) -> memoryview:
    numbers = array("d", logprobs)
    if sys.byteorder == "big":
        numbers.byteswap()
    return memoryview(bytes(wire.pack_tokens(ids)) + numbers.tobytes())


def _unpacked(payload: memoryview, count: int) -> tuple[tuple[int, ...], list[float]]:
    if len(payload) != 16 * count:
        raise ProtocolError(f"{len(payload)} bytes are no pairs of tokens and log-probabilities")
    numbers = array("d", bytes(payload[8 * count :]))
    if sys.byteorder == "big":
        numbers.byteswap()
    ids = wire.tokens_of(payload[: 8 * count])
    if ids and not -(1 << 31) <= min(ids) <= max(ids) < 1 << 31:
        raise ProtocolError("an id of a token is out of range")
    return ids, numbers.tolist()
