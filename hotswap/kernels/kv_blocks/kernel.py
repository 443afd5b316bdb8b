"""The Triton kernel of `kv_blocks`: copies blocks of many tensors to rows of one buffer, or back."""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_words", "num_chunks"])
def move_kernel(
    table_ptr,
    block_ptr,
    staging_ptr,
    row_words,
    num_chunks,
    TO_STAGING: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`staging[i, at : at + words] <-> pool[block[i]]`, for every pool of the table.

    Grid: (blocks * chunks of a block, pools). A pool is (address, words of a block, its offset in a row of
    the staging buffer). Words have four bytes if all of these are multiples of 16 bytes, else one. A block of
    -1 is skipped.
    """
    i = tl.program_id(0) // num_chunks
    chunk = tl.program_id(0) % num_chunks
    block = tl.load(block_ptr + i).to(tl.int64)
    if block < 0:
        return
    entry = table_ptr + tl.program_id(1) * 3
    words = tl.load(entry + 1)
    at = tl.load(entry + 2)
    row = i.to(tl.int64) * row_words
    if WIDE:
        # Alignment hints for values that Triton cannot infer, so that each thread copies 16 bytes at once.
        pool = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int32)), 16)
        words = tl.multiple_of(words, 4)
        at = tl.multiple_of(at, 4)
        row = tl.multiple_of(row, 4)
    else:
        pool = tl.load(entry).to(tl.pointer_type(tl.uint8))
    offset = chunk * WORDS + tl.arange(0, WORDS)
    inside = offset < words
    here = pool + block * words + offset
    there = staging_ptr + row + at + offset
    if TO_STAGING:
        tl.store(there, tl.load(here, mask=inside, other=0), mask=inside)
    else:
        tl.store(here, tl.load(there, mask=inside, other=0), mask=inside)
