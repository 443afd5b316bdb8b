"""How long an end of a link waits for the other: each tells it at the start, and the other beats as often."""

from __future__ import annotations

from typing import Final

from hotswap.backends.fields import Fields
from hotswap.checks import check_positive_seconds
from hotswap.errors import ConfigError

__all__ = ["LEAST_S", "beat_every_s", "check_silence", "silence_fields", "silence_in"]

LEAST_S: Final = 0.05  # beats for less would be most of what an end does
_MOST_S: Final = 86_400.0  # JSON has no infinity
_BEATS: Final = 4  # in the silence of an end, so that a late one or two do no harm


def check_silence(silence_s: object) -> None:
    """Raise `ConfigError` unless `silence_s` is a time that an end may tell the other."""
    check_positive_seconds(ConfigError, silence_s=silence_s)
    if isinstance(silence_s, int | float) and silence_s < LEAST_S:
        raise ConfigError(f"silence_s is {silence_s!r}; give {LEAST_S:g} s or more.")


def silence_fields(silence_s: float) -> dict[str, object]:
    """Return the field of a first message that tells after how long a silence this end ends the link."""
    return {"silence_s": min(silence_s, _MOST_S)}


def silence_in(fields: Fields) -> float:
    """Return after how long a silence the other end ends the link, from its first message.

    Raises:
        ShardCorrupt: it is no such time; see `wire.protocol_errors`.
    """
    silence_s = fields.number("silence_s")
    if not LEAST_S <= silence_s <= _MOST_S:
        raise fields.wrong(f"a silence of {silence_s:g} s is not between {LEAST_S:g} and {_MOST_S:,.0f} s")
    return silence_s


def beat_every_s(*silences_s: float) -> float:
    """Return the time between beats that keeps the shortest of some silences."""
    return min(silences_s) / _BEATS
