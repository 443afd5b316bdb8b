"""A test of a new core: whether it samples by rules, resumes requests and moves their KV blocks exactly.

vLLM promises none of it, so every core is tested when it has started.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import anyio

from hotswap.backends.life import Life
from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.vllm.core import Core
from hotswap.backends.vllm.migration import (
    MigrationContext,
    VllmKVSink,
    VllmKVSource,
    block_shape,
    lent_sink,
    lent_source,
)
from hotswap.backends.vllm.params import sampling_params
from hotswap.backends.vllm.streams import Stream
from hotswap.errors import HotswapError, InstanceLost, MigrationAborted
from hotswap.model import ModelCard
from hotswap.request import Request, RequestId
from hotswap.sampling import Sampling
from hotswap.view import InstanceId

__all__ = ["try_core"]

log = logging.getLogger("hotswap.vllm")

_NUM_TOKENS, _CUT = 6, 3
# Near ties, decided by how a kernel rounds, may give one of these other tokens; most of them must agree.
_SEEDS = (7, 11, 13)
# Enough tokens for a request to run when it moves, and how many of them are generated after the move.
_MOST_TOKENS, _NUM_AFTER = 64, 3


async def try_core(core: Core, card: ModelCard, weights: str) -> None:
    """Set `has_rules`, `resumes` and `blocks` of a new core by a test, and log what it cannot do.

    Seeded generations are cut and resumed; then another moves out of the core and into it again with its KV
    blocks, one of them full. Of three generations one may differ: the kernels of prefill and of decode round
    in different ways, which decides near ties.

    Raises:
        InstanceLost: the core ended.
        UnsupportedModel: it cannot generate at all.
    """
    core.weights, core.blocks, core.resumes = weights, None, True
    core.has_rules = True
    prompt = tuple(1 + place % (core.vocabulary - 1) for place in range(core.block_tokens + 3))
    request = Request(
        id=RequestId("trial"),
        model=card.id,
        prompt=prompt if _has_room(core, prompt) else (1, 2, 3),
        sampling=Sampling(max_tokens=_NUM_TOKENS, temperature=1.0, seed=_SEEDS[0], ignore_eos=True),
    )
    await _try_rules(core, request, 1 % core.vocabulary, card)
    core.resumes = await _resumes(core, request, card)
    if not core.resumes:
        log.warning(
            "This vLLM does not resume requests exactly: after a move their penalties and bad words begin "
            "anew, and so do draws where it does not sample by hotswap's rules. Others are not affected."
        )
    elif request.prompt == prompt:
        await _try_blocks(core, replace(request, id=RequestId("trial of blocks")), card)


def _seeded(request: Request, seed: int) -> Request:
    return replace(request, sampling=replace(request.sampling, seed=seed))


async def _resumes(core: Core, request: Request, card: ModelCard) -> bool:
    """Return whether most generations that are cut and resumed have the tokens of whole ones."""
    num_exact = 0
    for seed in _SEEDS:
        tried = _seeded(request, seed)
        whole = await _generate(core, tried, card)
        rest = await _generate(core, tried.continued(whole[:_CUT]), card)
        num_exact += whole == whole[:_CUT] + rest
    return 2 * num_exact > len(_SEEDS)


async def _try_rules(core: Core, request: Request, token: int, card: ModelCard) -> None:
    """Set `has_rules` of a core: whether it gives a token that is forced, and the log-probability of that."""
    forced = Sampling(max_tokens=1, forced_end_tokens=(token,), logprobs=0, logprobs_of="sampled")
    asked = replace(request, sampling=forced)
    stream = Stream(asked, num_tokens=asked.num_tokens)
    await core.call(stream.run(core, sampling_params(asked, card, core.context, core), None), "generate")
    told = [(given.id, given.logprob) for given in await stream.tokens.collect()]
    core.has_rules = told == [(token, 0.0)]
    if not core.has_rules:
        log.warning(
            "This vLLM does not sample by hotswap's rules: it refuses requests with suppressed or forced "
            "tokens, min_p beside top_p, or log-probabilities of the distribution that is sampled from, and "
            "draws by a seed otherwise than other engines."
        )


def _has_room(core: Core, prompt: tuple[int, ...]) -> bool:
    """Whether a core holds a prompt and its generation three times: leaving, held by a sink, and arriving."""
    most = len(prompt) + _MOST_TOKENS
    return most <= core.context and core.num_blocks * core.block_tokens >= 4 * most


async def _try_blocks(core: Core, request: Request, card: ModelCard) -> None:
    """Set `blocks` of a core if a request that moves with its KV blocks keeps its tokens."""
    core.blocks = await block_shape(core)
    if core.blocks is None:
        log.info("Requests for %r move from this core without their KV blocks.", card.id)
        return
    because = ""
    for seed in _SEEDS:
        because = await _why_not_moved(core, _seeded(request, seed), card)
        if not because:
            return
    core.blocks = None
    log.warning(
        "This vLLM does not move KV blocks exactly (%s): requests move as tokens, which are computed again.",
        because,
    )


async def _why_not_moved(core: Core, request: Request, card: ModelCard) -> str:
    """Return why a request that moves with its KV blocks lost its tokens; empty if it has kept them."""
    weights = core.weights
    try:
        moved = await core.call(_move(core, request, card), "move KV blocks")
    except InstanceLost:
        raise
    except (HotswapError, ExceptionGroup) as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        core.weights = weights
    whole = await _generate(core, _lasting(request, len(moved)), card)
    return "" if moved == whole else "the tokens after the move are others"


async def _move(core: Core, request: Request, card: ModelCard) -> list[int]:
    """Move a request out of a core and into it again; return its tokens."""
    assert core.blocks is not None, "the caller has set it"
    stream = Stream(request, num_tokens=request.num_tokens)
    moved: list[int] = []

    def give_up() -> bool:
        stream.leave()
        return True

    async with anyio.create_task_group() as tasks:
        context = MigrationContext(
            Life(InstanceId("trial"), StatusNotifier()), core, core.blocks, lambda: core
        )
        params = sampling_params(_lasting(request, _MOST_TOKENS), card, core.context, core)
        tasks.start_soon(stream.run, core, params, None)
        await stream.has(request.num_tokens + 1)
        source, sink = VllmKVSource(context, stream, give_up), VllmKVSink(context, request, lambda sink: None)
        async with lent_source(source), lent_sink(sink):
            stopped = await source.stop()
            await sink.reserve(stopped.num_computed)
            await sink.write(await source.read(0, stopped.num_computed))
            await sink.commit(stopped.tokens)
            await source.release()
            await stream.abort(core)
            moved += stopped.tokens[len(request.prompt) :]
            # Under another fingerprint the core has no cached prefixes, so it finds what arrived alone.
            core.weights += " (trial)"
            arriving = _lasting(request, len(moved) + _NUM_AFTER).continued(moved)
            moved += await _arrive(core, arriving, card, sink, stopped.num_computed)
    return moved


def _lasting(request: Request, num_tokens: int) -> Request:
    return replace(request, sampling=replace(request.sampling, max_tokens=num_tokens))


async def _arrive(
    core: Core, request: Request, card: ModelCard, sink: VllmKVSink, num_computed: int
) -> list[int]:
    """Return the tokens of a request that must find all its blocks."""
    stream = Stream(request, num_tokens=request.num_tokens)
    params = sampling_params(request, card, core.context, core, arrival=sink.id)
    await stream.run(core, params, None)
    found = stream.tokens.num_reused_tokens
    if found != num_computed:
        raise MigrationAborted(f"{found} of {num_computed} tokens were found", stage="arrive")
    return [token.id for token in await stream.tokens.collect()]


async def _generate(core: Core, request: Request, card: ModelCard) -> list[int]:
    params = sampling_params(request, card, core.context, core)
    stream = Stream(request, num_tokens=request.num_tokens)
    await core.call(stream.run(core, params, None), "generate")
    return [token.id for token in await stream.tokens.collect()]
