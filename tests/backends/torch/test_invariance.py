"""On a CPU the bits of a request's logits depend neither on its batch, nor on shared blocks or chunks.

Nor on packed weights: the lone runs here use none, the mixed runs pack layers between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hotswap import Sampling
from hotswap.backends.torch import attention
from hotswap.backends.torch.batcher import Batcher
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.forward import LocalForward, Piece, Work, assemble
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.linear import linear_layers
from hotswap.backends.torch.own_attention import replace_attention, set_implementation
from hotswap.backends.torch.packed_cache import PackedCache
from hotswap.backends.torch.recurrent import SnapshotPool, StatePool
from hotswap.backends.torch.recurrent.mixers import attach
from hotswap.backends.torch.sampling import Sampler
from hotswap.backends.torch.sequence import Sequence
from hotswap.kernels import packed_linear
from tests.backends.torch import zoo
from tests.backends.torch.hybrids import HYBRIDS, make_hybrid
from tests.backends.torch.zoo import VOCABULARY, linear_only, make_model

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
NUM_TOKENS = 8

Logits = dict[tuple[int, int], Tensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "architecture", ["llama", "mistral", "gemma2", "gpt2", "mixtral", "gpt_oss", "bloom", "gpt_neo"]
)
def test_logits_are_those_of_a_lone_run_to_the_bit(architecture: str, dtype: torch.dtype) -> None:
    random = Random(3)
    config = zoo.OWN_ATTENTION[architecture]() if architecture in zoo.OWN_ATTENTION else architecture
    model = _paged(make_model(config, dtype=dtype))
    cache = PackedCache(1 << 30)
    packed = cache.acquire(None, linear_layers(model))
    # One is longer than a chunk of values, and longer than every window.
    lengths = (3, 20, 70, 130, 260, 600)
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]
    for prompt in prompts[:-1]:  # common prefixes, some of which end within a block
        shared = random.randrange(len(prompt))
        prompt[:shared] = prompts[-1][:shared]
    lone: Logits = {}
    for ticket, prompt in enumerate(prompts):
        lone |= _run(model, {ticket: prompt}, budget=2048, random=Random(0), p_preempt=0.0)
    for budget in (24, 300):
        mixed = _run(
            model,
            dict(enumerate(prompts)),
            budget=budget,
            random=random,
            p_preempt=0.1,
            reuse=True,
            background_work=lambda: cache.pack_next(packed),
        )
        differing = [key for key, logits in lone.items() if not torch.equal(logits, mixed[key])]
        assert differing == [], f"of {len(lone)}, with a budget of {budget}"
    assert packed.complete


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_logits_of_models_with_recurrent_states_are_those_of_a_lone_run(
    architecture: str, dtype: torch.dtype, num_threads: int, threads: Callable[[int], None]
) -> None:
    """A request that is preempted goes on from a snapshot, in another slot; slots are used again."""
    threads(num_threads)
    random = Random(6)
    model = _paged(make_hybrid(architecture, dtype=dtype))
    assert attach(model)
    linear_layers(model)
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(n)] for n in (1, 3, 20, 70, 130, 200, 9, 31)]
    for prompt in prompts[:5]:  # common prefixes
        shared = random.randrange(len(prompt))
        prompt[:shared] = prompts[5][:shared]
    lone: Logits = {}
    for ticket, prompt in enumerate(prompts):
        lone |= _run(model, {ticket: prompt}, budget=2048, random=Random(0), p_preempt=0.0, keeps_states=True)
    for budget in (24, 150):
        mixed = _run(
            model,
            dict(enumerate(prompts)),
            budget=budget,
            random=random,
            p_preempt=0.1,
            reuse=True,
            keeps_states=True,
        )
        differing = [key for key, logits in lone.items() if not torch.equal(logits, mixed[key])]
        assert differing == [], f"of {len(lone)}, with a budget of {budget}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_logits_are_those_of_a_lone_run_with_onednn(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "supported", lambda _: False)
    test_logits_are_those_of_a_lone_run_to_the_bit(architecture, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("architecture", "watched"), [("llama", False), ("mixtral", True), ("gpt2", False)])
def test_only_models_with_other_products_run_in_the_invariant_mode(
    architecture: str, watched: bool, dtype: torch.dtype
) -> None:
    """The mode intercepts every function call of a model, which most models do not need."""
    model = make_model(architecture, dtype=dtype)
    one = [Piece([1], 0, [1], True)]
    cache = KVCache(1, BLOCK_TOKENS, CPU)
    assert assemble(one, cache, invariant=True, linear_only=linear_only(model)).watched == watched
    assert not assemble(one, cache, invariant=False).watched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_logits_of_long_contexts_are_those_of_a_lone_run(architecture: str, dtype: torch.dtype) -> None:
    """From a length on that one of these prompts has, decodes gather more blocks than they have."""
    random = Random(4)
    config = zoo.CONFIGS[architecture]()
    config.max_position_embeddings = 8192
    model = _paged(make_model(config, dtype=dtype))
    linear_layers(model)
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in (4090, 4500, 40)]
    lone: Logits = {}
    for ticket, prompt in enumerate(prompts):
        lone |= _run(model, {ticket: prompt}, budget=4096, random=Random(0), p_preempt=0.0, num_blocks=640)
    mixed = _run(
        model,
        dict(enumerate(prompts)),
        budget=1000,
        random=random,
        p_preempt=0.0,
        num_blocks=640,
    )
    differing = [key for key, logits in lone.items() if not torch.equal(logits, mixed[key])]
    assert differing == [], f"of {len(lone)}"


_WIDE: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(
        n_embd=1024, n_layer=1, n_head=16, n_positions=256, vocab_size=VOCABULARY
    ),
    "mixtral": transformers.MixtralConfig(
        **zoo.COMMON | {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1},
        num_local_experts=3,
        num_experts_per_tok=2,
    ),
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", _WIDE)
def test_logits_of_wide_products_outside_linear_layers_are_those_of_a_lone_run(
    architecture: str, dtype: torch.dtype, num_threads: int, threads: Callable[[int], None]
) -> None:
    """PyTorch itself rounds these products differently for different numbers of rows, up to 128."""
    threads(num_threads)
    random = Random(5)
    model = _paged(make_model(_WIDE[architecture], dtype=dtype, sharpness=2.0))
    linear_layers(model)
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in (1, 7, 33, 130)]
    lone: Logits = {}
    for ticket, prompt in enumerate(prompts):
        lone |= _run(model, {ticket: prompt}, budget=2048, random=Random(0), p_preempt=0.0)
    mixed = _run(model, dict(enumerate(prompts)), budget=40, random=random, p_preempt=0.0)
    differing = [key for key, logits in lone.items() if not torch.equal(logits, mixed[key])]
    assert differing == [], f"of {len(lone)}"


def test_without_the_invariant_mode_bits_depend_on_the_batch() -> None:
    """If this fails, the mode is no longer needed."""
    random = Random(3)
    model = _paged(make_model("llama"))
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(40)] for _ in range(6)]
    lone: Logits = {}
    for ticket, prompt in enumerate(prompts):
        lone |= _run(model, {ticket: prompt}, budget=2048, random=Random(0), p_preempt=0.0, invariant=False)
    mixed = _run(model, dict(enumerate(prompts)), budget=64, random=random, p_preempt=0.0, invariant=False)
    assert any(not torch.equal(logits, mixed[key]) for key, logits in lone.items())


def _paged(model: Any) -> Any:
    attention.register()
    replace_attention(model)
    set_implementation(model, attention.IMPLEMENTATION)
    return model


@torch.inference_mode()
def _run(
    model: Any,
    prompts: dict[int, list[int]],
    *,
    budget: int,
    random: Random,
    p_preempt: float,
    reuse: bool = False,
    invariant: bool = True,
    background_work: Callable[[], bool] = lambda: False,
    num_blocks: int = 128,
    keeps_states: bool = False,
) -> Logits:
    """Return the logits after every token of every request, by ticket and position."""
    blocks = BlockPool(num_blocks)
    cache = KVCache(num_blocks, BLOCK_TOKENS, CPU)
    batcher = Batcher(
        blocks,
        block_tokens=BLOCK_TOKENS,
        token_budget=budget,
        max_requests=6,
        prefix_reuse=reuse,
        snapshots=SnapshotPool(range(6, 10)) if keeps_states and reuse else None,
    )
    waiting = [
        Sequence(ticket, list(prompt), len(prompt), len(prompt) + NUM_TOKENS, Sampler(Sampling(), (), ()))
        for ticket, prompt in prompts.items()
    ]
    forward = LocalForward(
        model,
        cache,
        invariant=invariant,
        linear_only=linear_only(model),
        states=StatePool(10, CPU) if keeps_states else None,
    )
    seen: Logits = {}
    while waiting or batcher.running or batcher.waiting:
        if waiting and (random.random() < 0.5 or not batcher.running):
            batcher.add(waiting.pop(0))
        if batcher.running and random.random() < p_preempt:
            batcher.preempt(batcher.running[-1])
        _step(forward, batcher, seen)
        background_work()
    assert blocks.num_free == blocks.num_blocks
    assert reuse == (batcher.num_reused_tokens > 0)
    return seen


def _step(forward: LocalForward, batcher: Batcher, seen: Logits) -> None:
    plan = batcher.schedule()
    pieces = tuple(chunk.piece() for chunk in plan.chunks)
    forward.submit(Work(pieces, plan.fresh, plan.copies, plan.restored, plan.saved))
    logits = forward.result()
    sampling = [chunk.sequence for chunk in plan.chunks if chunk.is_last]
    batcher.advance(plan.chunks)
    for sequence, row in zip(sampling, logits, strict=True):
        key = (sequence.ticket, sequence.index)
        assert key not in seen
        seen[key] = row.clone()
        if sequence.append(int(row.argmax())) is not None:
            batcher.remove(sequence)
