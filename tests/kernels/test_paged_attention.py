"""`paged_attention`: its results, and that the bits of a row do not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.paged_attention import DTYPES, Rows, Seen, append, attend, call, compile_for
from hotswap.kernels.paged_attention.reference import attend_reference

ALL_DTYPES = sorted(DTYPES, key=str)
DIMS = [(8, 8), (16, 16), (24, 24), (64, 64), (80, 80), (128, 128), (192, 128), (20, 65)]
NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a step and of its pools."""

    dims: tuple[int, int] = (64, 64)
    kv_heads: int = 2
    group: int = 2
    block_tokens: int = 16
    dtype: torch.dtype = torch.bfloat16
    tile: int = 4
    prompts: tuple[tuple[int, int], ...] = ((40, 6),)  # of each request: positions, and rows at their end
    padding: int = 3
    window: int | None = None
    hidden: bool = False
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """The arguments of `attend`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    rows: Rows
    seen: Seen
    options: dict[str, Any]

    def result(self) -> Tensor:
        return attend(self.queries, self.keys, self.values, self.rows, self.seen, **self.options)

    def reference(self) -> Tensor:
        return attend_reference(self.queries, self.keys, self.values, self.rows, self.seen, **self.options)


def _ints(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def tiles_of(prompts: tuple[tuple[int, int], ...], most: int) -> Tensor:
    """Return tiles of at most `most` rows, for requests with consecutive rows."""
    tiles, at = [], 0
    for request, (_, count) in enumerate(prompts):
        tiles += [(request, at + start, min(most, count - start)) for start in range(0, count, most)]
        at += count
    return _ints(tiles).view(-1, 3)


def make(shape: Shape, seed: int = 0) -> Case:
    """Return a random case, with blocks and rows in random order."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    counts = [-(-positions // shape.block_tokens) for positions, _ in shape.prompts]
    free = random.sample(range(sum(counts) + 2), sum(counts))
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for request, count in enumerate(counts):
        tables[request, :count] = _ints([free.pop() for _ in range(count)])
    lasts = [p - n + i + 1 for p, n in shape.prompts for i in range(n)]
    firsts = [0 if shape.window is None else max(0, last - shape.window) for last in lasts]
    hidden = None
    if shape.hidden:
        hidden = torch.rand(len(lasts), max(counts) * shape.block_tokens, generator=generator) < 0.4
        hidden[torch.arange(len(lasts)), torch.tensor(lasts) - 1] = False
    heads, total = shape.kv_heads * shape.group, len(lasts) + shape.padding
    pools = [
        torch.randn(sum(counts) + 2, shape.kv_heads, shape.block_tokens, dim, generator=generator)
        for dim in shape.dims
    ]
    return Case(
        torch.randn(total, heads, shape.dims[0], generator=generator),
        pools[0].to(shape.dtype),
        pools[1].to(shape.dtype),
        Rows(tables, tiles_of(shape.prompts, shape.tile), _ints(random.sample(range(total), len(lasts)))),
        Seen(_ints(firsts), _ints(lasts), hidden),
        {
            "scale": shape.dims[0] ** -0.5,
            "softcap": shape.softcap,
            "sinks": torch.randn(heads, generator=generator) if shape.sinks else None,
        },
    )


PROMPTS = st.lists(
    st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(n, 20)))),
    min_size=1,
    max_size=4,
).map(tuple)
SHAPES = st.builds(
    Shape,
    dims=st.sampled_from(DIMS),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    block_tokens=st.sampled_from([16, 32]),
    dtype=st.sampled_from(ALL_DTYPES),
    tile=st.integers(1, 16),
    prompts=PROMPTS,
    padding=st.integers(0, 3),
    window=st.none() | st.integers(1, 40),
    hidden=st.booleans(),
    softcap=st.none() | st.sampled_from([0.5, 5.0, 50.0]),
    sinks=st.booleans(),
)
# All features at once, for the tests of invariance.
RICH = Shape(
    dims=(80, 24),
    group=3,
    prompts=((70, 18), (33, 1), (50, 7)),
    window=37,
    hidden=True,
    softcap=5.0,
    sinks=True,
)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for dtype in ALL_DTYPES:
        compile_for(dtype)


def _near(found: Tensor, right: Tensor) -> None:
    """Assert equality within a few ulps, for sums of elements of about 1."""
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=2e-6)


@given(SHAPES, st.integers(0, 1000))
@settings(max_examples=250, deadline=None)
def test_it_is_softmax_attention(shape: Shape, seed: int) -> None:
    case = make(shape, seed)
    found = case.result()
    _near(found, case.reference())
    padding = torch.ones(len(found), dtype=torch.bool)
    padding[case.rows.order.long()] = False
    assert not found[padding].any()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_width_and_dtype(dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = make(Shape(dims=dims, dtype=dtype, group=7, prompts=((100, 9), (17, 1))))
    _near(case.result(), case.reference())


def test_long_rows_and_large_scores() -> None:
    case = make(Shape(dtype=torch.float32, prompts=((3000, 2),)))
    case = replace(case, queries=case.queries * 30)
    torch.testing.assert_close(case.result().double(), case.reference(), rtol=1e-4, atol=3e-5)


@given(SHAPES, st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_a_row_has_the_same_bits_in_any_tile(shape: Shape, seed: int) -> None:
    case = make(shape, seed)
    alone = replace(case, rows=replace(case.rows, tiles=tiles_of(shape.prompts, 1)))
    assert torch.equal(case.result(), alone.result())


@pytest.mark.parametrize("most", range(1, 17))
def test_every_size_of_a_tile(most: int) -> None:
    case = make(RICH)
    tiles = tiles_of(RICH.prompts, most)[torch.randperm(len(tiles_of(RICH.prompts, most)))]
    cut = replace(case, rows=replace(case.rows, tiles=tiles.contiguous()))
    assert torch.equal(cut.result(), case.result())


def test_other_rows_and_longer_tables_change_no_bits() -> None:
    case = make(RICH)
    together, tables, hidden = case.result(), case.rows.tables, case.seen.hidden
    assert hidden is not None
    for row, at in enumerate(case.rows.order.tolist()):
        request = next(int(r) for r, start, count in case.rows.tiles.tolist() if start <= row < start + count)
        longer = torch.cat([tables[request : request + 1], torch.zeros(1, 5, dtype=torch.int32)], 1)
        one = attend(
            case.queries[at : at + 1],
            case.keys,
            case.values,
            Rows(longer, _ints([[0, 0, 1]]), _ints([0])),
            Seen(
                case.seen.firsts[row : row + 1],
                case.seen.lasts[row : row + 1],
                torch.nn.functional.pad(hidden[row : row + 1], (0, 80)),
            ),
            **case.options,
        )
        assert torch.equal(one[0], together[at])


def test_heads_have_the_same_bits_together_and_alone(threads: Callable[[int], None]) -> None:
    threads(1)
    for positions in (50, 36_000):  # few enough for all heads together, and more than that
        case = make(Shape(dims=(8, 24), kv_heads=8, group=16, prompts=((positions, 1),), window=None))
        together = case.result()
        for head in (0, 5, 6, 7):
            own = slice(16 * head, 16 * head + 16)
            keys, values = (pool[:, head : head + 1].contiguous() for pool in (case.keys, case.values))
            alone = replace(case, queries=case.queries[:, own], keys=keys, values=values)
            assert torch.equal(alone.result(), together[:, own])


def test_the_order_of_blocks_changes_no_bits() -> None:
    case = make(RICH)
    order = torch.randperm(len(case.keys))
    places = torch.argsort(order)
    moved = replace(
        case,
        keys=case.keys[order],
        values=case.values[order],
        rows=replace(case.rows, tables=places[case.rows.tables.long()].int()),
    )
    assert torch.equal(moved.result(), case.result())


@pytest.fixture
def _shared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Use several threads for work of any size."""
    monkeypatch.setattr(call, "_SHARED_PRODUCTS", 0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize("prompts", [((70, 18), (33, 1), (50, 7)), ((1, 1),), ((16, 1), (400, 1), (3, 1))])
def test_threads_change_no_bits(prompts: tuple[tuple[int, int], ...]) -> None:
    case = make(replace(RICH, prompts=prompts))
    torch.set_num_threads(1)
    alone = case.result()
    for threads in (2, 3, 5, 16):
        torch.set_num_threads(threads)
        assert torch.equal(case.result(), alone)


@pytest.mark.usefixtures("_shared")
def test_callers_in_several_threads() -> None:
    cases = [make(RICH, seed) for seed in range(4)]
    torch.set_num_threads(1)
    right = [case.result() for case in cases]

    def repeat(index: int) -> bool:
        torch.set_num_threads(3)
        return all(torch.equal(cases[index].result(), right[index]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_the_parts_cover_all_items_once(tile: int, rows: int, threads: int) -> None:
    from hotswap.kernels.paged_attention import kernel

    case = make(Shape(prompts=((60, rows), (5, 2)), tile=tile, kv_heads=3))
    step = kernel._Step(  # type: ignore[call-arg]
        *[0] * 3, case.rows.tiles.data_ptr(), case.seen.firsts.data_ptr(), case.seen.lasts.data_ptr(),
        *[0] * 6, len(case.rows.tiles), 0, 3, 1, 0.0, 0.0,
    )  # fmt: skip
    starts = [kernel._start(step, part, threads) for part in range(threads + 1)]
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, 3 * len(case.rows.tiles))


def _spoiled(case: Case, pool: Tensor, unseen: bool) -> Tensor:
    """Return a pool with NaN at the positions that no row attends to (`unseen`), or that some row does."""
    pool, tokens = pool.clone(), pool.shape[2]
    sees = torch.zeros(len(pool), tokens, dtype=torch.bool)
    for request, start, count in case.rows.tiles.tolist():
        for row in range(start, start + count):
            for position in range(int(case.seen.firsts[row]), int(case.seen.lasts[row])):
                if case.seen.hidden is None or not case.seen.hidden[row, position]:
                    sees[int(case.rows.tables[request, position // tokens]), position % tokens] = True
    pool.transpose(1, 2)[sees ^ unseen] = NAN
    return pool


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_keys_at_unattended_positions_do_not_matter(dtype: torch.dtype, softcap: float | None) -> None:
    case = make(replace(RICH, dtype=dtype, softcap=softcap, prompts=((70, 2), (33, 1), (50, 1))))
    spoiled = replace(case, keys=_spoiled(case, case.keys, unseen=True))
    assert spoiled.keys.isnan().sum() > 100
    assert torch.equal(spoiled.result(), case.result())


def test_keys_of_one_row_do_not_matter_to_other_rows() -> None:
    case = make(Shape(prompts=((40, 8),), tile=8, kv_heads=1))
    keys = case.keys.clone()
    # Only the last two of eight rows attend to position 38.
    keys[int(case.rows.tables[0, 2]), 0, 38 - 32] = NAN
    found, right = replace(case, keys=keys).result(), case.result()
    at = case.rows.order.long()
    assert torch.equal(found[at[:6]], right[at[:6]])
    assert found[at[6:]].isnan().all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("position", [0, 15, 17, 39])
def test_a_nan_in_keys_or_queries_makes_the_row_nan(
    position: int, softcap: float | None, sinks: bool
) -> None:
    case = make(Shape(prompts=((40, 1),), softcap=softcap, sinks=sinks))
    keys = case.keys.clone()
    keys[int(case.rows.tables[0, position // 16]), 1, position % 16, 63] = NAN
    found = replace(case, keys=keys).result()[int(case.rows.order[0])]
    assert found[2:].isnan().all()  # the query heads of the second KV head
    assert not found[:2].isnan().any()
    queries = case.queries.clone()
    queries[int(case.rows.order[0]), 0, 5] = NAN
    found = replace(case, queries=queries).result()[int(case.rows.order[0])]
    assert found[0].isnan().all()
    assert not found[1:].isnan().any()


@pytest.mark.parametrize("what", ["values", "sinks"])
def test_a_nan_in_values_or_sinks_makes_the_row_nan(what: str) -> None:
    case = make(Shape(prompts=((40, 1),), sinks=True))
    if what == "values":
        values = case.values.clone()
        values[int(case.rows.tables[0, 1]), 0, 3] = NAN
        found = replace(case, values=values).result()
    else:
        found = replace(case, options={**case.options, "sinks": _nan_first(case.options["sinks"])}).result()
    assert found[int(case.rows.order[0]), 0].isnan().all()
    assert not found[int(case.rows.order[0]), 2:].isnan().any()


def _nan_first(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[0] = NAN
    return tensor


def _with_keys(first: float, others: float, sinks: bool) -> Tensor:
    """Return the result of a row with these scores."""
    case = make(Shape(prompts=((20, 1),), padding=0, sinks=sinks, dtype=torch.float32))
    keys = torch.full_like(case.keys, others)
    keys[int(case.rows.tables[0, 0]), :, 4] = first
    return replace(case, queries=torch.ones_like(case.queries), keys=keys).result()


def test_infinite_scores_are_as_in_softmax() -> None:
    inf = float("inf")
    assert _with_keys(inf, 1.0, sinks=False).isnan().all()
    assert _with_keys(-inf, -inf, sinks=False).isnan().all()
    assert not _with_keys(-inf, -inf, sinks=True).any()
    assert not _with_keys(-inf, 1.0, sinks=False).isnan().any()
    case = make(Shape(prompts=((20, 1),), padding=0, sinks=False, dtype=torch.float32))
    chosen = case.values[int(case.rows.tables[0, 0]), :, 4].repeat_interleave(2, 0)
    torch.testing.assert_close(_with_keys(1.0, -inf, sinks=False)[0], chosen)


def test_queries_of_any_dtype_and_strides() -> None:
    case = make(Shape())
    queries = case.queries.bfloat16()
    right = replace(case, queries=queries.float()).result()
    assert torch.equal(replace(case, queries=queries).result(), right)
    by_head = queries.float().transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(replace(case, queries=by_head).result(), right)
    by_number = queries.float().permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(replace(case, queries=by_number).result(), right)


def test_hidden_positions_of_either_dtype() -> None:
    case = make(RICH)
    assert case.seen.hidden is not None
    other = replace(case, seen=replace(case.seen, hidden=case.seen.hidden.to(torch.uint8) * 255))
    assert torch.equal(other.result(), case.result())


def test_arguments_that_do_not_match_are_refused() -> None:
    case = make(Shape())
    with pytest.raises(ConfigError, match="float64"):
        replace(case, keys=case.keys.double(), values=case.values.double()).result()
    with pytest.raises(ConfigError, match="do not match values"):
        replace(case, values=case.values[:-1]).result()
    with pytest.raises(ConfigError, match="blocks of 16"):
        replace(
            case, keys=case.keys[:, :, :8].contiguous(), values=case.values[:, :, :8].contiguous()
        ).result()
    with pytest.raises(ConfigError, match="greater than 0"):
        replace(case, options={"scale": 0.0}).result()
    with pytest.raises(ConfigError, match="each of the 4 heads"):
        replace(case, options={"scale": 1.0, "sinks": torch.zeros(2)}).result()
    with pytest.raises(ConfigError, match="order is"):
        replace(case.rows, order=case.rows.order.long())
    with pytest.raises(ConfigError, match="three numbers"):
        replace(case.rows, tiles=case.rows.tiles[:, :2].contiguous())
    with pytest.raises(ConfigError, match="hidden has 1 rows"):
        replace(case.seen, hidden=torch.zeros(1, 48, dtype=torch.bool))


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_append_writes_only_the_given_slots(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(6, 3, 16, 20, generator=generator).to(dtype)
    rows = torch.randn(7, 3, 20, generator=generator).to(dtype).transpose(0, 1)
    blocks, slots = torch.tensor([5, 1, 1, 2, 0, 3, 4]), torch.tensor([15, 0, 1, 7, 3, 3, 9])
    expected = pool.clone()
    expected[blocks, :, slots] = rows.transpose(0, 1)
    for laid in (rows, rows.transpose(1, 2).contiguous().transpose(1, 2)):
        found = pool.clone()
        append(laid, found, blocks, slots)
        assert torch.equal(found, expected)
