"""Every error hotswap raises, arranged by what the caller does next.

HotswapError
  ConfigError(ValueError)      fix the set-up
    UnknownModel, UnknownAdapter           never registered
    UnsupportedModel, UnsupportedAdapter   the engine cannot run it exactly
    SourceChanged                          files are not those that were imported or registered
    WrongLoop                              the fleet belongs to another event loop
  FleetClosed                  the fleet has ended or has not begun
  RequestError                 give up on this request
    InvalidRequest(ValueError)   a field of the request or its sampling is out of range
    PromptTooLong                prompt and generated tokens exceed the model's context
    ModelTooLarge                no engine of the fleet could ever hold the model
    QueueFull                    as many requests wait as may; try again after `retry_after_s`
    DeadlineExceeded             the request's own deadline passed
    RequestCancelled             it was cancelled by its id
    LoadsExhausted               its model failed to load too often
  InstanceError                try elsewhere
    OutOfMemory                  weights or KV blocks do not fit
    MemoryNotReclaimed           unload ended but the memory is still taken
    SwapRefused                  another swap holds the instance, or it serves the model already
    SwapFailed                   a phase of a swap failed or ran out of time
    MigrationAborted             a stage of a migration failed; the source still owns the request
    InstanceLost                 the engine is gone, its requests with it
      ControllerSuperseded                   another controller has the engine
  StoreError                   try another tier
    ShardMissing                 the weights are not there
    ShardCorrupt                 the file is not what its index says
    UnsafeFile                   a file that could run code, or that points outside its directory
    TierFull                     the tier has no room left
    StoreBusy                    a model is in use, or a lock is held; try again later
  BackendMissing(ImportError)  install an extra
  RequestEvicted               raised by engines, caught by the fleet; a client never sees it

Every error survives `pickle` and `copy` with its message, its attributes and its cause, and so can cross a
process boundary.
"""

from __future__ import annotations

import pickle
from typing import Any, cast

__all__ = [
    "BackendMissing",
    "ConfigError",
    "ControllerSuperseded",
    "DeadlineExceeded",
    "FleetClosed",
    "HotswapError",
    "InstanceError",
    "InstanceLost",
    "InvalidRequest",
    "LoadsExhausted",
    "MemoryNotReclaimed",
    "MigrationAborted",
    "ModelTooLarge",
    "OutOfMemory",
    "PromptTooLong",
    "QueueFull",
    "RequestCancelled",
    "RequestError",
    "RequestEvicted",
    "ShardCorrupt",
    "ShardMissing",
    "SourceChanged",
    "StoreBusy",
    "StoreError",
    "SwapFailed",
    "SwapRefused",
    "TierFull",
    "UnknownAdapter",
    "UnknownModel",
    "UnsafeFile",
    "UnsupportedAdapter",
    "UnsupportedModel",
    "WrongLoop",
]


class HotswapError(Exception):
    """The root of all errors that hotswap raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException would call __init__ with the message alone, and leave the cause behind.
        reduced = cast("tuple[Any, ...]", super().__reduce__())
        attributes: dict[str, Any] = dict(reduced[2]) if len(reduced) > 2 else {}
        if self.__cause__ is not None:
            attributes["__cause__"] = _picklable(self.__cause__)
        return _without_init, (type(self), self.args), attributes


class ConfigError(HotswapError, ValueError):
    """The set-up is wrong; no retry will help."""


class UnknownModel(ConfigError):
    """A model that was never registered with the fleet or the store."""


class UnknownAdapter(ConfigError):
    """An adapter that was never registered."""


class UnsupportedModel(ConfigError):
    """An architecture that the engine cannot serve exactly; it refuses rather than give wrong tokens."""


class UnsupportedAdapter(ConfigError):
    """An adapter that does not fit its model, or that the engine cannot apply exactly."""


class SourceChanged(ConfigError):
    """The files of a model or an adapter are not those that were imported or registered under its name."""


class WrongLoop(ConfigError):
    """A fleet was used from another event loop than the one that opened it."""


class FleetClosed(HotswapError):
    """The fleet was used before `async with` began or after it ended."""


class RequestError(HotswapError):
    """This request cannot be served; others are unaffected."""


class InvalidRequest(RequestError, ValueError):
    """A field of the request or of its sampling is out of range."""


class PromptTooLong(RequestError):
    """The tokens so far do not fit the model's context, or never fit the engine's KV blocks."""


class ModelTooLarge(RequestError):
    """No engine of the fleet could ever hold the model."""


class QueueFull(RequestError):
    """As many requests wait as may, or keep as many log-probabilities of prompts.

    `retry_after_s` estimates when there is room again.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestError):
    """The request's own deadline passed before it finished."""


class RequestCancelled(RequestError):
    """The request was cancelled by its id (`Fleet.cancel`), not by the client that reads it."""


class LoadsExhausted(RequestError):
    """The request's model failed to load too often, and no instance serves it."""


class InstanceError(HotswapError):
    """One instance cannot do it; another may."""


class OutOfMemory(InstanceError):
    """Weights or KV blocks do not fit in the instance's memory."""


class MemoryNotReclaimed(InstanceError):
    """An unload ended, yet the memory it should have freed is still taken."""


class SwapRefused(InstanceError):
    """A swap that did not start: another one holds the instance, or it serves the model already."""


class SwapFailed(InstanceError):
    """A swap that failed in `phase`: `"preflight"`, `"preload"`, `"evict"`, `"unload"` or `"load"`."""

    def __init__(self, message: str, *, phase: str) -> None:
        super().__init__(message)
        self.phase = phase


class MigrationAborted(InstanceError):
    """A migration that failed in `stage`; the source still owns the request."""

    def __init__(self, message: str, *, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class InstanceLost(InstanceError):
    """The engine is gone: its process died, its device failed, or its host cannot be reached."""


class ControllerSuperseded(InstanceLost):
    """The engine's host serves a newer controller, and refuses this one."""


class StoreError(HotswapError):
    """Weights or KV blocks could not be read or written; another tier may still hold the weights."""


class ShardMissing(StoreError):
    """The store holds no such model or shard."""


class ShardCorrupt(StoreError):
    """A file is truncated, changed, of another format, or contradicts its index; the message names it."""


class UnsafeFile(StoreError):
    """A file that could run code when read (a pickle), or an index that points outside its directory."""


class TierFull(StoreError):
    """The tier's budget or its disk has no room; the models on it are untouched."""


class StoreBusy(StoreError):
    """A model is in use, or another process keeps a lock; nothing was changed, a later try may succeed."""


class BackendMissing(HotswapError, ImportError):
    """A backend's library is not installed; the message says which extra brings it."""


class RequestEvicted(HotswapError):
    """An engine ended a stream so that its request continues elsewhere; private to engines and the fleet."""


def _without_init(kind: type[HotswapError], args: tuple[Any, ...]) -> HotswapError:
    return kind.__new__(kind, *args)


def _picklable(cause: BaseException) -> BaseException:
    """Return the cause, or its type and message if it is another library's and does not survive pickle."""
    if not isinstance(cause, HotswapError):
        try:
            pickle.loads(pickle.dumps(cause))
        except Exception:
            return HotswapError(f"{type(cause).__qualname__}: {cause}")
    return cause
