"""The two Triton kernels of `segmented_lora`: shrink (input to ranks) and expand (ranks to output).

A program of the first computes one *item*, a tile of rows of one adapter and a few pages of its ranks, over a
part of the input's width; a program of the second computes one tile and a block of output columns. The second
kernel sums the parts in order, so results have the same bits in every run, without atomics and without
clearing buffers. Values that depend on the mix of adapters are read from the plan, one int32 tensor, or are
arguments that are not specialised on: a new mix compiles nothing. Offsets that are multiples of a block or a
page are passed in blocks or pages, because Triton uses wide loads only if it knows the alignment.
"""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl

from hotswap.kernels.interpreter import dot, narrow, widen


@triton.jit
def _places(pages_ptr, ranks, wanted):
    """Return the pool rows of an adapter's ranks; `pages_ptr` points to its page numbers."""
    page = tl.load(pages_ptr + ranks // 16, mask=wanted, other=0)
    return page.to(tl.int64) * 16 + ranks % 16


@triton.jit
def _sum_of_parts(part_at, step, num_parts, wanted):
    total = tl.zeros(wanted.shape, tl.float32)
    for _ in range(0, num_parts):
        total += tl.load(part_at, mask=wanted, other=0.0)
        part_at += step
    return total


@triton.jit(do_not_specialize=["h_part_pages", "h_slice_pages", "item_at", "row_at", "part_steps"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    h_ptr,
    plan_ptr,
    item_at,
    row_at,
    width_in,
    part_steps,
    x_row,
    a_slice,
    a_row,
    h_part_pages,
    h_slice_pages,
    h_row,
    BLOCK_M: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`h[part, slice, position, rank] = sum over the part's k of x[row of position, k] * A[slice, rank, k]`.

    Grid: (items, parts of the width, slices). An item is (first position, rows, offset of its pages in the
    plan, pages, first rank); an item without rows is padding.
    """
    item = plan_ptr + item_at + tl.program_id(0) * 5
    num_rows = tl.load(item + 1)
    if num_rows == 0:
        return
    part = tl.program_id(1)
    piece = tl.program_id(2).to(tl.int64)
    first = tl.load(item)
    page_at = tl.load(item + 2)
    num_pages = tl.load(item + 3)
    column = tl.load(item + 4)
    rm = tl.arange(0, BLOCK_M)
    rr = tl.arange(0, PAGES * 16)
    rk = tl.arange(0, BLOCK_K)
    in_rows = rm < num_rows
    in_ranks = rr // 16 < num_pages
    row = tl.load(plan_ptr + row_at + first + rm, mask=in_rows, other=0)
    rank = _places(plan_ptr + page_at, rr, in_ranks)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_row
    a_at = a_ptr + piece * a_slice + rank[None, :] * a_row
    total = tl.zeros((BLOCK_M, PAGES * 16), tl.float32)
    start = part * part_steps * BLOCK_K  # written so that Triton knows it is a multiple of BLOCK_K
    stop = tl.minimum(start + part_steps * BLOCK_K, width_in)
    for k in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_at + (k + rk)[None, :], mask=in_rows[:, None], other=0.0)
            a = tl.load(a_at + (k + rk)[:, None], mask=in_ranks[None, :], other=0.0)
        else:
            inside = k + rk < width_in
            x = tl.load(x_at + (k + rk)[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_at + (k + rk)[:, None], mask=in_ranks[None, :] & inside[:, None], other=0.0)
        total = dot(x, a, total)
    position = (first + rm).to(tl.int64)
    plane = part.to(tl.int64) * h_part_pages + piece * h_slice_pages
    h_at = h_ptr + plane * 16 + position[:, None] * h_row
    tl.store(h_at + (column + rr)[None, :], total, mask=in_rows[:, None] & in_ranks[None, :])


@triton.jit(
    do_not_specialize=["h_part_pages", "h_slice_pages", "tile_at", "row_at", "block_at", "shift", "num_parts"]
)
def expand_kernel(
    h_ptr,
    b_ptr,
    y_ptr,
    plan_ptr,
    block_ptr,
    tile_at,
    row_at,
    block_at,
    shift,
    num_parts,
    h_part_pages,
    h_slice_pages,
    h_row,
    b_row,
    y_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """`y[row of position, n] += scale * sum over ranks of h[slice of n, position, rank] * B[rank, n]`.

    Grid: (column blocks, tiles). A tile is (first position, rows, offset of its pages in the plan, pages,
    bits of the scale); a column block is (slice, column of B, column of y, columns). `shift` is subtracted
    from the columns of y.
    """
    tile = plan_ptr + tile_at + tl.program_id(1) * 5
    num_rows = tl.load(tile + 1)
    if num_rows == 0:
        return
    first = tl.load(tile)
    page_at = tl.load(tile + 2)
    num_pages = tl.load(tile + 3)
    scale = tl.load(tile + 4).to(tl.float32, bitcast=True)
    block = block_ptr + (block_at + tl.program_id(0)) * 4
    piece = tl.load(block).to(tl.int64)
    b_column = tl.multiple_of(tl.load(block + 1), 16)
    y_column = tl.load(block + 2) - shift
    num_columns = tl.load(block + 3)
    if ALIGNED:
        y_column = tl.multiple_of(y_column, 16)
        num_columns = tl.multiple_of(num_columns, 16)
    rm = tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    rr = tl.arange(0, PAGES * 16)
    in_rows = rm < num_rows
    h_at = h_ptr + piece * h_slice_pages * 16 + (first + rm).to(tl.int64)[:, None] * h_row
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for p in range(0, num_pages, PAGES):
        in_ranks = p + rr // 16 < num_pages
        rank = _places(plan_ptr + page_at + p, rr, in_ranks)
        wanted = in_rows[:, None] & in_ranks[None, :]
        h = _sum_of_parts(h_at + (p * 16 + rr)[None, :], h_part_pages * 16, num_parts, wanted)
        # The pool is padded to whole blocks: no column needs a mask.
        b = tl.load(
            b_ptr + rank[:, None] * b_row + (b_column + rn)[None, :], mask=in_ranks[:, None], other=0.0
        )
        total = dot(narrow(h, b_ptr.dtype.element_ty), b, total)
    row = tl.load(plan_ptr + row_at + first + rm, mask=in_rows, other=0)
    y_at = y_ptr + row.to(tl.int64)[:, None] * y_row + (y_column + rn)[None, :]
    inside = in_rows[:, None] & (rn < num_columns)[None, :]
    before = widen(tl.load(y_at, mask=inside, other=0.0))
    tl.store(y_at, narrow(before + total * scale, y_ptr.dtype.element_ty), mask=inside)
