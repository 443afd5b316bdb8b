"""KV pools that grow and shrink within a device budget: without a model, then by their memory alone."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotswap import DeviceBudget, InstanceId
from hotswap.backends.torch import device_pages
from hotswap.backends.torch.batcher import Batcher
from hotswap.backends.torch.blocks import BlockPool, Content
from hotswap.backends.torch.device_memory import LeasedMemory
from hotswap.backends.torch.elastic_blocks import ElasticBlocks
from hotswap.backends.torch.kv import KVCache, LayerShape
from hotswap.errors import OutOfMemory
from tests.backends.torch.batcher_harness import BatcherHarness, make
from tests.backends.torch.host_pages import HostDriver

BLOCK_TOKENS = 8
SHAPE = LayerShape(1, 128, 128, torch.float32)
BLOCK_BYTES = SHAPE.bytes_per_token * BLOCK_TOKENS
LEAST, MOST = 8, 40
# The blocks that have their memory together: one on a CPU, more on a GPU.
GROUPS = [1, 4]


class Engine:
    """A batcher whose pool is leased, with the checks of `BatcherHarness`; blocks given back lose content.

    Attributes:
        driver: Maps the memory of its blocks; `None` on a CPU.
    """

    def __init__(self, name: str, memory: LeasedMemory, driver: HostDriver | None, **options: int) -> None:
        self.driver = driver
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_pages, "driver_for", lambda device: driver)
            self.cache = KVCache(MOST, BLOCK_TOKENS, torch.device("cpu"), [SHAPE], is_elastic=True)
        self.discard = self.cache.discard
        self.blocks = ElasticBlocks(self.cache, memory)
        self.blocks.begin(0, 0)
        self.harness = BatcherHarness(
            num_blocks=self.blocks, block_tokens=BLOCK_TOKENS, budget=24, max_requests=6, **options
        )
        self.memory, self.name, self.num_sent = memory, name, 0
        self.cache.discard = self.lose  # type: ignore[method-assign]

    def lose(self, runs: Iterable[range]) -> None:
        """What the system does with pages that are given back."""
        runs = list(runs)
        for run in runs:
            for block in run:
                assert not self.blocks.is_referenced(block), "memory in use is given back"
                for at in range(BLOCK_TOKENS):
                    self.harness.memory.pop((block, at), None)
        self.discard(runs)

    @property
    def batcher(self) -> Batcher:
        return self.harness.batcher

    @property
    def is_idle(self) -> bool:
        return not (self.batcher.running or self.batcher.waiting)

    def send(self, random: Random) -> None:
        """Send a request that fits into the least blocks; many share a beginning."""
        self.num_sent += 1
        shared = [7] * random.choice([0, 5, 8, 20, 24])
        own = [random.randrange(3) for _ in range(random.randrange(1, 12))]
        most = self.blocks.least_blocks * BLOCK_TOKENS - len(shared) - len(own)
        self.harness.add(make(self.num_sent, shared + own, random.randrange(1, most + 1)))

    def step(self) -> None:
        if not self.is_idle:
            self.harness.step()
        self.batcher.settle()
        self.check()

    def check(self) -> None:
        self.harness.check_accounting()
        pool = self.blocks
        lease = next(lease for lease in self.memory.budget.leases if lease.holder == self.name)
        assert lease.held_bytes == (pool.num_blocks + 1) * BLOCK_BYTES, "what is used is what is leased"
        if self.driver is not None:
            assert sum(self.driver.parts.values()) == lease.held_bytes, "what is leased is what is allocated"
        assert pool.least_blocks <= pool.num_blocks <= pool.reachable_blocks <= MOST


@contextmanager
def engines(size_blocks: int, group: int = 1, **options: int) -> Generator[tuple[DeviceBudget, list[Engine]]]:
    """Two engines under a budget of so many blocks, each with a floor of `LEAST` and block 0."""
    budget, floor = DeviceBudget(size_blocks * BLOCK_BYTES), (LEAST + 1) * BLOCK_BYTES
    with ExitStack() as stack:
        both: list[Engine] = []
        for name in ("a", "b"):
            memory = LeasedMemory(
                InstanceId(name), budget, floor_bytes=floor, ceiling_bytes=budget.size_bytes
            )
            stack.enter_context(memory.opened(lambda call: call()))
            driver = HostDriver(group * BLOCK_BYTES // 2) if group > 1 else None
            both.append(Engine(name, memory, driver, **options))
            assert both[-1].blocks.least_blocks == (LEAST + 1) // group * group - 1
        yield budget, both
        for engine in both:
            for sequence in [*engine.batcher.running, *engine.batcher.waiting]:
                engine.batcher.remove(sequence)
            engine.blocks.close()
        assert budget.held_bytes == 0


def serve_at_random(seed: int, size_blocks: int, group: int = 1, turns: int = 60) -> None:
    """Two engines serve load that moves between them, and are resized at random; then all requests end."""
    random = Random(seed)
    with engines(size_blocks, group) as (budget, both):
        for _ in range(turns):
            busy = both[random.random() < 0.5]
            for _ in range(random.choice([0, 1, 4])):
                busy.send(random)
            if random.random() < 0.15:
                engine, wanted = random.choice(both), random.randrange(MOST + 5)
                reached = engine.batcher.resize(wanted)
                assert reached == engine.blocks.num_blocks
                engine.check()
            for engine in random.sample(both, 2):
                engine.step()
                assert budget.held_bytes <= budget.size_bytes
        for _ in range(4000):
            if all(engine.is_idle for engine in both):
                break
            for engine in both:
                engine.step()
        assert all(len(engine.harness.ended) == engine.num_sent for engine in both), "what is admitted ends"


@pytest.mark.parametrize("group", GROUPS)
@given(seed=st.integers(0, 1 << 30), size_blocks=st.integers(2 * (LEAST + 1), 2 * MOST + 4))
@example(seed=0, size_blocks=2 * (LEAST + 1))
@settings(max_examples=15, deadline=None)
def test_requests_read_their_own_blocks_and_end_while_memory_moves(
    group: int, seed: int, size_blocks: int
) -> None:
    serve_at_random(seed, size_blocks, group)


def serve_all(seeds: Iterable[int], group: int) -> None:
    for seed in seeds:
        serve_at_random(seed, 40, group)


# ---------------------------------------------------------------------- mistakes that this must detect


def blocks_given_back_are_still_found(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.withdraw

    def withdraw(self: Any, count: int, group: int = 1) -> list[int]:
        contents, keys, starts = dict(self._contents), dict(self._by_key), dict(self._by_start)
        chosen = original(self, count, group)
        self._contents, self._by_key, self._by_start = contents, keys, starts
        return chosen

    patch.setattr(BlockPool, "withdraw", withdraw)


def blocks_in_use_are_given_back(patch: pytest.MonkeyPatch) -> None:
    def withdraw(self: Any, count: int, group: int = 1) -> list[int]:
        chosen = [block for block in range(self.most_blocks, 0, -1) if block not in self._withdrawn][:count]
        self._free = type(self._free)(block for block in self._free if block not in chosen)
        self._withdrawn += chosen
        return chosen

    patch.setattr(BlockPool, "withdraw", withdraw)


def blocks_are_added_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    def grow(self: Any, count: int) -> bool:
        if count > len(self._withdrawn):
            return False
        self._restore(count)
        return True

    patch.setattr(ElasticBlocks, "grow", grow)


def blocks_are_withdrawn_and_never_given(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ElasticBlocks, "_give", lambda self, count: self.withdraw(max(0, count), self._group))


def pools_shrink_below_their_floor(patch: pytest.MonkeyPatch) -> None:
    original = ElasticBlocks.begin

    def begin(self: Any, weight_bytes: int, state_bytes: int) -> None:
        original(self, weight_bytes, state_bytes)
        self._least_groups = 3

    patch.setattr(ElasticBlocks, "begin", begin)


MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [
    blocks_given_back_are_still_found,
    blocks_in_use_are_given_back,
    blocks_are_added_without_a_lease,
    blocks_are_withdrawn_and_never_given,
    pools_shrink_below_their_floor,
]


def groups_are_added_without_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "populate", lambda self, groups: None)


def groups_are_given_and_keep_their_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "_unmap", lambda self, groups: None)


def groups_are_given_of_which_a_block_is_in_use(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.withdraw

    def withdraw(self: Any, count: int, group: int = 1) -> list[int]:
        blocks = original(self, count)
        return sorted(
            {at for block in blocks for at in range(block // group * group, block // group * group + group)}
        )

    patch.setattr(BlockPool, "withdraw", withdraw)


GROUP_MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [
    groups_are_added_without_memory,
    groups_are_given_and_keep_their_memory,
    groups_are_given_of_which_a_block_is_in_use,
]


@pytest.mark.parametrize(
    ("mistake", "group"),
    [*((mistake, 1) for mistake in MISTAKES), *((mistake, 4) for mistake in (*MISTAKES, *GROUP_MISTAKES))],
)
def test_the_property_detects(mistake: Callable[[pytest.MonkeyPatch], None], group: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
            serve_all(range(30), group)


# ---------------------------------------------------------------------- rules of their own


def test_a_pool_grows_for_a_queue_and_lends_what_is_free_to_the_other() -> None:
    with engines(LEAST + 1 + MOST) as (budget, (a, b)):
        for ticket in range(1, 5):
            a.harness.add(make(ticket, [ticket] * 40, 20))
        for _ in range(8):  # of 24 tokens
            a.step()
        assert len(a.batcher.running) == 4, "none waits, since the other engine needs nothing"
        assert a.blocks.num_blocks >= 4 * 40 // BLOCK_TOKENS
        while not a.is_idle:
            a.step()
        size = a.blocks.num_blocks
        assert a.blocks.num_cached, "what ended stays, while nothing else wants the memory"
        for ticket in range(1, 7):
            b.harness.add(make(ticket, [ticket] * 40, 20))
        while not b.is_idle:
            b.step()
            a.step()
        assert len(b.harness.ended) == 6
        assert a.blocks.num_blocks < size
        assert budget.free_bytes == 0 or b.blocks.num_blocks == MOST


def test_the_least_recently_used_blocks_are_given_first_and_free_ones_before_them() -> None:
    pool = BlockPool(6, 6)
    blocks = pool.allocate(5)
    for at, block in enumerate(blocks):
        pool.publish(block, Content(bytes([at]), bytes([at, at]), (at,)))
    for at in (2, 0, 1):
        pool.release([blocks[at]])
    assert pool.withdraw(2) == [6, blocks[2]]
    assert pool.find(bytes([2])) is None
    assert pool.find(bytes([0])) == blocks[0]
    assert pool.withdraw(9) == [blocks[0], blocks[1]], "blocks in use stay"
    assert (pool.num_blocks, pool.num_free) == (2, 0)


def test_a_resize_interrupts_the_last_requests_and_holds_while_others_want_memory() -> None:
    with engines(LEAST + 1 + MOST) as (_, (a, b)):
        for ticket in range(1, 6):
            a.harness.add(make(ticket, [ticket] * 40, 20))
        for _ in range(9):
            a.step()
        assert len(a.batcher.running) == 5
        b.memory.take_kv(BLOCK_BYTES * (MOST - LEAST))  # which is noted
        assert a.batcher.resize(LEAST + 6) == LEAST + 6
        assert [sequence.ticket for sequence in a.batcher.running] == [1, 2]
        a.step()
        assert a.blocks.num_blocks <= LEAST + 6, "its own queue does not take back what it gave"
        b.memory.forget_kv()
        a.step()
        a.step()
        assert a.blocks.num_blocks > LEAST + 6
        assert a.batcher.resize(0) >= LEAST
        assert [sequence.ticket for sequence in a.batcher.running] == [1], "the first goes on"


def test_a_floor_without_room_for_a_block_is_refused() -> None:
    budget = DeviceBudget(100 * BLOCK_BYTES)
    memory = LeasedMemory(
        InstanceId("a"), budget, floor_bytes=3 * BLOCK_BYTES, ceiling_bytes=budget.size_bytes
    )
    cache = KVCache(MOST, BLOCK_TOKENS, torch.device("cpu"), [SHAPE], is_elastic=True)
    with memory.opened(lambda call: call()):
        blocks = ElasticBlocks(cache, memory)
        with pytest.raises(OutOfMemory, match="floor_bytes"):
            blocks.begin(2 * BLOCK_BYTES, 0)
        assert budget.held_bytes == 0
        blocks.begin(BLOCK_BYTES, 0)
        assert blocks.least_blocks == 1


# ---------------------------------------------------------------------- memory of the system


def resident_bytes(tensor: torch.Tensor) -> int:
    """The pages of a tensor that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * num_pages)()
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(start, num_pages * mmap.PAGESIZE, flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


@pytest.mark.parametrize("dim", [64, 60])  # blocks of whole pages, and of others
def test_blocks_that_are_given_back_are_not_resident(dim: int) -> None:
    """64 MiB are filled, and the memory of the process follows what is withdrawn; the rest is intact."""
    shapes = [LayerShape(4, dim, dim, torch.float32)] * 4
    block_bytes = 16 * sum(shape.bytes_per_token for shape in shapes)
    count = (64 << 20) // block_bytes
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(count, 16, torch.device("cpu"), shapes, is_elastic=True)
    assert process.memory_info().rss - before < 8 << 20, "addresses are reserved, not memory"
    budget = DeviceBudget(1 << 30)
    memory = LeasedMemory(
        InstanceId("a"), budget, floor_bytes=10 * block_bytes, ceiling_bytes=budget.size_bytes
    )
    data = torch.arange(block_bytes, dtype=torch.int64).to(torch.uint8)
    with memory.opened(lambda call: call()):
        pool = ElasticBlocks(cache, memory)
        pool.begin(0, 0)
        assert pool.resize(count) == count
        held = pool.allocate(count)
        for block in held:
            cache.restore([block], data)
        full = process.memory_info().rss
        assert full - before > 60 << 20
        kept = held[3::7]  # scattered
        pool.release([block for block in held if block not in set(kept)])
        assert pool.resize(0) == max(len(kept), pool.least_blocks)
        shrunk = process.memory_info().rss
        gone = (count - pool.num_blocks) * block_bytes
        per_run = 2 * mmap.PAGESIZE * 2 * len(shapes) * (dim == 60)  # pages that a kept neighbour is on
        assert full - shrunk > 0.98 * gone - len(kept) * per_run - (2 << 20)
        resident = sum(map(resident_bytes, cache.tensors))
        assert resident <= (pool.num_blocks + 1) * block_bytes + (len(kept) + 1) * per_run
        out = torch.empty(block_bytes, dtype=torch.uint8)
        for block in kept:
            cache.save([block], out)
            assert torch.equal(out, data), "what is in use is intact"
        pool.close()
        assert budget.held_bytes == 0
        assert sum(map(resident_bytes, cache.tensors)) <= 16 * mmap.PAGESIZE
