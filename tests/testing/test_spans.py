"""Spans in memory: the tree, the times and the links are those that were made."""

from __future__ import annotations

import anyio
import pytest

from hotswap.offline.virtual_time import virtual_time
from hotswap.telemetry import Telemetry
from hotswap.testing.spans import SpanRecorder


@virtual_time
async def test_the_tree_is_as_the_spans_were() -> None:
    recorder = SpanRecorder()
    telemetry = Telemetry(tracer_provider=recorder.tracer_provider)
    with telemetry.span("swap", {"hotswap.instance": "e0"}) as swap:
        await anyio.sleep(1)
        with telemetry.span("evict", parent=swap):
            await anyio.sleep(2)
        with telemetry.span("load", parent=swap):
            await anyio.sleep(3)
    with pytest.raises(ZeroDivisionError), telemetry.span("hop", links=[swap.get_span_context()]):
        raise ZeroDivisionError("by zero")

    root, hop = recorder.tree()
    assert root.name == "swap"
    assert root.attributes == {"hotswap.instance": "e0"}
    assert [child.name for child in root.children] == ["evict", "load"]
    assert [child.started_s for child in root.children] == pytest.approx([1, 3])
    assert [span.seconds for span in root.walk()] == pytest.approx([6, 2, 3])
    assert hop.links == (root.span_id,)
    assert hop.error == "ZeroDivisionError: by zero"
    assert str(root) == "swap  6.000 s\n  evict  2.000 s\n  load  3.000 s"
    assert recorder.named("load") == [root.children[1]]


@virtual_time
async def test_a_span_whose_parent_goes_on_is_a_root() -> None:
    recorder = SpanRecorder()
    telemetry = Telemetry(tracer_provider=recorder.tracer_provider)
    with telemetry.span("outer") as outer:
        with telemetry.span("inner", parent=outer):
            pass
        assert [span.name for span in recorder.tree()] == ["inner"]
    assert [span.name for span in recorder.tree()] == ["outer"]
    recorder.clear()
    assert recorder.tree() == []
