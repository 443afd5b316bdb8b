"""The sampling parameters of requests in vLLM's terms."""

from __future__ import annotations

from typing import Any

from hotswap.backends.servable import most_tokens
from hotswap.backends.vllm.core import Core
from hotswap.backends.vllm.inside.connector import ARRIVAL
from hotswap.backends.vllm.inside.grammar import ENDS, FIELDS
from hotswap.backends.vllm.inside.resume import RESUMED
from hotswap.backends.vllm.inside.sampling import RULES
from hotswap.backends.vllm.names import named
from hotswap.errors import InvalidRequest
from hotswap.model import ModelCard
from hotswap.request import Request
from hotswap.sampling import Sampling

__all__ = ["check_prompt_rows", "no_grammar", "sampling_params", "unsupported"]

# What vLLM takes as it is.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.01, 2.0
_SEEDS = 1 << 64
# What its second model runner takes of a request: more would end the core. With `min_tokens` it takes 128
# stop tokens, of which the model has some itself.
_MOST_BAD_WORDS, _MOST_BAD_TOKENS, _MOST_STOPS = 128, 1024, 112
# vLLM computes the logits of all tokens of a step whose log-probabilities are told, and more than once.
_MOST_LOGITS_BYTES = 2 << 30


def sampling_params(
    request: Request, card: ModelCard, context: int, core: Core, *, arrival: str | None = None
) -> Any:
    """Return vLLM's sampling parameters of a request; the fleet makes text and matches stop strings.

    If the core `resumes`, vLLM is asked for the whole generation, with the tokens that there are so far;
    otherwise for the rest, with those tokens as part of the prompt. `arrival` is the id of the sink that has
    its KV blocks.
    """
    sampling, begun = request.sampling, len(request.generated)
    passed = 0 if core.resumes else begun
    max_tokens = most_tokens(request, context) - len(request.prompt) - passed
    ends = _ends(sampling, card, core)
    checked = core.has_rules and _may_leave_nothing(sampling)
    asks = None if begun else sampling.prompt_logprobs  # they were told with the first token
    return named("vllm.sampling_params:SamplingParams")(
        max_tokens=max_tokens,
        min_tokens=0 if core.has_rules else min(max(0, sampling.min_tokens - passed), max_tokens),
        **_cuts(sampling),
        seed=_seed(sampling) if sampling.is_random and not core.has_rules else None,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        stop_token_ids=ends,
        ignore_eos=True,
        _bad_words_token_ids=[list(word) for word in sampling.bad_words_ids] or None,
        logprobs=_count(0 if checked and sampling.logprobs is None else sampling.logprobs, core),
        prompt_logprobs=_count(asks, core),
        detokenize=False,
        output_kind=named("vllm.sampling_params:RequestOutputKind").DELTA,
        extra_args=_extra(request, core, ends, passed, arrival) or None,
        structured_outputs=_grammar(sampling),
    )


def check_prompt_rows(request: Request, core: Core) -> None:
    """Refuse log-probabilities of a prompt whose logits would take gigabytes in one step, which has them all.

    Raises:
        InvalidRequest: they would.
    """
    rows = min(len(request.prompt), core.step_tokens)
    if request.sampling.prompt_logprobs is not None and rows * core.vocabulary * 4 > _MOST_LOGITS_BYTES:
        raise InvalidRequest(
            f"prompt_logprobs of request {request.id!r} take the logits of {rows:,} tokens in one step, over "
            f"{_MOST_LOGITS_BYTES:,} bytes; give the engine a token_budget of at most "
            f"{_MOST_LOGITS_BYTES // (4 * core.vocabulary):,}, or ask for them of a shorter prompt."
        )


def unsupported(sampling: Sampling, core: Core) -> list[str]:
    """Return the fields of `Sampling` that a core does not have as they are documented, for a request.

    Of a core without rules these are all that vLLM itself has not. Bad words come as token ids.
    """
    fields = ["bad_words"]
    if core.has_rules:
        return fields
    fields += ["suppress_tokens", "begin_suppress_tokens", "forced_end_tokens", *_beyond(sampling)]
    if sampling.logprobs_of == "sampled" or sampling.has_grammar:
        fields.append("logprobs")
    if _cuts_itself(sampling):
        fields.append("min_p" if sampling.min_p else "temperature")
    return fields


def _beyond(sampling: Sampling) -> list[str]:
    """Return the fields that vLLM itself takes fewer of, or with another meaning."""
    words = sampling.bad_words_ids
    fields: list[str] = []
    if len(words) > _MOST_BAD_WORDS or sum(map(len, words)) > _MOST_BAD_TOKENS:
        fields.append("bad_words_ids")
    # vLLM forbids the model's end tokens too where they are ordinary ones.
    if sampling.ignore_eos or len(sampling.stop_token_ids) > _MOST_STOPS:
        fields.append("min_tokens")
    return fields


def no_grammar(core: Core, request: Request) -> str:
    """Why a core cannot hold a request to a grammar; empty if it can."""
    if not core.has_grammars:
        return "its store has no tokenizer of the model; convert the model with its tokenizer.json"
    if not core.grammar_ends:
        return "the model's tokenizer has none of its end tokens, so a grammar could not end"
    if request.sampling.grammar and not core.guides:
        return "its engine is given `structured_outputs_config`; leave that out of `arguments`"
    if request.generated and not core.resumes:
        return "this vLLM would begin the grammar anew after what was generated elsewhere"
    return ""


def _cuts_itself(sampling: Sampling) -> bool:
    """Whether vLLM has another order of cuts, or does not take the temperature."""
    fits = _LEAST_TEMPERATURE <= sampling.temperature <= _MOST_TEMPERATURE
    return sampling.is_random and (not fits or (sampling.min_p > 0 and sampling.top_p < 1))


def _cuts(sampling: Sampling) -> dict[str, Any]:
    if _cuts_itself(sampling):
        return {"temperature": 1.0}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }


def _may_leave_nothing(sampling: Sampling) -> bool:
    """Whether its rules may leave no token that may come, which vLLM tells as a log-probability."""
    return bool(
        sampling.suppress_tokens
        or sampling.begin_suppress_tokens
        or sampling.forced_end_tokens
        or sampling.bad_words_ids
        or sampling.min_tokens
    )


def _ends(sampling: Sampling, card: ModelCard, core: Core) -> list[int]:
    """Return the tokens that end a request: of the model's own those that it has, as vLLM takes no others."""
    free = sampling.ignore_eos and not sampling.has_grammar
    own = () if free else (token for token in card.eos_token_ids if token < core.vocabulary)
    return sorted({*sampling.stop_token_ids, *own})


def _extra(request: Request, core: Core, ends: list[int], passed: int, arrival: str | None) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if request.generated and core.resumes:
        extra[RESUMED] = list(request.generated)
    if arrival is not None:
        extra["kv_transfer_params"] = {ARRIVAL: arrival}
    if request.sampling.has_grammar and core.guides:
        extra[ENDS] = list(core.grammar_ends)
    if core.has_rules and (rules := _rules(request.sampling, core, ends)):
        extra[RULES] = {**rules, "before": passed}
    return extra


def _rules(sampling: Sampling, core: Core, ends: list[int]) -> dict[str, Any]:
    """Return the arguments of `Rules` that differ from their defaults."""
    rules: dict[str, Any] = {}
    if sampling.suppress_tokens:
        rules["never"] = list(sampling.suppress_tokens)
    if sampling.begin_suppress_tokens:
        rules["first"] = list(sampling.begin_suppress_tokens)
    if sampling.forced_end_tokens:
        rules |= {"last": list(sampling.forced_end_tokens), "length": sampling.max_tokens}
    if sampling.min_tokens:
        rules |= {"ends": ends, "min_tokens": sampling.min_tokens}
    if sampling.is_random:
        rules["seed"] = _seed(sampling)
    if _cuts_itself(sampling):
        rules["cuts"] = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p]
    if sampling.logprobs is None and _may_leave_nothing(sampling):
        rules["tells"] = False
    elif sampling.logprobs is not None and sampling.logprobs_of == "sampled":
        rules["of_sampled"] = True
    return rules


def _seed(sampling: Sampling) -> int:
    """Return its seed; vLLM takes -1 for none."""
    return (sampling.seed or 0) % _SEEDS


def _count(asked: int | None, core: Core) -> int | None:
    return None if asked is None else min(asked, core.vocabulary)


def _grammar(sampling: Sampling) -> Any:
    """Return vLLM's parameters of a grammar; `None` without one."""
    name, value = sampling.grammar_field
    return named("vllm.sampling_params:StructuredOutputsParams")(**{FIELDS[name]: value}) if name else None
