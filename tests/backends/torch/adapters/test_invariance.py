"""The bits of a request with an adapter depend neither on its batch nor on the adapter's slot."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotswap.backends.torch import attention
from hotswap.backends.torch.adapters.peft import AdapterWeights, LowRank, read
from hotswap.backends.torch.adapters.plan import adaptation
from hotswap.backends.torch.adapters.ranges import RangePool
from hotswap.backends.torch.adapters.slots import RankRange
from hotswap.backends.torch.adapters.targets import Target, targets
from hotswap.backends.torch.attention import Step, running
from hotswap.backends.torch.forward import LocalForward, Piece, Work
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.linear import linear_layers
from hotswap.kernels.low_rank import call as low_rank
from tests.backends.torch.adapters.files import write
from tests.backends.torch.zoo import VOCABULARY, linear_only, make_model

CPU = torch.device("cpu")
RANKS = (1, 4, 8, 8, 16, 24, 64)
BLOCKS = 12
# bf16 rounds to 8 bits twice: the product in between and the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_contribution_of_an_adapter_to_a_row_has_equal_bits_in_any_step(
    dtype: torch.dtype, threads: int
) -> None:
    with using(threads):
        for width_in, width_out in ((64, 128), (128, 64), (1024, 512)):
            _compare_a_layer(Random(width_in), dtype, width_in, width_out)


@torch.inference_mode()
def _compare_a_layer(random: Random, dtype: torch.dtype, width_in: int, width_out: int) -> None:
    layer = nn.Linear(width_in, width_out, bias=False, dtype=dtype)
    nn.init.zeros_(layer.weight)
    pool = RangePool({"l": Target(layer, width_in, width_out)}, num_ranks=400, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(1)
    weights = [
        AdapterWeights({"l": LowRank(*(_random(generator, dtype, rank, w) for w in (width_in, width_out)))})
        for rank in RANKS
    ]
    filler, other = _put(pool, weights[2]), _put(pool, weights[4])
    alone = {n: _put(pool, weights[n]) for n in range(len(RANKS))}
    hidden = _random(generator, dtype, 200, width_in)
    for _ in range(5):
        slots = dict(alone)
        for n in random.sample(range(len(RANKS)), 3):  # elsewhere
            pool.free(alone[n])
            slots[n] = alone[n] = _put(pool, weights[n])
        owner = {row: random.choice([None, *slots]) for row in range(random.choice([1, 8, 30, 200]))}
        together = _outputs(layer, hidden, {row: slots[n] for row, n in owner.items() if n is not None})
        for row in random.sample(list(owner), min(len(owner), 12)):
            mine = owner[row]
            lone = _outputs(layer, hidden[row : row + 1], {} if mine is None else {0: slots[mine]})[0]
            assert torch.equal(together[row], lone), f"row {row} of {len(owner)}, of adapter {mine}"
            if mine is not None:
                pair = weights[mine].layers["l"]
                down, up = pair.down.double(), pair.up.double()
                right = hidden[row].double() @ down.T @ up
                assert torch.allclose(
                    lone.double(), right, rtol=0, atol=TOLERANCE[dtype] * float(right.abs().max())
                )
    pool.free(filler)
    pool.free(other)
    pool.close()


def test_dtypes_without_a_kernel_use_tiles() -> None:
    layer = nn.Linear(40, 24, bias=False, dtype=torch.float64)
    pool = RangePool({"l": Target(layer, 40, 24)}, num_ranks=400, dtype=torch.float64, device=CPU)
    generator = torch.Generator().manual_seed(1)
    pairs = [LowRank(*(_random(generator, torch.float64, rank, w) for w in (40, 24))) for rank in RANKS]
    slots = [_put(pool, AdapterWeights({"l": pair})) for pair in pairs]
    hidden = _random(generator, torch.float64, 50, 40)
    owner = {row: row % (len(RANKS) + 1) for row in range(50)}  # the last number is no adapter
    adapted = {row: slots[n] for row, n in owner.items() if n < len(RANKS)}
    with torch.inference_mode():
        found, right = _outputs(layer, hidden, adapted), hidden @ layer.weight.T
        for row in adapted:
            right[row] += hidden[row] @ pairs[owner[row]].down.T @ pairs[owner[row]].up
    assert torch.allclose(found, right, rtol=1e-12, atol=1e-12)
    pool.close()


def test_no_step_waits_for_the_compiler() -> None:
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    pool = RangePool({"l": Target(layer, 8, 8)}, num_ranks=8, dtype=torch.bfloat16, device=CPU)
    low_rank._kernel.cache_clear()
    one = torch.ones(1, 8, dtype=torch.bfloat16)
    _put(pool, AdapterWeights({"l": LowRank(one, one)}))
    assert low_rank._kernel.cache_info().currsize == 1
    pool.close()


def _outputs(layer: nn.Linear, hidden: Tensor, slots: dict[int, RankRange]) -> Tensor:
    """Return the layer's output for a step in which some rows have adapters; the layer itself gives zeros."""
    by_slot: dict[RankRange, list[int]] = {}
    for row, slot in slots.items():
        by_slot.setdefault(slot, []).append(row)
    pieces = [(slot, range(row, row + 1), range(0)) for slot, rows in by_slot.items() for row in rows]
    step = Step(
        cache=KVCache(1, 16, CPU),
        blocks=torch.zeros(len(hidden), dtype=torch.long),
        offsets=torch.zeros(len(hidden), dtype=torch.long),
        adapters=adaptation(pieces, CPU),
    )
    with running(step):
        out: Tensor = layer(hidden[None])
    return out[0]


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


@contextmanager
def using(threads: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_a_lone_run_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    random = Random(1)
    attention.register()
    model: Any = make_model("llama", dtype=dtype)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    linear_layers(model)
    names = [("q_proj", "v_proj"), ("lm_head", "down_proj"), ("q_proj", "k_proj", "up_proj", "o_proj")]
    loaded = [
        read(write(tmp_path / str(n), model, seed=n, r=rank, names=names[n % 3], size=3.0), dtype)
        for n, rank in enumerate(RANKS)
    ]
    owners = [random.choice([None, *range(len(RANKS))]) for _ in range(24)]
    prompts = [
        [random.randrange(2, VOCABULARY) for _ in range(random.choice([1, 7, 30, 80]))] for _ in owners
    ]
    lone: list[list[Tensor]] = []
    for owner, prompt in zip(owners, prompts, strict=True):
        pool = _pool(model, dtype)
        slot = None if owner is None else _put(pool, loaded[owner])
        lone += _run(model, [prompt], [slot], Random(0), budget=1000)
        pool.close()

    pool = _pool(model, dtype)
    filler = _put(pool, loaded[3])
    slots = {n: _put(pool, loaded[n]) for n in random.sample(range(len(RANKS)), len(RANKS))}
    pool.free(filler)
    mixed = _run(
        model, prompts, [None if owner is None else slots[owner] for owner in owners], random, budget=60
    )
    pool.close()
    for number, (alone, together) in enumerate(zip(lone, mixed, strict=True)):
        assert len(alone) == len(together) == 6
        same = [torch.equal(a, b) for a, b in zip(alone, together, strict=True)]
        assert all(same), f"request {number} of adapter {owners[number]}: {same}"


def _pool(model: Any, dtype: torch.dtype) -> RangePool:
    return RangePool(targets(model, frozenset()), num_ranks=256, dtype=dtype, device=CPU)


def _put(pool: RangePool, weights: AdapterWeights) -> RankRange:
    slot = pool.allocate(weights.rank)
    assert slot is not None
    pool.put(slot, weights)
    return slot


@torch.inference_mode()
def _run(
    model: Any, prompts: list[list[int]], slots: list[RankRange | None], random: Random, *, budget: int
) -> list[list[Tensor]]:
    """Return the logits after the prompt and five tokens of each request, in random batches."""
    cache = KVCache(BLOCKS * len(prompts), 16, CPU)
    forward = LocalForward(model, cache, invariant=True, linear_only=linear_only(model))
    tokens, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while unfinished := [n for n in range(len(prompts)) if len(logits[n]) < 6]:
        pieces: list[tuple[int, Piece]] = []
        room = budget
        for n in random.sample(unfinished, random.randint(1, len(unfinished))):
            count = min(
                len(tokens[n]) - starts[n], room, random.choice([1, 9, 1000]) if budget < 1000 else room
            )
            if count:
                blocks = range(1 + n * BLOCKS, 1 + (n + 1) * BLOCKS)
                part, last = tokens[n][starts[n] : starts[n] + count], starts[n] + count == len(tokens[n])
                pieces.append((n, Piece(part, starts[n], blocks, last, slots[n])))
                starts[n], room = starts[n] + count, room - count
        sampled = [n for n, piece in pieces if piece.samples]
        forward.submit(Work(tuple(piece for _, piece in pieces)))
        for n, row in zip(sampled, forward.result(), strict=True):
            logits[n].append(row.clone())
            tokens[n].append(int(row.argmax()))
    return logits
