"""Warnings of models that no instance serves, of a simulation that may give millions of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["unserved_counted"]

log = logging.getLogger("hotswap.unserved")


class _FirstUnserved(logging.Filter):
    """Lets the first warning of a model without an instance through, and counts them all by model.

    Those of other threads pass, in which other simulations may run, or the fleet of a server.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is the first of this thread, or of another one."""
        if threading.get_ident() != self._thread:
            return True
        self.counts[record.args[0] if isinstance(record.args, tuple) else record.args] += 1
        return self.counts.total() == 1


@contextmanager
def unserved_counted(name: str, num_models: int) -> Generator[None]:
    """Log the first model that no instance serves as it happens, and at the end how many there were."""
    first = _FirstUnserved()
    log.addFilter(first)
    try:
        yield
    finally:
        log.removeFilter(first)
        if (num_told := first.counts.total()) > 1:
            what = "In %r %d of %d models had requests waiting for 5 s and no instance, %d times in all."
            log.warning(what, name, len(first.counts), num_models, num_told)
