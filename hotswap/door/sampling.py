"""What a body asks for as a `Sampling`: its own fields, then the door's for the model, then the model's."""

from __future__ import annotations

from typing import Any

from hotswap import Sampling
from hotswap.door.errors import Refusal
from hotswap.door.generation import Door
from hotswap.door.protocol import GenerationBody, ResponseFormat
from hotswap.door.served import Name

__all__ = ["schema_of", "to_sampling"]

_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "truncate_prompt_tokens",
    "skip_special_tokens",
    "regex",
    "grammar",
)


def to_sampling(door: Door, name: Name, body: GenerationBody, **fields: Any) -> Sampling:
    """Return the sampling parameters of a request; `fields` of `Sampling` go before those of the body.

    Where neither the body, the door nor the model's `generation_config.json` says how to draw, it is at
    temperature 1, as clients of OpenAI's expect.

    Raises:
        InvalidRequest: a value is out of range, by the field's name.
    """
    return sampling_of(door, name, {key: getattr(body, key) for key in _FIELDS} | fields)


def sampling_of(door: Door, name: Name, fields: dict[str, Any]) -> Sampling:
    """Return the sampling parameters of given fields of `Sampling`; errors are those of `to_sampling`."""
    given = {key: value for key, value in fields.items() if value is not None or key == "max_tokens"}
    given = {**door.how(name).sampling, **given}
    models = door.fleet.models
    if "temperature" not in given and not models.sampling(name.model).is_random:
        given["temperature"] = 1.0
    return models.sampling(name.model, **given)


def schema_of(form: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the JSON schema that an answer of a form follows; `None` if it is free.

    Raises:
        Refusal: the form has no schema.
    """
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise Refusal(
            400,
            "response_format.json_schema.schema is missing; give the schema that the answer follows.",
            "missing_required_parameter",
            param="response_format",
        )
    return form.json_schema.schema_
