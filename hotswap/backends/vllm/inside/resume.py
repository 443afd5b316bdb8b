"""Patches by which a request continues in another vLLM as if it had begun there.

A request that moves has generated tokens already. As part of a longer prompt they would count as prompt:
penalties, minimum lengths and bad words would begin anew. So they are marked as generated before vLLM's
scheduler and worker see the request. Grammars are advanced in `grammar`; draws depend on the position alone.
"""

from __future__ import annotations

import functools
from typing import Any

from hotswap.backends.vllm.names import named

__all__ = ["RESUMED", "apply", "carried_tokens"]

RESUMED = "hotswap_resumed"
"""The entry of `SamplingParams.extra_args` that holds the tokens generated so far."""

_done: list[bool] = []


def apply() -> None:
    """Patch vLLM in this process; does nothing if called again. Other requests are served as before."""
    if _done:
        return
    _done.append(True)
    _patch_requests()
    _patch_runners()
    _patch_connectors()


def carried_tokens(sampling_params: Any) -> list[int]:
    """Return the tokens that a request with these parameters has generated elsewhere."""
    extra = None if sampling_params is None else sampling_params.extra_args
    return list(extra.get(RESUMED, ())) if extra else []


def _patch_requests() -> None:
    request_class: Any = named("vllm.v1.request:Request")
    make = request_class.from_engine_core_request.__func__

    @functools.wraps(make)
    def from_engine_core_request(cls: Any, request: Any, block_hasher: Any) -> Any:
        made = make(cls, request, block_hasher)
        if carried := carried_tokens(made.sampling_params):
            made.append_output_token_ids(carried)
            made.prefill_stats = None  # they assume that all tokens are prompt; set in `connector`
        return made

    request_class.from_engine_core_request = classmethod(from_engine_core_request)


def _patch_runners() -> None:
    """Patch the runner's state of a request: its tokens."""
    runner: Any = named("vllm.v1.worker.gpu_model_runner")
    state_class: Any = runner.CachedRequestState

    @functools.wraps(state_class)
    def make_state(*args: Any, **given: Any) -> Any:
        if carried := carried_tokens(given.get("sampling_params")):
            given["output_token_ids"] = carried
        return state_class(*args, **given)

    runner.CachedRequestState = make_state


def _patch_connectors() -> None:
    """Have connectors of other caches find no fewer tokens than none.

    One that counts the tokens of the prompt alone has fewer than a resumed request has computed already.
    """
    factory: Any = named("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory")
    create = factory.create_connector.__func__

    @functools.wraps(create)
    def create_connector(cls: Any, *args: Any, **given: Any) -> Any:
        made = create(cls, *args, **given)
        count = made.get_num_new_matched_tokens

        @functools.wraps(count)
        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            num_found, later = count(request, num_computed_tokens)
            return (0, False) if num_found is not None and num_found < 0 else (num_found, later)

        made.get_num_new_matched_tokens = get_num_new_matched_tokens
        return made

    factory.create_connector = classmethod(create_connector)
