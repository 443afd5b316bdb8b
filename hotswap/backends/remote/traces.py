"""The trace context of a call, which crosses the link: spans at the host are children of the controller's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hotswap.backends.fields import Fields

__all__ = ["traced", "with_trace"]

_PROPAGATOR = TraceContextTextMapPropagator()
_NAMES = ("traceparent", "tracestate")
_MAX_CHARACTERS = 1024


def with_trace(fields: dict[str, object]) -> dict[str, object]:
    """Return fields with the current span, if there is one, as the headers of W3C's Trace Context."""
    if not trace.get_current_span().get_span_context().is_valid:
        return fields
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return {**fields, **carrier}


@contextmanager
def traced(fields: Fields) -> Generator[None]:
    """Have the span of a message be the current one in the block; one that cannot be read is left out."""
    carrier = {
        name: text
        for name in _NAMES
        if isinstance(text := fields.get(name), str) and len(text) <= _MAX_CHARACTERS
    }
    if not carrier:
        yield
        return
    token = context.attach(_PROPAGATOR.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)
