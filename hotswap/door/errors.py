"""hotswap's errors as answers over HTTP: one row for each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from pydantic import ValidationError

from hotswap import errors
from hotswap.errors import ConfigError, HotswapError, InvalidRequest, PromptTooLong, QueueFull

__all__ = ["RETRY_SOON", "ROWS", "Refusal", "Row", "invalid", "is_retried", "refusal_of"]

# Of what goes away by itself, within a time that cannot be told.
RETRY_SOON = {"retry-after": "1"}


@dataclass(frozen=True, slots=True)
class Row:
    """How an error is answered.

    Attributes:
        status: The status of HTTP.
        code: What a program asks for.
        kind: OpenAI's `type`.
        param: The field at fault, if it is always the same.
        retry: Whether a client may try again soon; clients of OpenAI's try again by themselves, unless they
            are told not to.
        private: Whether its text is for operators alone.
    """

    status: int
    code: str
    kind: str = "invalid_request_error"
    param: str | None = None
    retry: bool = False
    private: bool = False


_SERVER = "server_error"

ROWS: dict[type[HotswapError], Row] = {
    errors.UnknownModel: Row(404, "model_not_found", param="model"),
    errors.UnknownAdapter: Row(404, "model_not_found", param="model"),
    errors.UnsupportedAdapter: Row(400, "unsupported_adapter", param="model"),
    errors.InvalidRequest: Row(400, "invalid_value"),
    errors.PromptTooLong: Row(400, "context_length_exceeded"),
    errors.QueueFull: Row(429, "queue_full", "rate_limit_error", retry=True),
    errors.RequestCancelled: Row(409, "request_cancelled", "conflict_error"),
    errors.DeadlineExceeded: Row(504, "deadline_exceeded", _SERVER),
    errors.ModelTooLarge: Row(503, "model_too_large", _SERVER, "model"),
    errors.UnsupportedModel: Row(503, "unsupported_model", _SERVER, "model"),
    errors.LoadsExhausted: Row(503, "model_load_failed", _SERVER, "model"),
    errors.FleetClosed: Row(503, "shutting_down", _SERVER, retry=True),
    errors.RequestError: Row(400, "invalid_request"),
    errors.SwapRefused: Row(409, "swap_refused", "conflict_error"),
    errors.MigrationAborted: Row(409, "migration_aborted", "conflict_error"),
    errors.SwapFailed: Row(502, "swap_failed", _SERVER),
    errors.OutOfMemory: Row(502, "out_of_memory", _SERVER),
    errors.MemoryNotReclaimed: Row(502, "memory_not_reclaimed", _SERVER),
    errors.InstanceLost: Row(502, "instance_lost", _SERVER),
    errors.ControllerSuperseded: Row(502, "controller_superseded", _SERVER),
    errors.InstanceError: Row(502, "engine_error", _SERVER),
    errors.StoreBusy: Row(503, "store_busy", _SERVER, retry=True, private=True),
    errors.ShardMissing: Row(502, "shard_missing", _SERVER, private=True),
    errors.ShardCorrupt: Row(502, "shard_corrupt", _SERVER, private=True),
    errors.UnsafeFile: Row(502, "unsafe_file", _SERVER, private=True),
    errors.TierFull: Row(502, "tier_full", _SERVER, private=True),
    errors.StoreError: Row(502, "store_error", _SERVER, private=True),
    errors.SourceChanged: Row(503, "source_changed", _SERVER, private=True),
    errors.WrongLoop: Row(500, "wrong_loop", _SERVER, private=True),
    errors.ConfigError: Row(500, "misconfigured", _SERVER, private=True),
    errors.BackendMissing: Row(501, "not_installed", _SERVER, private=True),
    errors.RequestEvicted: Row(500, "internal_error", _SERVER, private=True),
    errors.HotswapError: Row(500, "internal_error", _SERVER, private=True),
}
"""The row of every error; that of a class also holds for subclasses without one."""

# Of a body with more of them none is named.
_MOST_ERRORS = 1000
_BRANCHES = ("str", "int", "float", "bool")
_HIDDEN = "The server could not do it; its log has the reason."
# The field that a message begins with; those of prompts begin otherwise.
_FIELD = re.compile(r"(?:The )?([a-z_]+(?:\[\d+\]|\.[a-z_]+)*) (?:is|has|have|are|of|cannot)\b")
_NAMED = {"chat": "messages", "json_schema": "response_format"}


@dataclass(eq=False)  # not frozen: Python writes tracebacks into what is raised
class Refusal(Exception):
    """A request that is answered by an error: its status, its text, and what goes with it.

    Clients of OpenAI's and Anthropic's try some statuses again by themselves. Such an answer says when to, by
    `retry-after`, or is given `x-should-retry: false`, which they obey.

    Attributes:
        status: The status of HTTP.
        message: What happened and what to do, for people.
        code: The same for programs.
        kind: OpenAI's `type`.
        param: The field at fault.
        headers: Further headers.
    """

    status: int
    message: str
    code: str
    kind: str = "invalid_request_error"
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if is_retried(self.status) and "retry-after" not in self.headers:
            self.headers = {**self.headers, "x-should-retry": "false"}

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The answer's body, in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def is_retried(status: int) -> bool:
    """Whether clients of OpenAI's try again by themselves after a status, unless they are told not to."""
    return status in (408, 409, 429) or status >= 500


def invalid(param: str, message: str) -> Refusal:
    """Return the refusal of a field that has a wrong value."""
    return Refusal(400, message, "invalid_value", param=param)


def refusal_of(error: Exception, *, to_operator: bool = False) -> Refusal:
    """Return how an error is answered; operators are told what others are not.

    What is no error of hotswap's, nor of a body that is checked, is an internal error.
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ValidationError):
        return _of_body(error)
    row = next((ROWS[kind] for kind in type(error).__mro__ if kind in ROWS), ROWS[HotswapError])
    if to_operator and row is ROWS[ConfigError]:
        row = ROWS[InvalidRequest]
    hidden = not isinstance(error, HotswapError) or (row.private and not to_operator)
    message = _HIDDEN if hidden else str(error)
    return Refusal(row.status, message, row.code, row.kind, _param(row, message), _headers(row, error))


def _of_body(error: ValidationError) -> Refusal:
    if error.error_count() > _MOST_ERRORS:  # to tell the first, all of them would have to be written
        return Refusal(
            400,
            f"The body is wrong in {error.error_count():,} places; send what /openapi.json describes.",
            "invalid_value",
        )
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Of a union pydantic names the branch as well, which is no part of a body.
    where = [str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    where = where[:-1] if where and where[-1] in _BRANCHES else where
    param = ".".join(where) or None
    known = first["type"] != "extra_forbidden"
    says = first["msg"] if known else "is no field that this server knows; leave it out"
    code = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
    message = f"{param or 'The body'}: {says}."
    return Refusal(400, message, code.get(first["type"], "invalid_value"), param=param)


def _param(row: Row, message: str) -> str | None:
    if row.param is not None or row not in (ROWS[InvalidRequest], ROWS[PromptTooLong]):
        return row.param
    found = _FIELD.match(message)
    return _NAMED.get(found[1], found[1]) if found else None


def _headers(row: Row, error: Exception) -> dict[str, str]:
    if not row.retry:
        return {}
    if isinstance(error, QueueFull):
        milliseconds = max(1, round(error.retry_after_s * 1000))
        return {"retry-after": str(math.ceil(milliseconds / 1000)), "retry-after-ms": str(milliseconds)}
    return dict(RETRY_SOON)
