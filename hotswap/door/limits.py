"""What clients may ask of a door."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.checks import check_counts, check_positive_seconds, check_required_seconds
from hotswap.errors import ConfigError

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may take, and when its stream is written.

    Attributes:
        body_bytes: The longest body.
        body_s: Seconds within which a body must have come.
        request_s: Seconds after which a request ends by `DeadlineExceeded`; clients may ask for fewer.
        commit_after_s: Seconds after which a stream that has no token yet is begun, and told of the progress
            of its model's load; before that an error still has a status of its own.
        stream_interval_s: Seconds between two writes of a stream, for fewer and longer ones; 0 writes what
            has come as soon as it has.
        choices: The most choices of one request, over all its prompts.
        stale_s: Seconds without a decision of the fleet after which `/ready` says that it is not.
    """

    body_bytes: int = 16 << 20
    body_s: float = 30.0
    request_s: float = 600.0
    commit_after_s: float = 10.0
    stream_interval_s: float = 0.0
    choices: int = 128
    stale_s: float = 60.0

    def __post_init__(self) -> None:
        check_counts(ConfigError, 1, body_bytes=self.body_bytes, choices=self.choices)
        check_positive_seconds(
            ConfigError, body_s=self.body_s, request_s=self.request_s, stale_s=self.stale_s
        )
        check_required_seconds(
            ConfigError, commit_after_s=self.commit_after_s, stream_interval_s=self.stream_interval_s
        )
