"""Methods for KV blocks that a core's scheduler runs between two of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hotswap.backends.vllm.inside.connector import Held, HotswapConnector
from hotswap.backends.vllm.names import named

__all__ = ["METHOD", "BlockVerbs", "patch_cores"]

METHOD = "hotswap_blocks"
"""The method that is added to cores; it takes the name of a method of `BlockVerbs` and its arguments."""

_VERBS = "_hotswap_verbs"  # the attribute of a core that has its `BlockVerbs`

# A step that never comes: a request that waits for it is not scheduled, and keeps its place and blocks.
_NEVER = 1 << 62


class BlockVerbs:
    """Methods for KV blocks; called in a core's process, on its thread.

    Those of a request return `None` when it is not in the batch: it ended, was aborted, waits, or was
    preempted.
    """

    def __init__(self, core: Any) -> None:
        self._scheduler: Any = core.scheduler
        self._executor: Any = core.model_executor
        self._connector: Any = core.scheduler.connector
        self._parked: dict[str, int] = {}  # with the step that each waited for before

    def shape(self) -> list[Any]:
        """Return of each rank the bytes of a block, and the dtypes and shapes of its layers.

        Empty where blocks cannot move: the core has another connector, or layers that keep something else
        than the keys and values of all tokens.
        """
        if not isinstance(self._connector, HotswapConnector):
            return []
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        full: Any = named("vllm.v1.kv_cache_interface:FullAttentionSpec")
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, full):
            return []
        ranks = self._executor.collective_rpc("hotswap_block_shape")
        return ranks if all(ranks) else []

    # ------------------------------------------------------------------ requests that leave

    def count(self, request: str) -> int | None:
        """Return how many tokens of a request have keys and values."""
        found = self._in_batch(request)
        return None if found is None else found.num_computed_tokens - found.num_in_flight_tokens

    def save(
        self,
        request: str,
        first: int,
        num_blocks: int,
        end: int,
        path: str,
        block_bytes: int,
        offsets: list[int],
    ) -> bool | None:
        """Write blocks of a request to a file; its first `end` tokens must be computed."""
        if (self.count(request) or 0) < end:  # it may have been preempted, and be computed again
            return None
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request)[0][first : first + num_blocks]
        if len(blocks) < num_blocks:
            return None
        self._executor.collective_rpc("hotswap_save", args=(blocks, path, block_bytes, offsets))
        return True

    def park(self, request: str) -> list[Any] | None:
        """Stop scheduling a request; return how many of its tokens are computed, and all its tokens.

        An empty list means that a step with it is under way: call it again.
        """
        found = self._in_batch(request)
        if found is None:
            return None
        self._parked.setdefault(request, found.next_decode_eligible_step)
        found.next_decode_eligible_step = _NEVER
        if found.num_in_flight_tokens:
            return []
        return [found.num_computed_tokens, list(found.all_token_ids)]

    def unpark(self, request: str) -> None:
        """Schedule a request again, if it was parked and has not ended."""
        step, found = self._parked.pop(request, None), self._scheduler.requests.get(request)
        if step is not None and found is not None:
            found.next_decode_eligible_step = step

    # ------------------------------------------------------------------ requests that arrive

    def hold(self, sink: str, num_blocks: int) -> int:
        """Hold `num_blocks` blocks for a sink in all; return 0, or how many are missing."""
        held = self._connector.held.get(sink) or Held()
        pool: Any = self._scheduler.kv_cache_manager.block_pool
        more = num_blocks - len(held.blocks)
        # Each running request may need a block in the next step, and the arriving one two, one for a copy.
        room = int(pool.get_num_free_blocks()) - len(self._scheduler.running) - 2
        missing = more - max(0, room)
        if missing > 0:
            return missing
        if more > 0:
            held.blocks += pool.get_new_blocks(more)
        self._connector.held[sink] = held
        return 0

    def restore(
        self, sink: str, first: int, num_blocks: int, path: str, block_bytes: int, offsets: list[int]
    ) -> bool | None:
        """Fill held blocks from a file."""
        held = self._connector.held.get(sink)
        if held is None or first + num_blocks > len(held.blocks):
            return None
        blocks = [block.block_id for block in held.blocks[first : first + num_blocks]]
        self._executor.collective_rpc("hotswap_restore", args=(blocks, path, block_bytes, offsets))
        return True

    def commit(self, sink: str, tokens: list[int], num_computed: int) -> bool | None:
        """Let the request that names the sink find the blocks."""
        held = self._connector.held.get(sink)
        if held is None:
            return None
        held.tokens, held.num_computed = tokens, num_computed
        return True

    def drop(self, sink: str) -> None:
        """Free the blocks of a sink; published ones stay in the prefix cache until their memory is needed."""
        held = self._connector.held.pop(sink, None)
        if held is not None:
            self._scheduler.kv_cache_manager.block_pool.free_blocks(reversed(held.blocks))
            held.blocks = []

    def counts(self) -> list[int]:
        """Return how many sinks hold blocks, how many requests are parked, and how many blocks are free."""
        free: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return [len(self._connector.held), len(self._parked), free]

    # ------------------------------------------------------------------ requests that have ended

    def list_ended(self, salt: str) -> list[Any]:
        """Return the number, adapter and cached tokens of each request that ran with some weights."""
        listed: list[Any] = []
        for entry in self._connector.ended.latest(salt):
            num_cached = len(self._cached(entry.hashes))
            if num_cached:
                num_tokens = num_cached * (len(entry.tokens) // len(entry.hashes))
                listed.append([entry.id, entry.adapter, list(entry.tokens[:num_tokens])])
        return listed

    def save_ended(
        self, ended: int, first: int, num_blocks: int, path: str, block_bytes: int, offsets: list[int]
    ) -> bool | None:
        """Write cached blocks of a request that has ended to a file; `None` if they are gone."""
        entry = self._connector.ended.find(ended)
        blocks = [] if entry is None else self._cached(entry.hashes[first : first + num_blocks])
        if len(blocks) < num_blocks:
            return None
        # A block may be filled by a step that is under way: the workers take the copy after it.
        self._executor.collective_rpc("hotswap_save", args=(blocks, path, block_bytes, offsets))
        return True

    def forget_ended(self) -> None:
        """Forget the requests that have ended; the prefix cache keeps their blocks."""
        self._connector.ended.clear()

    def _cached(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks that the prefix cache has of these, up to the first that it has not."""
        pool: Any = self._scheduler.kv_cache_manager.block_pool
        blocks: list[int] = []
        for each in hashes:
            found = pool.get_cached_block(each, [0])
            if not found:
                break
            blocks.append(found[0].block_id)
        return blocks

    def _in_batch(self, request: str) -> Any | None:
        found = self._scheduler.requests.get(request)
        running = named("vllm.v1.request:RequestStatus").RUNNING
        return found if found is not None and found.status == running else None


def patch_cores() -> None:
    """Add the method to vLLM's cores in this process; does nothing if called again."""
    core_class: Any = named("vllm.v1.engine.core:EngineCore")

    def hotswap_blocks(self: Any, verb: str, arguments: list[Any]) -> Any:
        verbs = self.__dict__.get(_VERBS) or self.__dict__.setdefault(_VERBS, BlockVerbs(self))
        call: Callable[..., Any] = getattr(verbs, verb)
        return call(*arguments)

    setattr(core_class, METHOD, hotswap_blocks)
