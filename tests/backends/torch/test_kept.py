"""Memory for what decodes keep: lent within its limit, and taken back whole."""

from __future__ import annotations

import pytest

from hotswap.backends.torch.kept import Lender


@pytest.mark.parametrize(("room_bytes", "limit_bytes"), [(-5, 0), (0, 0), (400, 400), (5000, 1000)])
def test_no_more_is_lent_than_there_is_room_for_and_never_more_than_at_first(
    room_bytes: int, limit_bytes: int
) -> None:
    lender = Lender(1000, 16)
    lender.fit(room_bytes)
    assert lender.limit_bytes == limit_bytes
    assert not lender.take([limit_bytes + 1])
    assert len(lender.take([limit_bytes])) == 1


def test_of_several_buffers_all_are_lent_or_none() -> None:
    lender = Lender(100, 16)
    assert not lender.take([60, 60])
    assert len(lender.take([100])) == 1, "and those that there was room for came back"


def test_idle_buffers_of_another_size_make_room() -> None:
    lender = Lender(1000, 16)
    for _ in range(3):
        lender.put(lender.take([300]))
        lender.put(lender.take([900]))
        assert lender.used_bytes <= 1000


def test_a_buffer_that_is_far_too_large_is_not_lent_while_there_is_room() -> None:
    lender = Lender(1000, 16)
    large, middle = lender.take([500, 200])
    lender.put([large, middle])
    assert lender.take([150])[0] is middle, "the smallest that is large enough"
    assert lender.take([100])[0] is not large
    assert lender.take([400])[0] is large
