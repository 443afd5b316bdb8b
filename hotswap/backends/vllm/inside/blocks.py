"""What our end asks of a core's scheduler, between two of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotswap.backends.vllm.inside.connector import Held, HotswapConnector
from hotswap.backends.vllm.names import named

__all__ = ["METHOD", "BlockVerbs", "teach_cores"]

METHOD = "hotswap_blocks"
"""The method that cores gain: it is given a verb of `BlockVerbs` and its arguments."""

_VERBS = "_hotswap_verbs"  # where a core keeps its own

# A step that never comes: a request that waits for it is scheduled no more, and keeps its place and blocks.
_NEVER = 1 << 62


class BlockVerbs:
    """The verbs; in a core's process, on its thread.

    Those about a request return `None` when it is not in the batch: it ended, was aborted, waits, or gave its
    blocks up for others.
    """

    def __init__(self, core: Any) -> None:
        self._scheduler: Any = core.scheduler
        self._executor: Any = core.model_executor
        self._connector: Any = core.scheduler.connector
        self._parked: dict[str, int] = {}  # and the step for which each waited before

    def shape(self) -> list[Any]:
        """Return what each rank keeps in a block: its bytes, and its layers' dtypes and shapes.

        Empty where blocks cannot move: the connector is another's, or layers keep something else than the
        keys and values of all tokens.
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
        """Write blocks of a request, of whose tokens the first `end` must be computed, to a file."""
        if (self.count(request) or 0) < end:  # also one that gave its blocks up and has some of them again
            return None
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request)[0][first : first + num_blocks]
        if len(blocks) < num_blocks:
            return None
        self._executor.collective_rpc("hotswap_save", args=(blocks, path, block_bytes, offsets))
        return True

    def park(self, request: str) -> list[Any] | None:
        """Schedule a request no more; return how many of its tokens are computed, and all of them.

        Nothing in the list: a step with it is under way; ask again.
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
        """Schedule it again, if it was parked and is still there."""
        step, found = self._parked.pop(request, None), self._scheduler.requests.get(request)
        if step is not None and found is not None:
            found.next_decode_eligible_step = step

    # ------------------------------------------------------------------ requests that arrive

    def hold(self, sink: str, num_blocks: int) -> int:
        """Hold so many blocks in all; return 0, or how many are missing."""
        held = self._connector.held.get(sink) or Held()
        pool: Any = self._scheduler.kv_cache_manager.block_pool
        more = num_blocks - len(held.blocks)
        # Those that run may each want a block with the next step, and the newcomer two, one for a copy.
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
        """Let the request that names the sink find what was written."""
        held = self._connector.held.get(sink)
        if held is None:
            return None
        held.tokens, held.num_computed = tokens, num_computed
        return True

    def drop(self, sink: str) -> None:
        """Free what a sink holds; what became a prefix stays for as long as nobody wants the room."""
        held = self._connector.held.pop(sink, None)
        if held is not None:
            self._scheduler.kv_cache_manager.block_pool.free_blocks(reversed(held.blocks))
            held.blocks = []

    def books(self) -> list[int]:
        """Return how many sinks hold blocks, how many requests are parked, and how many blocks are free."""
        free: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return [len(self._connector.held), len(self._parked), free]

    def _in_batch(self, request: str) -> Any | None:
        found = self._scheduler.requests.get(request)
        running = named("vllm.v1.request:RequestStatus").RUNNING
        return found if found is not None and found.status == running else None


def teach_cores() -> None:
    """Give vLLM's cores in this process the method; again changes nothing."""
    core_class: Any = named("vllm.v1.engine.core:EngineCore")

    def hotswap_blocks(self: Any, verb: str, arguments: list[Any]) -> Any:
        verbs = self.__dict__.get(_VERBS) or self.__dict__.setdefault(_VERBS, BlockVerbs(self))
        call: Callable[..., Any] = getattr(verbs, verb)
        return call(*arguments)

    setattr(core_class, METHOD, hotswap_blocks)
