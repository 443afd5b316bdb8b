"""hotswap's KV connector: a vLLM core finds by it the KV blocks of a request that arrives with them.

Imported in the processes of a core alone, since its base classes are vLLM's. vLLM makes one for the
scheduler, which holds the blocks, and one in each worker, which copies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hotswap.backends.vllm.inside.ended import Ended
from hotswap.backends.vllm.inside.pages import Pages
from hotswap.backends.vllm.inside.resume import carried_tokens
from hotswap.backends.vllm.names import named

__all__ = ["ARRIVAL", "MOVES_BLOCKS", "Held", "HotswapConnector"]

ARRIVAL = "hotswap_arrival"
"""The entry of `kv_transfer_params` with the id of the sink whose blocks a request takes."""

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class _Gone:
    """In place of a class that this vLLM has not got."""


def _base(name: str) -> Any:
    try:
        return named(f"{_BASE}:{name}")
    except (ImportError, AttributeError):
        return type(name, (_Gone,), {})


_Connector: Any = _base("KVConnectorBase_V1")
_SupportsHMA: Any = _base("SupportsHMA")
_Metadata: Any = _base("KVConnectorMetadata")

MOVES_BLOCKS = not any(issubclass(base, _Gone) for base in (_Connector, _SupportsHMA, _Metadata))
"""Whether this vLLM has what a connector is made of; if not, cores have none and requests move as tokens."""


@dataclass(slots=True, eq=False)
class Held:
    """Blocks that a sink holds.

    Attributes:
        blocks: vLLM's blocks, in the order of the request's tokens.
        tokens: The tokens that the request must begin with, once they are known.
        num_computed: How many of the tokens have keys and values in the blocks.
        published: Whether the prefix cache has the full blocks.
    """

    blocks: list[Any] = field(default_factory=list[Any])
    tokens: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    published: bool = False


@dataclass
class _Copies(_Metadata):  # type: ignore[misc]  # vLLM is untyped here
    """The blocks that workers copy before their next pass: `(from, to)`."""

    pairs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class HotswapConnector(_Connector, _SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """Both roles of the connector: for the scheduler, and for a worker.

    Attributes:
        held: The blocks of each sink; for the scheduler.
        ended: Requests that have ended; for the scheduler.
        pages: The KV blocks of a worker; `None` where a cache is not made of blocks.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # pyright: ignore[reportUnknownMemberType]  # vLLM is untyped here
        self.held: dict[str, Held] = {}
        self.ended = Ended()
        self.pages: Pages | None = None
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._arriving: dict[str, Held] = {}
        self._resumed: dict[str, Any] = {}
        self._pairs: list[tuple[int, int]] = []

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether a core that has it may sleep; vLLM asks since 0.33. The caches wake up where they were."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """Blocks that get lost are computed again."""
        return False

    # ------------------------------------------------------------------ beside the scheduler

    def on_new_request(self, request: Any) -> None:
        """Let a request that was announced find its blocks."""
        if carried_tokens(request.sampling_params):
            self._resumed[request.request_id] = request
        given: dict[str, Any] = request.kv_transfer_params or {}
        held = self.held.get(given.get(ARRIVAL, ""))
        if held is None or request.all_token_ids[: held.num_computed] != held.tokens[: held.num_computed]:
            return
        self._arriving[request.request_id] = held
        pool = self._kv_cache_manager.block_pool
        if pool.enable_caching and not held.published:
            num_full = held.num_computed // self._block_tokens
            pool.cache_full_blocks(request, held.blocks, 0, num_full, self._block_tokens, 0)
            held.published = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens the held blocks have beside those of the prefix cache."""
        held = self._arriving.get(request.request_id)
        if held is None or not held.blocks:
            return 0, False
        return max(0, min(held.num_computed, request.num_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the copies into the blocks that the request was given."""
        held = self._arriving.get(request.request_id)
        if held is None or not num_external_tokens:
            return
        end = min(held.num_computed, request.num_tokens - 1)
        first = (end - num_external_tokens) // self._block_tokens
        targets = blocks.get_block_ids()[0]
        for place in range(first, -(-end // self._block_tokens)):
            self._pairs.append((held.blocks[place].block_id, targets[place]))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Tell the workers what to copy, and vLLM what a resumed request found."""
        for new in scheduler_output.scheduled_new_reqs:
            if (request := self._resumed.pop(new.req_id, None)) is not None:
                request.prefill_stats = named("vllm.v1.metrics.stats:PrefillStats")(
                    num_prompt_tokens=request.num_tokens,
                    num_computed_tokens=request.num_tokens - new.num_computed_tokens,
                    num_cached_tokens=new.num_computed_tokens,
                )
        pairs, self._pairs = self._pairs, []
        return _Copies(pairs=pairs)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Note that a request has ended; vLLM frees its blocks, and keeps full ones in its prefix cache."""
        self.ended.note(request, self._block_tokens)
        self._arriving.pop(request.request_id, None)
        self._resumed.pop(request.request_id, None)
        return False, None

    request_finished_all_groups = request_finished

    def reset_cache(self) -> bool:
        """Keep what sinks hold: it is no cache."""
        return True

    # ------------------------------------------------------------------ in a worker

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Find the blocks in the caches of the layers."""
        try:
            self.pages = Pages(kv_caches.values(), self._num_blocks)
        except (ValueError, AttributeError, RuntimeError):
            # Layers of a hybrid model keep something else than blocks.
            self.pages = None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Copy the blocks that the pass reads."""
        pairs = self._get_connector_metadata().pairs
        if pairs and self.pages is not None:
            self.pages.copy(pairs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: the copies were made before the pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Do nothing: blocks are read between passes, on request."""

    def wait_for_save(self) -> None:
        """Do nothing; see `save_kv_layer`."""
