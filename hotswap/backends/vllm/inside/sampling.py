"""What `Sampling` has and vLLM's sampler has not, or does in another order; in the processes of a core.

The sampler of a model runner is replaced by a subclass, and the runner gets two more logits processors. Rows
of requests without `RULES` and log-probabilities go through vLLM's own code alone.

Tokens are drawn as a `TorchEngine` draws them, by a number that depends on the seed and the position alone.
vLLM draws from a generator for each request, whose state no other engine has. On a CPU it ends the core when
the prompt of a request with a generator takes more than one step (`set_offset` in 0.32).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hotswap.backends.torch.distribution import (
    Workspace,
    invert,
    keep_from,
    top_k_threshold,
    top_p_threshold,
    uniform,
)
from hotswap.backends.vllm.names import named

__all__ = ["NOTHING_LEFT", "RULES", "apply"]

RULES = "hotswap_rules"
"""The entry of `SamplingParams.extra_args` with the rules of a request: arguments of `Rules`, as a dict."""

NOTHING_LEFT = math.inf
"""The log-probability of the token of a row whose rules leave none that may come."""

_PROCESSORS = "vllm.v1.sample.logits_processor"
_Processor: Any = named(f"{_PROCESSORS}:LogitsProcessor")
_Sampler: Any = named("vllm.v1.sample.sampler:Sampler")
_Tensors: Any = named("vllm.v1.outputs:LogprobsTensors")
_update_rows: Any = named(f"{_PROCESSORS}:process_dict_updates")

_cut: Any = named("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p")

_NEVER = -math.inf
_GREEDY = 1e-5  # vLLM's own bound of temperatures
_done: list[bool] = []


@dataclass(slots=True, kw_only=True, eq=False)
class Rules:
    """What is done with the rows of one request beside what vLLM does.

    Attributes:
        never: Tokens that never come.
        first: Tokens that do not come at the request's first position.
        last: Tokens of which one comes at its last position, each as likely.
        length: How many tokens it has at most; 0 if any token may be its last.
        before: How many of them are part of vLLM's prompt.
        seed: What its draws depend on; `None` if it draws none.
        cuts: Temperature, `top_k`, `top_p` and `min_p`, if they are not left to vLLM.
        tells: Whether log-probabilities are told; else they only say whether a token was left.
        of_sampled: Whether these are of the distribution sampled from, not of the model's.
        ends: Tokens that do not come before `min_tokens` tokens. vLLM's own rule has the model's end tokens
            among them, also where they are ordinary ones.
        min_tokens: How many tokens come before them.
        words: Tokens that never come in a row; vLLM's own rule, which does not hold at the last position.
        output: The tokens that vLLM has generated, or what stands for those under way; vLLM adds to it.
    """

    never: list[int] = field(default_factory=list[int])
    first: list[int] = field(default_factory=list[int])
    last: list[int] = field(default_factory=list[int])
    length: int = 0
    before: int = 0
    seed: int | None = None
    cuts: list[Any] = field(default_factory=list[Any])
    tells: bool = True
    of_sampled: bool = False
    ends: list[int] = field(default_factory=list[int])
    min_tokens: int = 0
    words: list[list[int]] = field(default_factory=list[list[int]])
    output: list[int] = field(default_factory=list[int])

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.before + len(self.output)

    @property
    def may_leave_nothing(self) -> bool:
        """Whether there may be no token that may come."""
        return bool(self.never or self.first or self.length or self.min_tokens or self.words)

    def forbidden(self) -> list[int]:
        """Return the tokens that do not come at the next position; vLLM sees to `words`."""
        found = self.never + (self.first if self.position == 0 else [])
        return found + self.ends if self.position < self.min_tokens else found

    def forced(self) -> list[int] | None:
        """Return the tokens of which one comes at the next position; `None` if any may."""
        if self.position != self.length - 1:
            return None
        forbidden = {*self.forbidden()}
        for *beginning, end in self.words:
            if not beginning or self.output[-len(beginning) :] == beginning:
                forbidden.add(end)
        return [token for token in self.last if token not in forbidden]


def _rules_of(params: Any, _: list[int] | None, output: list[int]) -> Rules | None:
    """Return the rules of a request; `None` if vLLM alone samples it."""
    extra: dict[str, Any] = params.extra_args or {}
    given: dict[str, Any] = extra.get(RULES, {})
    if not given and params.logprobs is None:
        return None
    return Rules(
        **given,
        words=params.bad_words_token_ids or [],
        output=output,
    )


class Forbid(_Processor):  # type: ignore[misc]  # vLLM is untyped here
    """Keeps the rules of a batch, and forbids tokens.

    Attributes:
        rows: The rules of each row that has some.
        unmasked: The model's logits, where the masks of grammars have changed them.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Rules] = {}
        self.unmasked: Tensor | None = None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        _update_rows(self.rows, batch_update, _rules_of)

    def apply(self, logits: Tensor) -> Tensor:
        for row, rules in self.rows.items():
            if forbidden := rules.forbidden():
                logits[row].index_fill_(0, _to(logits, forbidden), _NEVER)
        return logits


class Cut(_Processor):  # type: ignore[misc]  # vLLM is untyped here
    """Divides rows by their temperatures and cuts them, in the order that `Sampling` documents.

    vLLM applies `min_p` before `top_p`, and takes no temperature under 0.01 or over 2.
    """

    def __init__(self, forbid: Forbid) -> None:
        self._forbid = forbid
        self._space = Workspace()

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: `Forbid` keeps the rules."""

    def apply(self, logits: Tensor) -> Tensor:
        for row, rules in self._forbid.rows.items():
            if rules.cuts:
                temperature, top_k, top_p, min_p = rules.cuts
                found = logits[row]
                found -= found.max()
                found /= temperature
                weights = found.exp()
                keep_from(weights, top_k_threshold(weights, top_k))
                bound = top_p_threshold(weights, top_p, self._space) if top_p < 1.0 else 0.0
                keep_from(weights, max(bound, min_p))
                found.masked_fill_(weights == 0.0, _NEVER)
        return logits


class HotswapSampler(_Sampler):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's sampler with the rules of hotswap's requests, and either kind of log-probabilities."""

    _empty: tuple[list[int], Tensor] | None = None  # rows that may have no token, and whether they have none
    _keeps_processed = False
    _processed: Tensor | None = None  # log-probabilities of the distributions sampled from, if they are kept

    def __init__(self, *args: Any, **given: Any) -> None:
        vllms: Any = super()
        vllms.__init__(*args, **given)
        self._space = Workspace()

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> Any:
        """Return vLLM's `SamplerOutput`: a token for each row, and log-probabilities of some."""
        vllms: Any = super()
        forbid = _forbid_of(sampling_metadata)
        rows = {} if forbid is None else forbid.rows
        told = [row for row, rules in rows.items() if rules.tells]
        if forbid is None or sampling_metadata.max_num_logprobs is None:
            return vllms.forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        raw = logits if forbid.unmasked is None else forbid.unmasked
        forbid.unmasked = None
        logprobs = self.compute_logprobs(raw[_to(raw, told)])
        self._keeps_processed = any(rows[row].of_sampled for row in told)
        output = vllms.forward(logits, replace(sampling_metadata, max_num_logprobs=None))
        if self._processed is not None:
            places = [place for place, row in enumerate(told) if rows[row].of_sampled]
            logprobs[_to(raw, places)] = self._processed[_to(raw, [told[place] for place in places])]
            self._processed = None
        chosen = output.sampled_token_ids[:, 0].long()
        count = sampling_metadata.max_num_logprobs
        found = self.gather_logprobs(logprobs, count, chosen[_to(raw, told)])
        output.logprobs_tensors = self._spread(found, told, chosen)
        return output

    def apply_logits_processors(
        self, logits: Tensor, sampling_metadata: Any, predict_bonus_token: bool
    ) -> Tensor:
        """Change logits as vLLM does, then force tokens; rows without a token get equal logits."""
        vllms: Any = super()
        logits = vllms.apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
        forbid = _forbid_of(sampling_metadata)
        self._empty = None
        if forbid is None:
            return logits
        for row, rules in forbid.rows.items():
            if (forced := rules.forced()) is not None:
                logits[row].fill_(_NEVER)
                logits[row].index_fill_(0, _to(logits, forced), 0.0)
        if checked := [row for row, rules in forbid.rows.items() if rules.may_leave_nothing]:
            places = _to(logits, checked)
            empty = logits[places].amax(-1) == _NEVER
            logits[places] = torch.where(empty[:, None], 0.0, logits[places])
            self._empty = checked, empty
        return logits

    def sample(self, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None) -> Any:
        """Return the tokens; keep the log-probabilities of the distributions sampled from, if wanted."""
        forbid = _forbid_of(sampling_metadata)
        rows = {} if forbid is None else forbid.rows
        if any(rules.seed is not None for rules in rows.values()):
            sampled, logits = self._draw(logits, sampling_metadata, rows)
        else:
            vllms: Any = super()
            sampled, _ = vllms.sample(logits, sampling_metadata, logprobs_mode_override)
        if self._keeps_processed:
            self._keeps_processed, self._processed = False, self.compute_logprobs(logits)
        return sampled, None

    def _draw(self, logits: Tensor, metadata: Any, rows: Mapping[int, Rules]) -> tuple[Tensor, Tensor]:
        """Return the tokens, and the logits of the distributions sampled from."""
        greedy = None if metadata.all_random else self.greedy_sample(logits).long()
        logits = self.apply_temperature(logits, metadata.temperature, metadata.all_random)
        for processor in metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = _cut(logits, metadata.top_k, metadata.top_p)
        weights = self._space.rows(len(logits), logits.shape[1], logits.device)
        weights.copy_((logits - logits.amax(-1, keepdim=True)).exp_())
        places = [0.0] * len(logits)
        for row, rules in rows.items():
            if rules.seed is not None:
                places[row] = uniform(rules.seed, rules.position)
        drawn = invert(weights, torch.tensor(places, dtype=torch.float64, device=logits.device))
        if greedy is None:
            return drawn, logits
        return torch.where(metadata.temperature < _GREEDY, greedy, drawn), logits

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Return the log-probabilities of the most probable tokens and of given ones, as vLLM's does.

        vLLM counts ranks by a function that it compiles at its first call, which takes a compiler.
        """
        top = torch.topk(logprobs, num_logprobs, dim=-1)
        given = token_ids.unsqueeze(-1)
        found = logprobs.gather(-1, given)
        return _Tensors(
            torch.cat((given, top.indices), dim=1).to(torch.int32),
            torch.cat((found, top.values), dim=1),
            (logprobs >= found).sum(-1),
        )

    def _spread(self, found: Any, told: Sequence[int], chosen: Tensor) -> Any:
        """Return log-probabilities of some rows as those of all rows, with the rows that have no token."""
        ids, logprobs, ranks, *_ = found
        size = len(chosen), ids.shape[1]
        all_ids = chosen[:, None].expand(size).to(torch.int32).contiguous()
        all_logprobs, all_ranks = logprobs.new_zeros(size), ranks.new_ones(len(chosen))
        places = _to(chosen, told)
        all_ids[places], all_logprobs[places], all_ranks[places] = ids, logprobs, ranks
        if self._empty is not None:
            rows, empty = self._empty
            at = _to(chosen, rows)
            all_logprobs[at] = torch.where(empty[:, None], NOTHING_LEFT, all_logprobs[at])
        return _Tensors(all_ids, all_logprobs, all_ranks)


def apply() -> None:
    """Patch vLLM's model runner in this process; does nothing if called again."""
    if _done:
        return
    _done.append(True)
    runner: Any = named("vllm.v1.worker.gpu_model_runner")
    runner.Sampler = HotswapSampler
    build, mask = runner.build_logitsprocs, runner.apply_grammar_bitmask

    @functools.wraps(build)
    def build_logitsprocs(vllm_config: Any, *args: Any, **given: Any) -> Any:
        built = build(vllm_config, *args, **given)
        if vllm_config.speculative_config is None and vllm_config.model_config.runner_type == "generate":
            forbid = Forbid()
            built.non_argmax_invariant.append(forbid)
            built.argmax_invariant.append(Cut(forbid))
        return built

    @functools.wraps(mask)
    def apply_grammar_bitmask(scheduled: Any, grammar: Any, batch: Any, logits: Tensor) -> None:
        forbid = _forbid_of(batch)
        if forbid is not None and any(r.tells and not r.of_sampled for r in forbid.rows.values()):
            forbid.unmasked = logits.clone()
        mask(scheduled, grammar, batch, logits)

    runner.build_logitsprocs, runner.apply_grammar_bitmask = build_logitsprocs, apply_grammar_bitmask


def _forbid_of(holder: Any) -> Forbid | None:
    """Return the processor that keeps the rules of a batch; `holder` is the batch, or its metadata."""
    return next((one for one in holder.logitsprocs.non_argmax_invariant if isinstance(one, Forbid)), None)


def _to(like: Tensor, numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=like.device)
