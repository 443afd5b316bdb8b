"""`generation_config.json`: a model's own sampling parameters, by transformers' names, as a `Sampling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any, Final

from hotswap.errors import InvalidRequest
from hotswap.sampling import Sampling

__all__ = ["sampling_of", "unmapped"]

# Names of transformers, and ours.
_NAMES: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "forced_eos_token_id": "forced_end_tokens",
    "bad_words_ids": "bad_words_ids",
    "stop_strings": "stop",
}
_RANDOM: Final = ("temperature", "top_k", "top_p", "min_p")

# What does not say how tokens are chosen, and what is used elsewhere: end tokens are in the manifest.
_OF_NO_EFFECT: Final = frozenset(
    {
        "_from_model_config",
        "bos_token_id",
        "cache_implementation",
        "decoder_start_token_id",
        "do_sample",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)
# Values by which a field does nothing, beside `None`, false and what is empty.
_NEUTRAL: Final[Mapping[str, object]] = {
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_assistant_tokens": 20,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "top_h": 1.0,
    "typical_p": 1.0,
}


def sampling_of(config: Mapping[str, Any], **fields: Any) -> Sampling:
    """Return the sampling parameters of a `generation_config.json`; `fields` of `Sampling` go before its own.

    As in transformers nothing is drawn at random without `do_sample`: the answer is greedy then, and a
    temperature in the file is not used. With it, a file without a temperature has 1. `min_new_tokens` is
    never more than `max_tokens`, and goes where `fields` have a grammar, which decides where it ends.

    Raises:
        InvalidRequest: the file, or `fields`, have a value that no `Sampling` takes, or it has no such field.
    """
    if unknown := sorted(fields.keys() - {field.name for field in dataclass_fields(Sampling)}):
        raise InvalidRequest(f"Sampling has no field {unknown[0]!r}; see its documentation for those it has.")
    given = {name: config[name] for name in _NAMES if config.get(name) is not None}
    if not config.get("do_sample"):
        given = {name: value for name, value in given.items() if name not in _RANDOM}
    elif "temperature" not in given:
        given["temperature"] = 1.0
    defaults = {_NAMES[name]: value for name, value in given.items() if _NAMES[name] not in fields}
    if type(ends := defaults.get("forced_end_tokens")) is int:
        defaults["forced_end_tokens"] = [ends]
    least = defaults.pop("min_tokens", None)
    try:
        Sampling(**defaults)
    except InvalidRequest as exc:
        raise InvalidRequest(f"generation_config.json of the model cannot be used: {exc}") from exc
    sampling = Sampling(**{**defaults, **fields})
    if least is None or sampling.has_grammar:
        return sampling
    if type(least) is not int:
        raise InvalidRequest(
            f"generation_config.json of the model cannot be used: min_new_tokens is {least!r}."
        )
    return replace(sampling, min_tokens=min(least, sampling.max_tokens))


def unmapped(config: Mapping[str, Any]) -> list[str]:
    """Return the names of what a `generation_config.json` asks for and no field of `Sampling` does."""
    names = config.keys() - _NAMES.keys() - _OF_NO_EFFECT
    return sorted(name for name in names if config[name] and config[name] != _NEUTRAL.get(name))
