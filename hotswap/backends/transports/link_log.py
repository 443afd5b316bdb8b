"""The log of links, which no client can flood."""

from __future__ import annotations

import logging
import math

import anyio

__all__ = ["LinkLog"]

_log = logging.getLogger("hotswap.transports")

_LINES, _WINDOW_S = 10, 10.0


class LinkLog:
    """Logs warnings, at most ten of one kind in 10 s; the number left out is logged with the next."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Window] = {}

    def warn(self, kind: str, *args: object) -> None:
        """Log a line; `kind` is its text, with a `%s` for each of `args`."""
        window = self._kinds.setdefault(kind, _Window())
        now = anyio.current_time()
        if now - window.began_s >= _WINDOW_S:
            if (left_out := window.num_lines - _LINES) > 0:
                _log.warning("%d more such lines were left out: %r.", left_out, kind)
            window.began_s, window.num_lines = now, 0
        window.num_lines += 1
        if window.num_lines <= _LINES:
            _log.warning(kind, *args)


class _Window:
    """The lines of one kind since a moment."""

    def __init__(self) -> None:
        self.began_s, self.num_lines = -math.inf, 0
