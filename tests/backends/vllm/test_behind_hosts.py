"""A vLLM engine behind a host, whose KV blocks stay there."""

from __future__ import annotations

from hotswap import Sampling
from hotswap.backends.kv_stores import NodeKVStore
from hotswap.backends.remote import EngineHost, RemoteEngine
from tests.backends.remote.support import MemoryLinks
from tests.backends.vllm.support import make_engine, make_store
from tests.backends.vllm.test_kv_store import BLOCK_TOKENS, GREEDY, make_fleet, prompt, run


async def test_requests_and_chats_find_their_blocks_at_the_host() -> None:
    store = make_store()
    async with make_fleet(store, None) as fleet:
        await fleet.swap("e0", to="a")
        undisturbed, _ = await run(fleet, GREEDY, evict_at=())
    async with make_engine() as engine, MemoryLinks(EngineHost(engine, store)) as links:
        remote = RemoteEngine("e0", links.open)
        async with make_fleet(store, NodeKVStore("64 MiB"), remote) as fleet:
            await fleet.swap("e0", to="a")
            got, num_restored = await run(fleet, GREEDY, evict_at=(10, 60))
            assert got == undisturbed
            assert num_restored > 200
            history, num_before = prompt(0, 40), 0
            for turn in range(4):
                answer = await fleet.generate("a", history, Sampling(max_tokens=20, ignore_eos=True))
                assert num_before - answer.usage.reused_tokens <= BLOCK_TOKENS
                history += tuple(token.id for token in answer.tokens)
                num_before = len(history)
                history += prompt(turn + 1, 15)
                await fleet.swap("e0", to="deep")
                await fleet.swap("e0", to="a")
            view = fleet.view().kv_store
            assert view is not None
            assert view.num_leases == 0
            assert view.used_bytes == sum(model.size_bytes for model in view.models) > 0
