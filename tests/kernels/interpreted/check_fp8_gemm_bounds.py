"""`fp8_gemm` accesses no memory beyond its tensors, which end at inaccessible pages.

Run by `test_interpreted`, because an access out of range crashes the process.
"""

from __future__ import annotations

import pytest
import torch

from hotswap.kernels.fp8_gemm import Fp8Weight, Tile, fp8_linear, fp8_linear_reference, pack
from tests.kernels.fp8_weights import BOUNDS, error, input_of, weight_of
from tests.kernels.interpreted.guard import guarded


@pytest.mark.parametrize("group", [64, None])
@pytest.mark.parametrize(
    ("rows", "columns", "width", "tile"),
    [
        (3, 40, 256, Tile(16, 32, 64)),
        (17, 72, 300, Tile(16, 32, 64, parts=3)),
        (17, 72, 300, Tile(32, 32, 64, parts=2, weights_left=True)),
        (1, 64, 200, Tile(16, 64, 64)),
        (2, 48, 150, Tile(16, 32, 128)),
        (5, 40, 130, Tile(path="dense")),
    ],
)
def test_no_access_is_out_of_range(
    rows: int, columns: int, width: int, tile: Tile, group: int | None
) -> None:
    weight = weight_of(columns, width, group, torch.float16)
    packed = pack(weight)
    held = Fp8Weight(guarded(packed.qweight), guarded(packed.scales), width, group, torch.float16)
    x, bias = (guarded(input_of(n, k, torch.float16)) for n, k in ((rows, width), (1, columns)))
    out = guarded(torch.full((rows, columns), torch.nan, dtype=torch.float16))
    fp8_linear(x, held, bias[0], tile=tile, out=out)
    assert error(out, fp8_linear_reference(x, weight, bias[0])) <= 1.2 * BOUNDS[torch.float16]
