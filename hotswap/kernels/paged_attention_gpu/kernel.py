"""The Triton kernels of `paged_attention_gpu`: attention over KV blocks, its sum over splits, and `append`.

A program of `attend_kernel` computes the query heads of one KV head for a tile of rows of one request, key
block by key block, with an online softmax (FlashAttention-2). The bits of a row depend on its own keys only:
key blocks begin at multiples of `BLOCK_N`, a key block in which a row sees no key leaves its sums as they
are, and the splits of a row (flash-decoding) depend on the row's last key alone. Masked keys get the score
minus infinity and masked values are not read, so KV slots that were never written may hold NaN.
"""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl

from hotswap.kernels.interpreter import dot, narrow, widen

_LOG2_E = tl.constexpr(1.4426950408889634)
_NONE = tl.constexpr(float("-inf"))


@triton.jit
def _finite(largest):
    """Return the number to subtract from scores before `exp2`: no score at all is no NaN."""
    return tl.where(largest == _NONE, 0.0, largest)


@triton.jit
def _span(last, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Return the keys of a split: `SPLIT`, or a multiple if a row would have more than `MOST_SPLITS`."""
    return SPLIT * tl.cdiv(last, SPLIT * MOST_SPLITS)


@triton.jit
def _result(total, weight, largest, sink):
    """Divide the sum of values by the sum of weights, to which a sink adds its own; zeros without keys."""
    most = _finite(tl.maximum(largest, sink))
    factor = tl.exp2(largest - most)
    weight = weight * factor + tl.exp2(sink - most)
    return tl.where(weight == 0.0, 0.0, total * factor / tl.where(weight == 0.0, 1.0, weight))


@triton.jit
def _sinks(sink_ptr, head, wanted, HAS_SINKS: tl.constexpr):
    if HAS_SINKS:
        return widen(tl.load(sink_ptr + head, mask=wanted, other=0.0)) * _LOG2_E
    else:
        return head * 0.0 + _NONE


@triton.jit(do_not_specialize=["num_keys", "mask_row", "word_row"])
def pack_kernel(
    mask_ptr, word_ptr, first_ptr, last_ptr, num_keys, mask_row, word_row, BLOCK_WORDS: tl.constexpr
):
    """Pack a mask into words of 32 keys, and find the first and the last visible key; grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    rw = tl.arange(0, BLOCK_WORDS)
    rb = tl.arange(0, 32)
    first = num_keys
    last = 0
    for start in range(0, word_row, BLOCK_WORDS):
        position = (start + rw)[:, None] * 32 + rb[None, :]
        seen = tl.load(mask_ptr + row * mask_row + position, mask=position < num_keys, other=0) != 0
        words = tl.sum(seen.to(tl.uint32) << rb.to(tl.uint32)[None, :], 1)
        tl.store(word_ptr + row * word_row + start + rw, words.to(tl.uint32), mask=start + rw < word_row)
        first = tl.minimum(first, tl.min(tl.where(seen, position, num_keys)))
        last = tl.maximum(last, tl.max(tl.where(seen, position + 1, 0)))
    tl.store(first_ptr + row, tl.minimum(first, last))
    tl.store(last_ptr + row, last)


@triton.jit(do_not_specialize=["table_row", "visible_row", "num_splits"])
def attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    part_ptr,
    stat_ptr,
    sink_ptr,
    table_ptr,
    tile_ptr,
    visible_ptr,
    first_ptr,
    last_ptr,
    scale,
    cap,
    query_row,
    query_head,
    table_row,
    visible_row,
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`out[row, head] = softmax(scale * query . keys) @ values` over the visible keys of the row's request.

    Grid: (tiles, KV heads, splits). A tile is (request, first row, rows); without rows it is padding. `WHOLE`
    programs compute all keys of a tile; others, whose tiles have one row, store the sum of values (`part`),
    the largest score and the sum of weights (`stat`) of a split for `sum_kernel`.
    """
    tile = tile_ptr + tl.program_id(0) * 3
    num_rows = tl.load(tile + 2)
    if num_rows == 0:
        return
    table_at = table_ptr + tl.load(tile).to(tl.int64) * table_row
    first_row = tl.load(tile + 1)
    kv_head = tl.program_id(1)
    rm = tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    rv = tl.arange(0, BLOCK_V)
    in_tile = rm // GROUP < num_rows
    row = (first_row + rm // GROUP).to(tl.int64)
    head = kv_head * GROUP + rm % GROUP
    last = tl.max(tl.load(last_ptr + row, mask=in_tile, other=0), 0)
    first = tl.min(tl.load(first_ptr + row, mask=in_tile, other=last), 0)
    begin = first // BLOCK_N * BLOCK_N
    end = last
    if not WHOLE:
        span = _span(last, SPLIT, MOST_SPLITS)
        begin = tl.maximum(begin, tl.program_id(2) * span)
        end = tl.minimum(end, tl.program_id(2) * span + span)
        if begin >= end:
            return
    query_at = query_ptr + row * query_row + head.to(tl.int64) * query_head
    query = tl.load(
        query_at[:, None] + rk[None, :], mask=in_tile[:, None] & (rk < KEY_DIM)[None, :], other=0.0
    )
    key_at = key_ptr + rk[None, :]
    value_at = value_ptr + rv[None, :]
    if ROWS == 1:
        shown_at = visible_ptr + first_row.to(tl.int64) * visible_row
    else:
        shown_at = visible_ptr + row * visible_row
    largest = tl.full((BLOCK_M,), _NONE, tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + rn
        inside = position < end
        block = tl.load(table_at + position // BLOCK_TOKENS, mask=inside, other=0)
        slot = (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_TOKENS + position % BLOCK_TOKENS
        if ROWS == 1:
            words = tl.load(shown_at + position // 32, mask=inside, other=0)
            wanted = ((words >> (position % 32)) & 1) != 0
            visible = wanted[None, :] & in_tile[:, None]
        else:
            words = tl.load(shown_at + start // 32, mask=in_tile, other=0)[:, None]
            if BLOCK_N > 32:
                others = tl.load(shown_at + start // 32 + 1, mask=in_tile, other=0)[:, None]
                words = tl.where((rn < 32)[None, :], words, others)
            visible = ((words >> (position % 32)[None, :]) & 1) != 0
            wanted = tl.max(visible.to(tl.int32), 0) != 0
        if BLOCK_K == KEY_DIM:
            key = tl.load(key_at + slot[:, None] * KEY_DIM, mask=inside[:, None], other=0.0)
        else:
            here = inside[:, None] & (rk < KEY_DIM)[None, :]
            key = tl.load(key_at + slot[:, None] * KEY_DIM, mask=here, other=0.0)
        scores = dot(query, tl.trans(key), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * scale
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right for infinite exponentials too.
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E) / cap) + 1.0))
        scores = tl.where(visible, scores * _LOG2_E, _NONE)
        most = tl.maximum(largest, tl.max(scores, 1))
        factor = tl.exp2(largest - _finite(most))
        weights = tl.exp2(scores - _finite(most)[:, None])
        weight = weight * factor + tl.sum(weights, 1)
        largest = most
        if BLOCK_V == VALUE_DIM:
            value = tl.load(value_at + slot[:, None] * VALUE_DIM, mask=wanted[:, None], other=0.0)
        else:
            here = wanted[:, None] & (rv < VALUE_DIM)[None, :]
            value = tl.load(value_at + slot[:, None] * VALUE_DIM, mask=here, other=0.0)
        total = dot(narrow(weights, value.dtype), value, total * factor[:, None])
    stored = in_tile[:, None] & (rv < VALUE_DIM)[None, :]
    heads = KV_HEADS * GROUP
    if WHOLE:
        sink = _sinks(sink_ptr, head, in_tile, HAS_SINKS)
        out = narrow(
            _result(total, weight[:, None], largest[:, None], sink[:, None]), out_ptr.dtype.element_ty
        )
        tl.store(out_ptr + (row * heads + head)[:, None] * VALUE_DIM + rv[None, :], out, mask=stored)
    else:
        place = (tl.program_id(0).to(tl.int64) * heads + head) * num_splits + tl.program_id(2)
        tl.store(part_ptr + place[:, None] * VALUE_DIM + rv[None, :], total, mask=stored)
        tl.store(stat_ptr + place * 2, largest, mask=in_tile)
        tl.store(stat_ptr + place * 2 + 1, weight, mask=in_tile)


@triton.jit(do_not_specialize=["num_splits"])
def sum_kernel(
    part_ptr,
    stat_ptr,
    out_ptr,
    sink_ptr,
    tile_ptr,
    first_ptr,
    last_ptr,
    num_splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Sum the splits of a row and head, in order, into `out[row, head]`; grid: (tiles, heads)."""
    tile = tile_ptr + tl.program_id(0) * 3
    if tl.load(tile + 2) == 0:
        return
    row = tl.load(tile + 1).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(first_ptr + row)
    last = tl.load(last_ptr + row)
    span = _span(last, SPLIT, MOST_SPLITS)
    place = (tl.program_id(0).to(tl.int64) * HEADS + head) * num_splits
    rv = tl.arange(0, BLOCK_V)
    rs = tl.arange(0, MOST_SPLITS)
    # Splits without a visible key were not computed.
    computed = (rs * span < last) & (rs * span + span > first)
    largest = tl.max(tl.load(stat_ptr + (place + rs) * 2, mask=computed, other=_NONE), 0)
    weight = 0.0
    total = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, tl.cdiv(last, tl.maximum(span, 1)), STEP):
        split = start + tl.arange(0, STEP)
        done = (split * span < last) & (split * span + span > first)
        stat_at = stat_ptr + (place + split) * 2
        factor = tl.exp2(tl.load(stat_at, mask=done, other=_NONE) - _finite(largest))
        weight += tl.sum(tl.load(stat_at + 1, mask=done, other=0.0) * factor, 0)
        part_at = part_ptr + (place + split)[:, None] * VALUE_DIM + rv[None, :]
        part = tl.load(part_at, mask=done[:, None] & (rv < VALUE_DIM)[None, :], other=0.0)
        total += tl.sum(part * factor[:, None], 0)
    sink = _sinks(sink_ptr, head, True, HAS_SINKS)
    out = narrow(_result(total, weight, largest, sink), out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * HEADS + head) * VALUE_DIM + rv, out, mask=rv < VALUE_DIM)


@triton.jit
def append_kernel(
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    block_ptr,
    offset_ptr,
    key_head,
    key_row,
    value_head,
    value_row,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """`keys[block[i], :, offset[i]] = key[:, i]`, and the same for values; grid: (rows, KV heads / HEADS)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    block = tl.load(block_ptr + row).to(tl.int64)
    slot = (block * KV_HEADS + head) * BLOCK_TOKENS + tl.load(offset_ptr + row).to(tl.int64)
    rk = tl.arange(0, BLOCK_K)
    rv = tl.arange(0, BLOCK_V)
    head = head.to(tl.int64)[:, None]
    inside = (head < KV_HEADS) & (rk < KEY_DIM)[None, :]
    key = tl.load(key_ptr + row * key_row + head * key_head + rk[None, :], mask=inside, other=0.0)
    tl.store(keys_ptr + slot[:, None] * KEY_DIM + rk[None, :], key, mask=inside)
    inside = (head < KV_HEADS) & (rv < VALUE_DIM)[None, :]
    value = tl.load(value_ptr + row * value_row + head * value_head + rv[None, :], mask=inside, other=0.0)
    tl.store(values_ptr + slot[:, None] * VALUE_DIM + rv[None, :], value, mask=inside)
