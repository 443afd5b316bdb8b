"""The kernels of `paged_attention_gpu` in Triton's interpreter, against float64; run by `test_interpreted`.

Uninitialized memory is NaN here, and so are the KV slots without a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.paged_attention_gpu import Rows, Visible, append, attend, has_kernels
from hotswap.kernels.paged_attention_gpu.reference import attend_reference
from tests.kernels.interpreted.guard import guarded
from tests.kernels.paged_rows import MASKS, TOLERANCE, Layer, Step, make_step, relative_error

CPU = torch.device("cpu")
LAYERS = {
    "llama": Layer(),
    "capped": Layer(heads=9, kv_heads=3, softcap=2.0),
    "sinks": Layer(has_sinks=True, heads=6),
    "unequal": Layer(heads=4, kv_heads=4, key_dim=48, value_dim=20),
    "one KV head": Layer(heads=20, kv_heads=1, key_dim=16, value_dim=24, block_tokens=48),
    "wide": Layer(heads=3, kv_heads=1, key_dim=136, value_dim=80),
}
# A prompt of several tiles, the continuation of another, decodes of one to three splits, and padding.
PIECES = ((0, 20), (30, 10), (3, 1), (299, 1), (0, 1), (580, 1))
PADDING = (3, 2, 1)


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills the memory of `torch.empty`
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply each row alike: the BLAS of some CPUs sums by a row's place in a tile."""

    def multiply(left: Any, right: Any, dtype: Any = None) -> Any:
        return np.einsum("mk,kn->mn", left, right, dtype=dtype, optimize=False)

    monkeypatch.setattr(np, "matmul", multiply)


def run(step: Step, rows: Rows | None = None) -> Tensor:
    return attend(
        step.queries,
        step.keys,
        step.values,
        rows or step.rows,
        step.form,
        scale=step.layer.key_dim**-0.5,
        softcap=step.layer.softcap,
        sinks=step.sinks,
    )


def right(step: Step) -> Tensor:
    return attend_reference(
        step.queries,
        step.keys,
        step.values,
        step.rows,
        step.visible,
        scale=step.layer.key_dim**-0.5,
        softcap=step.layer.softcap,
        sinks=step.sinks,
    )


def compare(step: Step) -> Tensor:
    expected, found = right(step), run(step)
    assert expected.isfinite().all()
    error = relative_error(found, expected)
    assert error <= TOLERANCE[step.layer.dtype], f"relative error {error:.2e}"
    return found


def test_the_interpreter_runs_them() -> None:
    assert has_kernels(CPU)


# All layers with one mask, and all masks with one layer: the interpreter is slow.
@pytest.mark.parametrize(
    ("name", "mask"),
    [*((name, "causal") for name in LAYERS), *(("llama", mask) for mask in MASKS if mask != "causal")],
)
def test_every_row_gets_the_weighted_sum_of_its_values(name: str, mask: str) -> None:
    step = make_step(LAYERS[name], PIECES, mask=mask, padding=PADDING)
    blind = ~step.visible.any(1)
    assert not compare(step)[blind].any(), "a row without keys is zero"


@pytest.mark.parametrize("name", ["llama", "unequal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_not_rounded(dtype: torch.dtype, name: str) -> None:
    compare(make_step(replace(LAYERS[name], dtype=dtype), PIECES, padding=PADDING))


@settings(max_examples=12, deadline=None)
@given(
    heads=st.sampled_from([(4, 4), (6, 2), (7, 1), (40, 1)]),
    dims=st.tuples(st.integers(3, 70), st.integers(3, 70)),
    block_tokens=st.sampled_from([1, 4, 16, 24]),
    pieces=st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 2, 9])), min_size=1, max_size=4),
    mask=st.sampled_from(list(MASKS)),
    softcap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 9),
)
def test_steps_of_any_shape(
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_tokens: int,
    pieces: list[tuple[int, int]],
    mask: str,
    softcap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    layer = Layer(*heads, *dims, block_tokens, dtype, softcap, has_sinks)
    compare(make_step(layer, pieces, mask=mask, seed=seed, padding=(seed % 3, seed % 2, seed % 4)))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("mask", ["window", "first and last", "blind"])
def test_slots_that_no_row_of_a_request_sees_may_hold_anything(mask: str, poison: float) -> None:
    """Before a window, and in a gap between visible keys too."""
    pieces = ((50, 8), (90, 1), (299, 1), (20, 16))
    step, row = make_step(LAYERS["llama"], pieces, mask=mask), 0
    for number, (before, count) in enumerate(pieces):
        unseen = (~step.visible[row : row + count].any(0)).nonzero()[:, 0]
        unseen = unseen[unseen < before + count]
        blocks = step.rows.tables[number].long()[unseen // 16]
        step.keys[blocks, :, unseen % 16] = float("nan")  # numpy warns of products of infinities
        step.values[blocks, :, unseen % 16] = poison
        row += count
    compare(step)


@pytest.mark.usefixtures("_products_by_row")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_bits_depend_on_no_other_row(mask: str, dtype: torch.dtype) -> None:
    """A request alone, beside longer and shorter ones, and in another order, has the same bits."""
    layer = replace(LAYERS["sinks"], dtype=dtype)
    pieces = ((130, 1), (250, 20), (5, 1), (1100, 1), (0, 33))
    step = make_step(layer, pieces, mask=mask)
    together, row = run(step), 0
    for number, (before, count) in enumerate(pieces):
        own = slice(row, row + count)
        singles, tiles = (kept[kept[:, 0] == number] for kept in (step.rows.singles, step.rows.tiles))
        shift = torch.tensor([number, row, 0], dtype=torch.int32)
        alone = replace(
            step,
            queries=step.queries[own],
            visible=step.visible[own, : before + count],
            rows=Rows(step.rows.tables[number : number + 1], singles - shift, tiles - shift, False),
        )
        assert torch.equal(run(alone), together[own])
        row += count
    assert torch.equal(run(step), together)


@pytest.mark.usefixtures("_products_by_row")
def test_a_prompt_in_other_tiles_has_the_same_bits() -> None:
    step = make_step(LAYERS["llama"], ((20, 23),), mask="window")
    whole = run(step)
    for cut in (1, 5, 7):
        tiles = torch.tensor([[0, 0, cut], [0, cut, 8 - cut], [0, 8, 8], [0, 16, 7]], dtype=torch.int32)
        assert torch.equal(run(step, replace(step.rows, tiles=tiles)), whole)


@pytest.mark.parametrize("num_keys", [1, 31, 64, 65, 2048, 2100])
def test_masks_are_packed(num_keys: int) -> None:
    mask = torch.rand(7, num_keys) < 0.01
    mask[0], mask[1], mask[2, -1] = False, True, True
    form = Visible.of(guarded(mask.view(torch.uint8)).view(torch.bool))
    assert form.num_keys >= num_keys
    bits = (form.words[:, :, None] >> torch.arange(32)) & 1
    assert torch.equal(bits.flatten(1)[:, :num_keys].bool(), mask)
    assert not bits.flatten(1)[:, num_keys:].any()
    for row, first, last in zip(mask, form.first.tolist(), form.last.tolist(), strict=True):
        seen = row.nonzero()[:, 0].tolist()
        assert (first, last) == ((seen[0], seen[-1] + 1) if seen else (0, 0))
    assert not len(Visible.of(mask[:0]).words)


def test_very_long_rows_have_longer_splits() -> None:
    layer = Layer(heads=1, kv_heads=1, key_dim=16, value_dim=16, block_tokens=64)
    compare(make_step(layer, ((16_384, 1), (16_383, 1), (700, 1))))


def test_rows_in_no_tile_are_zero() -> None:
    step = make_step(LAYERS["llama"], ((40, 1), (0, 20)), padding=(5, 0, 0))
    assert not run(step)[-5:].any()
    empty = Rows(step.rows.tables, step.rows.singles[:0], step.rows.tiles[:0])
    assert not run(step, empty).any()


def test_a_step_with_one_mask_serves_other_numbers() -> None:
    """Only shapes decide what is launched: a wider mask, and tiles as padding, change no bits."""
    step = make_step(LAYERS["capped"], ((40, 1), (100, 1), (7, 12)))
    wide = replace(step, visible=torch.nn.functional.pad(step.visible, (0, 2000)))
    assert torch.equal(run(wide), run(step))


def test_queries_may_be_slices_of_a_projection() -> None:
    step = make_step(LAYERS["llama"], ((10, 1), (0, 20)))
    fused = torch.full((21, 8 * 32 + 64), float("nan"))
    fused[:, : 8 * 32] = step.queries.flatten(1)
    sliced = replace(step, queries=fused[:, : 8 * 32].view(21, 8, 32))
    assert torch.equal(run(sliced), run(step))


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_outside_the_tensors_is_read_or_written(name: str) -> None:
    step = make_step(LAYERS[name], PIECES, padding=(0, 1, 1), spare=0)
    expected = right(step)
    form = step.form
    held = Visible(*(guarded(part) for part in (form.words, form.first, form.last)))
    tables, singles, tiles = map(guarded, (step.rows.tables, step.rows.singles, step.rows.tiles))
    rows = Rows(tables, singles, tiles, False)
    sinks = None if step.sinks is None else guarded(step.sinks)
    found = attend(
        guarded(step.queries.contiguous()),
        guarded(step.keys),
        guarded(step.values),
        rows,
        held,
        scale=step.layer.key_dim**-0.5,
        softcap=step.layer.softcap,
        sinks=sinks,
    )
    assert relative_error(found, expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_keys_and_values_are_written_to_their_slots_alone(name: str, dtype: torch.dtype) -> None:
    layer, count = LAYERS[name], 9
    shape = (5, layer.kv_heads, layer.block_tokens)
    dims = (layer.key_dim, layer.value_dim)
    keys, values = (guarded(torch.randn(*shape, dim).to(dtype)) for dim in dims)
    key, value = (guarded(torch.randn(count, layer.kv_heads, dim).to(dtype)).transpose(0, 1) for dim in dims)
    expected = keys.clone(), values.clone()
    slots = torch.randperm(5 * layer.block_tokens)[:count]
    blocks, offsets = slots // layer.block_tokens, slots % layer.block_tokens
    for pool, part in zip(expected, (key, value), strict=True):
        pool[blocks, :, offsets] = part.transpose(0, 1)
    append(key, value, keys, values, guarded(blocks), guarded(offsets.int()))
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    append(key[:, :0], value[:, :0], keys, values, blocks[:0], offsets[:0])


def test_arguments_that_do_not_match_are_refused() -> None:
    step = make_step(LAYERS["llama"], ((10, 1),))
    for wrong in (
        replace(step, keys=step.keys.half()),
        replace(step, queries=step.queries[:, :3]),
        replace(step, queries=step.queries[:, :, :16]),
        replace(step, values=step.values[1:]),
        replace(step, keys=step.keys.transpose(0, 1)),
    ):
        with pytest.raises(ConfigError):
            run(wrong)
    with pytest.raises(ConfigError, match="int32"):
        replace(step.rows, tables=step.rows.tables.long())
    with pytest.raises(ConfigError, match="three numbers"):
        replace(step.rows, tiles=step.rows.tables)
