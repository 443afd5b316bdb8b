"""Recording of spans in memory, as the trees that they form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from opentelemetry.util.types import AttributeValue

__all__ = ["RecordedSpan", "SpanRecorder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpan:
    """One ended span, with its child spans in the order in which they began.

    `started_s` counts from the earliest span recorded. `links` are the ids of the spans it links to, as
    hexadecimal text like `span_id`. `error` is the description of an error status, empty without one.
    """

    name: str
    span_id: str
    started_s: float
    seconds: float
    attributes: Mapping[str, AttributeValue]
    links: tuple[str, ...] = ()
    error: str = ""
    children: tuple[RecordedSpan, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def walk(self) -> Iterator[RecordedSpan]:
        """Yield this span and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def _lines(self) -> Iterator[str]:
        failed = f"  failed: {self.error}" if self.error else ""
        yield f"{self.name}  {self.seconds:.3f} s{failed}"
        for child in self.children:
            for line in str(child).splitlines():
                yield f"  {line}"


class SpanRecorder:
    """Records the spans of a fleet that is given its `tracer_provider`.

    Only ended spans are recorded. A span whose parent has not ended, or was not recorded here, is a
    root.
    """

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._spans))

    def tree(self) -> list[RecordedSpan]:
        """Return the root spans in the order in which they began."""
        spans = sorted(self._spans.get_finished_spans(), key=_start_ns)
        children: dict[int | None, list[ReadableSpan]] = {}
        known = {_id(span) for span in spans}
        for span in spans:
            parent = span.parent.span_id if span.parent else None
            children.setdefault(parent if parent in known else None, []).append(span)
        zero_ns = _start_ns(spans[0]) if spans else 0

        def children_of(parent: int | None) -> tuple[RecordedSpan, ...]:
            return tuple(
                _recorded(span, zero_ns, children_of(_id(span))) for span in children.get(parent, ())
            )

        return list(children_of(None))

    def named(self, name: str) -> list[RecordedSpan]:
        """Return all spans of a name, parents first."""
        return [span for root in self.tree() for span in root.walk() if span.name == name]

    def of_operation(self, operation: str) -> list[RecordedSpan]:
        """Return all spans of requests, whose names are an operation and a model, parents first."""
        every = (span for root in self.tree() for span in root.walk())
        return [span for span in every if span.attributes.get("gen_ai.operation.name") == operation]

    def clear(self) -> None:
        """Forget what was recorded."""
        self._spans.clear()


def _recorded(span: ReadableSpan, zero_ns: int, children: tuple[RecordedSpan, ...]) -> RecordedSpan:
    failed = span.status.status_code is StatusCode.ERROR
    return RecordedSpan(
        name=span.name,
        span_id=f"{_id(span):016x}",
        started_s=(_start_ns(span) - zero_ns) / 1e9,
        seconds=((span.end_time or 0) - _start_ns(span)) / 1e9,
        attributes=dict(span.attributes or {}),
        links=tuple(f"{link.context.span_id:016x}" for link in span.links),
        error=(span.status.description or "error") if failed else "",
        children=children,
    )


def _id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    return context.span_id if context is not None else 0


def _start_ns(span: ReadableSpan) -> int:
    return span.start_time or 0
