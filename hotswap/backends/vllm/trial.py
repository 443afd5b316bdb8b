"""Whether a core resumes requests as it should: tried out when it has started, since no vLLM promises it."""

from __future__ import annotations

import logging

from hotswap.backends.vllm.core import Core
from hotswap.backends.vllm.streams import Stream, sampling_params
from hotswap.model import ModelCard
from hotswap.request import Request, RequestId, Sampling

__all__ = ["try_resumption"]

log = logging.getLogger("hotswap.vllm")

_NUM_TOKENS, _CUT = 6, 3


async def try_resumption(core: Core, card: ModelCard, weights: str) -> None:
    """Note on a new core whether a seeded generation goes on where it was cut; says so in the log if not.

    Raises:
        InstanceLost: the core ended.
        UnsupportedModel: it cannot generate at all.
    """
    request = Request(
        id=RequestId("trial"),
        model=card.id,
        prompt=(1, 2, 3),
        sampling=Sampling(max_tokens=_NUM_TOKENS, temperature=1.0, seed=7, ignore_eos=True),
    )
    core.weights, core.resumes = weights, True
    whole = await _generate(core, request, card)
    rest = await _generate(core, request.continued(whole[:_CUT]), card)
    core.resumes = whole == whole[:_CUT] + rest
    if not core.resumes:
        log.warning(
            "This vLLM does not resume requests as hotswap asks: those that are sampled with a seed will, "
            "once they have moved, go on with other tokens than they would have had. Greedy ones will not."
        )


async def _generate(core: Core, request: Request, card: ModelCard) -> list[int]:
    params = sampling_params(request, card, core.context, resumes=core.resumes)
    stream = Stream(request, num_tokens=request.num_tokens)
    await core.call(stream.run(core, params, None), "generate")
    return [token.id for token in await stream.tokens.collect()]
