"""FP8 linear layers without a GPU: packing, values, products on a CPU, the choice of tiles, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.fp8_gemm import (
    Fp8Weight,
    Tile,
    Workspace,
    choose,
    dense,
    dense_linear,
    dequantize_rows,
    dequantized,
    fp8_linear,
    fp8_linear_reference,
    heuristic,
    launch,
    pack,
    pack_into,
    packed_width,
    tiles,
    unpack,
    warm_up,
)
from hotswap.kernels.fp8_gemm.sweep import Point, neighbours, search, sweep
from hotswap.kernels.fp8_gemm.tiles import ROWS, TABLE, rows_to_build
from hotswap.kernels.tables import Record, Table, load, write
from hotswap.kernels.targets import TARGETS, Device, Target
from tests.house.tree import ROOT
from tests.kernels.fp8_weights import (
    BOUNDS,
    DEQUANTIZED_BOUNDS,
    FINITE,
    error,
    every_value,
    input_of,
    weight_of,
)
from tests.kernels.published import published_conversion

CPU = torch.device("cpu")
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
groups = st.sampled_from([32, 64, 128, None])
targets = st.sampled_from(list(TARGETS.values()))
shapes = st.tuples(st.integers(16, 60_000), st.integers(16, 30_000))


# ------------------------------------------------------------------------------------------------- packing


@given(st.integers(1, 9), st.integers(1, 300), groups)
def test_packing_and_unpacking_changes_no_value(rows: int, width: int, group: int | None) -> None:
    weight = weight_of(rows, width, group)
    packed = pack(weight)
    assert packed.qweight.shape == (rows, packed_width(width))
    assert packed.qweight.shape[1] % 16 == 0, "rows are aligned for wide loads"
    assert torch.equal(unpack(packed).qweight.view(torch.uint8), weight.qweight.view(torch.uint8))
    assert torch.equal(dequantized(packed), dequantized(weight))
    assert pack(packed) is packed
    assert unpack(weight) is weight


@pytest.mark.parametrize("first", range(4))
def test_values_are_packed_from_any_offset(first: int) -> None:
    values = torch.arange(260, dtype=torch.uint8)[first : first + 256].view(2, 128)
    words, expected = torch.zeros(2, 32, dtype=torch.int32), torch.zeros(2, 32, dtype=torch.int32)
    pack_into(values, words)
    pack_into(values.clone(), expected)
    assert torch.equal(words, expected)


def test_a_word_has_four_adjacent_values_the_middle_two_swapped() -> None:
    values = torch.tensor([[0x11, 0x22, 0x33, 0x44]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    words = pack(Fp8Weight(values, torch.ones(1, 1), 4, None, torch.float32)).qweight
    assert words[0].tolist() == [0x44223311, *[0] * 15]


def test_packed_weights_take_half_the_bytes_of_bfloat16() -> None:
    weight = pack(weight_of(64, 4096, 128))
    assert weight.nbytes <= 0.52 * 64 * 4096 * 2


# --------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packs", [False, True])
def test_every_finite_value_is_dequantized_exactly(dtype: torch.dtype, packs: bool) -> None:
    weight = replace(every_value(), dtype=dtype)
    found = dequantize_rows(pack(weight) if packs else weight, slice(None), dtype)
    assert torch.equal(found.double(), dequantized(weight))
    assert torch.equal(found.signbit(), dequantized(weight).signbit())


def test_the_reference_converts_as_pytorch_does() -> None:
    values = FINITE[None].view(torch.float8_e4m3fn)
    weight = Fp8Weight(values, torch.ones(1, 1), len(FINITE), None, torch.float32)
    assert torch.equal(dequantized(weight), values.double())


def test_the_published_conversion_is_wrong_for_zeros_and_subnormals() -> None:
    right = FINITE.view(torch.float8_e4m3fn).float()
    found = published_conversion(FINITE).float()
    wrong = found != right
    assert int(wrong.sum()) == 16
    assert (right[wrong].abs() < 2.0**-6).all(), "zeros and subnormals, all of them"
    assert published_conversion(torch.zeros(1, dtype=torch.uint8)).item() == 2.0**-7
    ours = dequantize_rows(
        Fp8Weight(FINITE[None].view(torch.float8_e4m3fn), torch.ones(1, 1), 254, None, torch.bfloat16),
        slice(None),
        torch.bfloat16,
    )
    assert torch.equal(ours[0].float(), right)


# ------------------------------------------------------------------------------------------------- products


@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 40),
    width=st.integers(1, 300),
    group=groups,
    dtype=dtypes,
    packs=st.booleans(),
    with_bias=st.booleans(),
    block_weights=st.sampled_from([1, 1000, 1 << 18]),
)
def test_a_cpu_multiplies_by_rounded_dequantized_weights(
    rows: int,
    columns: int,
    width: int,
    group: int | None,
    dtype: torch.dtype,
    packs: bool,
    with_bias: bool,
    block_weights: int,
) -> None:
    weight, x = weight_of(columns, width, group, dtype), input_of(rows, width, dtype)
    bias = input_of(1, columns, dtype)[0] if with_bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dense._BLOCK_WEIGHTS, "cpu", block_weights)  # small weights have many blocks too
        found = fp8_linear(x.view(1, rows, width), pack(weight) if packs else weight, bias)
    rounded = dequantized(weight).float().to(dtype).double()
    right = x.double() @ rounded.T + (0 if bias is None else bias.double())
    assert found.shape == (1, rows, columns)
    assert found.dtype is dtype
    assert error(found[0], right) <= 3 * BOUNDS[dtype], (
        "with few elements, one may have the largest rounding error"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("group", [64, 128, None])
@pytest.mark.parametrize(("scale_bits", "bounds"), [(4, BOUNDS), (24, DEQUANTIZED_BOUNDS)])
def test_the_error_on_a_cpu_is_that_of_rounding_the_result_and_scales_of_many_bits(
    scale_bits: int, bounds: Mapping[torch.dtype, float], group: int | None, rows: int, dtype: torch.dtype
) -> None:
    weight, x = weight_of(256, 512, group, dtype, scale_bits=scale_bits), input_of(rows, 512, dtype)
    found = fp8_linear(x, weight)
    assert error(found, fp8_linear_reference(x, weight)) <= bounds[dtype]
    assert torch.equal(found, fp8_linear(x, weight)), "the same bits in every run"


def test_weights_are_rounded_to_their_original_dtype_first() -> None:
    weight = weight_of(16, 64, None, torch.bfloat16)
    found = dequantize_rows(weight, slice(None), torch.float32)
    assert torch.equal(found, dequantized(weight).float().bfloat16().float())
    assert not torch.equal(found, dequantized(weight).float())


def test_the_multiply_function_gets_dequantized_rows_and_their_bias() -> None:
    weight, x, bias = (
        weight_of(40, 64, 32),
        input_of(3, 64, torch.bfloat16),
        input_of(1, 40, torch.bfloat16)[0],
    )
    seen: list[tuple[int, ...]] = []

    def multiply(rows: torch.Tensor, part: torch.Tensor, its_bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(tuple(part.shape))
        return F.linear(rows, part, its_bias)

    found = dense_linear(x, weight, bias, multiply=multiply)
    assert sum(shape[0] for shape in seen) == 40
    assert torch.equal(found, F.linear(x, dequantize_rows(weight, slice(None), torch.bfloat16), bias))


@given(st.integers(1, 60_000), st.integers(1, 40_000))
def test_blocks_on_a_gpu_are_bounded_and_aligned(rows: int, width: int) -> None:
    """cuBLAS is several times slower where the rows of a result are not aligned to 16 bytes."""
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device="meta")  # on no CPU
    scales = torch.empty(rows, 1, device="meta")
    blocks = dense._blocks(Fp8Weight(values, scales, width, None, torch.bfloat16))
    starts = [block.start for block in blocks]
    assert starts == list(range(0, rows, blocks[0].stop)), "every row once"
    assert all(start % 256 == 0 for start in starts)
    assert blocks[0].stop * width <= (1 << 25) + 256 * width


def test_a_result_is_written_to_out() -> None:
    weight, x = weight_of(16, 64, None, torch.float32), input_of(3, 64, torch.float32)
    out = torch.full((3, 16), torch.nan)
    found = fp8_linear(x, weight, out=out)
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(out, fp8_linear(x, weight))


# ------------------------------------------------------------------------------------------------- the choice


@given(st.integers(1, 5000), shapes, targets, st.integers(1, 400), groups)
def test_a_tile_of_the_heuristic_has_no_empty_part_and_fits_the_device(
    rows: int, shape: tuple[int, int], target: Target, num_units: int, group: int | None
) -> None:
    tile = heuristic(rows, shape, target, num_units).fitted(group)
    assert tile.path == "dense" or target.mma, "no tensor cores, no kernel"
    if tile.path == "fused":
        steps = ceil(shape[1] / tile.block_k)
        assert 1 <= tile.parts <= max(1, steps // 4)
        assert tile.shared_bytes <= target.shared_bytes
        assert group is None or group % tile.block_k == 0
        assert tile.block_k >= 16, "the minimum of tensor cores"
        assert not tile.weights_left or target.wide_mma


def test_a_device_without_a_kernel_takes_the_dense_path() -> None:
    for device in (Device("cpu", None, 1), Device("V100", TARGETS["sm_70"], 80)):
        assert choose(1, (4096, 4096), "float16", 128, device).path == "dense"


def test_each_tile_of_the_shipped_table_can_be_launched() -> None:
    for target, record in load(TABLE).records():
        tile = Tile.of(record.choice)
        assert tile.path == "dense" or tile.shared_bytes <= TARGETS[target].shared_bytes
        assert record.figures["us"] > 0, "the table keeps the measured time"


def test_a_tile_survives_a_table_and_unknown_settings_are_refused() -> None:
    tile = Tile(64, 128, 128, 8, 3, 2, weights_left=True)
    assert Tile.of(json.loads(json.dumps(tile.choice))) == tile
    with pytest.raises(ConfigError, match="sweep again"):
        Tile.of({"block_q": 3})


def test_a_search_finds_a_faster_tile_and_records_its_time(tmp_path: Path) -> None:
    device, point = Device("GPU", TARGETS["sm_90"], 132), Point(16, (4096, 4096))

    def measure(point: Point, tile: Tile) -> float:
        if tile.path == "dense":
            return 90.0
        return 50.0 + abs(tile.parts - 6) + abs(tile.stages - 5) + abs(tile.block_n - 128) / 16

    first = heuristic(16, point.shape, TARGETS["sm_90"], 132)
    best, microseconds = search(point, device, measure)
    assert microseconds <= measure(point, first)
    path = tmp_path / "table.json"
    sweep([point], device, measure, path=path, others=lambda point: {"bfloat16_us": 80.0})
    (found,) = [record for _, record in Table(json.loads(path.read_text())).records()]
    assert Tile.of(found.choice) == best
    assert found.figures == {"us": microseconds, "bfloat16_us": 80.0}
    slow = search(point, device, lambda point, tile: 1.0 if tile.path == "dense" else 2.0)
    assert slow[0].path == "dense"


def test_a_search_tries_only_tiles_that_can_be_launched() -> None:
    for target in TARGETS.values():
        for rows in ROWS:
            point = Point(rows, (1024, 512), group=64)
            tile = heuristic(min(rows, 256), point.shape, target, 60).fitted(64)
            for other in neighbours(tile, point, target):
                assert other.shared_bytes <= target.shared_bytes
                assert other.parts <= ceil(512 / other.block_k)
                assert 64 % other.block_k == 0
    with pytest.raises(ConfigError, match="'cpu'"):
        search(Point(1, (64, 64)), Device("cpu", None, 1), lambda point, tile: 1.0)


# --------------------------------------------------------------------------------------------------- errors


def test_an_error_names_the_argument_that_does_not_match() -> None:
    weight, x = weight_of(16, 64, None), input_of(3, 64, torch.bfloat16)
    with pytest.raises(ConfigError, match="x is"):
        fp8_linear(x[:, :63], weight)
    with pytest.raises(ConfigError, match="bias is"):
        fp8_linear(x, weight, torch.zeros(16))
    with pytest.raises(ConfigError, match="bias is"):
        fp8_linear(x, weight, torch.zeros(15, dtype=torch.bfloat16))
    changes: list[dict[str, Any]] = [
        {"qweight": weight.qweight.view(torch.uint8)},
        {"qweight": weight.qweight[:, :63]},
        {"qweight": weight.qweight.t(), "width": 16},
        {"scales": weight.scales.double()},
        {"scales": torch.ones(16, 2)},
        {"group": 48},
        {"group": 16},
    ]
    for change in changes:
        with pytest.raises(ConfigError, match=r"qweight|scales|group"):
            replace(weight, **change)


def test_a_warm_up_does_nothing_on_a_cpu() -> None:
    space = Workspace(CPU)
    warm_up([(pack(weight_of(64, 64, None)), None)], torch.bfloat16, space, most_rows=4096)
    assert space.nbytes == 0


def programs_of(shape: tuple[int, int], device: Device, numbers: Iterable[int]) -> set[Tile]:
    """Return the programs of products with these numbers of rows: the tile, and whether K is split."""
    chosen = {choose(rows, shape, "bfloat16", 128, device) for rows in numbers}
    return {
        Tile(path="dense")
        if tile.path == "dense"
        else replace(tile, parts=1 + (min(tile.parts, ceil(shape[1] / tile.block_k)) > 1))
        for tile in chosen
    }


@pytest.mark.parametrize("target", [target for target in TARGETS.values() if target.mma], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (1280, 8192), (28672, 4096), (4096, 14336), (64, 128)])
def test_programs_for_every_number_of_rows_are_compiled_ahead(shape: tuple[int, int], target: Target) -> None:
    device = Device("a test GPU", target, 132)
    built = rows_to_build(shape, "bfloat16", 128, device)
    assert programs_of(shape, device, built) == programs_of(shape, device, range(1, 9000))
    assert len(built) == len(programs_of(shape, device, built)), "no program is compiled twice"
    few = rows_to_build(shape, "bfloat16", 128, device, 20)
    assert programs_of(shape, device, few) == programs_of(shape, device, range(1, 21))


def test_programs_of_a_table_for_many_rows_are_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [(16, Tile()), (1024, Tile(128, 128, 64, 8, 3)), (4096, Tile(128, 256, 64, 8, 3))]
    records = [Record("bfloat16/g128", (4096, 4096), rows, tile.choice, {}) for rows, tile in chosen]
    write(tmp_path / "table.json", "a GPU with a table", "sm_90", {}, records)
    monkeypatch.setattr(tiles, "TABLE", tmp_path / "table.json")
    device = Device("a GPU with a table", TARGETS["sm_90"], 132)
    built = rows_to_build((4096, 4096), "bfloat16", 128, device)
    assert built == (1, 17, 1025)


def test_a_warm_up_computes_a_product_of_each_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H100 without a table, 257 rows of a square weight are the first for which K is not split."""
    monkeypatch.setattr(tiles, "TABLE", tmp_path / "none.json")
    device, computed = Device("a test H100", TARGETS["sm_90"], 132), list[int]()

    def record(x: Tensor, *args: object, **options: object) -> Tensor:
        computed.append(len(x))
        return x

    monkeypatch.setattr(launch, "runs_triton", lambda device: True)
    monkeypatch.setattr(launch, "kernel_device", lambda where: device)
    monkeypatch.setattr(launch, "fp8_linear", record)
    values = torch.zeros(4096, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = Fp8Weight(values, torch.ones(4096, 32), 4096, 128, torch.bfloat16)
    warm_up([(weight, None)] * 2, torch.bfloat16, Workspace(CPU))
    assert programs_of((4096, 4096), device, computed) == programs_of((4096, 4096), device, range(1, 600))
    assert 257 in computed


def test_without_triton_everything_imports_and_computes() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import importlib.util as u; import torch;"
        "from hotswap.kernels.fp8_gemm import Fp8Weight, fp8_linear, pack;"
        "c = torch.ones(16, 64).to(torch.float8_e4m3fn);"
        "w = Fp8Weight(c, torch.ones(16, 1), 64, None, torch.float32);"
        "print(fp8_linear(torch.ones(1, 64), pack(w)).sum().item())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(16.0 * 64)], done.stderr
