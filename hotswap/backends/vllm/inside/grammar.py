"""Grammars in a vLLM core: compiled as on a `TorchEngine`, and advanced by tokens from elsewhere."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hotswap.backends.tokenizer import HfTokenizer
from hotswap.backends.torch.grammar import GrammarCompiler
from hotswap.backends.vllm.inside.resume import carried_tokens
from hotswap.backends.vllm.names import named

__all__ = ["ENDS", "FIELDS", "apply"]

ENDS = "hotswap_ends"
"""The entry of `SamplingParams.extra_args` with the end tokens of the model that a request asks for.

Cores outlive models, whose end tokens may differ; vLLM knows one of its tokenizer.
"""

FIELDS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"""The names of grammars in `Sampling`, and in vLLM's `StructuredOutputsParams`."""

_COMPILERS = (
    "_hotswap_compilers"  # the attribute of a backend that has a `Guidance` for each set of end tokens
)
_done: list[bool] = []


def apply() -> None:
    """Patch vLLM in this process; does nothing if called again."""
    if _done:
        return
    _done.append(True)
    manager: Any = named("vllm.v1.structured_output:StructuredOutputManager")
    guided: Any = named("vllm.v1.structured_output.backend_guidance:GuidanceBackend")
    make = manager._create_grammar

    @functools.wraps(make)
    def create_grammar(self: Any, request: Any) -> Any:
        params = request.sampling_params
        carried = carried_tokens(params)
        extra: dict[str, Any] = params.extra_args or {}
        ends: list[int] = extra.get(ENDS, [])
        if ends and isinstance(self.backend, guided):
            return _compile(self.backend, params.structured_outputs, tuple(ends), carried)
        made = make(self, request)
        if carried and not made.accept_tokens(request.request_id, carried):
            raise ValueError(f"The tokens of request {request.request_id!r} do not fit its grammar.")
        return made

    manager._create_grammar = create_grammar


def _compile(backend: Any, given: Any, ends: tuple[int, ...], carried: list[int]) -> Any:
    """Return vLLM's `GuidanceGrammar` of a request; called in threads, several at a time."""
    compilers: dict[tuple[int, ...], GrammarCompiler] = backend.__dict__.setdefault(_COMPILERS, {})
    if (compiler := compilers.get(ends)) is None:
        directory = Path(backend.vllm_config.model_config.tokenizer)
        tokenizer = HfTokenizer.parse((directory / "tokenizer.json").read_bytes())
        compiler = compilers[ends] = GrammarCompiler(tokenizer, backend.ll_tokenizer.vocab_size, ends)
    name, value = next((ours, found) for ours, its in FIELDS.items() if (found := getattr(given, its)))
    return named("vllm.v1.structured_output.backend_guidance:GuidanceGrammar")(
        ll_matcher=compiler.matcher(name, value, carried),
        ll_tokenizer=compiler.tokenizer,
        vocab_size=backend.vocab_size,
    )
