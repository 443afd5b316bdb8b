"""The rows of a step attend to exactly the keys of the model's own mask."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotswap.backends.torch.attention import MaskFunction, MaskPattern
from hotswap.backends.torch.forward import Piece, assemble
from hotswap.backends.torch.kv import KVCache, blocks_for

PIECES = st.lists(st.tuples(st.integers(0, 40), st.sampled_from((1, 1, 1, 2, 20))), min_size=1, max_size=5)
PATTERNS: dict[str, MaskFunction] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: q - k < 5,
    "chunks": lambda b, h, q, k: q // 8 == k // 8,
    "holes": lambda b, h, q, k: (q == k) | (k % 3 > 0),
    "holes_for_some": lambda b, h, q, k: (q >= 12) | (q == k) | (k % 2 > 0),
}


@given(PIECES, st.sampled_from(sorted(PATTERNS)))
def test_rows_attend_to_the_keys_of_the_mask(spans: list[tuple[int, int]], name: str) -> None:
    function = PATTERNS[name]
    cache = KVCache(40, 16, torch.device("cpu"))
    pieces = [Piece([1] * m, start, [1] * blocks_for(start + m, 16), True) for start, m in spans]
    paged = assemble(pieces, cache, invariant=True).step.paged
    assert paged is not None
    seen = MaskPattern(function).seen(paged)
    positions = list(chain.from_iterable(range(start, start + m) for start, m in spans))
    assert len(seen.firsts) == len(positions)
    for row, position in enumerate(positions):
        keys = torch.arange(position + 1)
        none = torch.zeros((), dtype=torch.long)
        expected: Tensor = function(none, none, torch.tensor(position), keys)
        shown = torch.zeros(position + 1, dtype=torch.bool)
        shown[seen.firsts[row] : seen.lasts[row]] = True
        if seen.hidden is not None:
            assert seen.hidden.shape[1] >= int(seen.lasts.max()), "the kernel would read beyond it"
            shown &= ~seen.hidden[row, : position + 1]
        assert torch.equal(shown, expected)


def test_windows_and_chunks_need_no_mask_within_their_key_range() -> None:
    cache = KVCache(8, 16, torch.device("cpu"))
    pieces = [Piece([1] * 20, 10, [1, 2], True), Piece([1], 5, [3], True)]
    paged = assemble(pieces, cache, invariant=True).step.paged
    assert paged is not None
    hidden = {name: MaskPattern(function).seen(paged).hidden for name, function in PATTERNS.items()}
    assert [name for name, mask in hidden.items() if mask is not None] == ["holes", "holes_for_some"]
