"""All shipped kernel programs compile for all targets and keep to their limits; no GPU is needed.

Each module of `gate` has a function `programs(target)`; this test finds new modules by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from hotswap.kernels.fp8_gemm.tiles import Tile, heuristic
from hotswap.kernels.targets import TARGETS, Target
from tests.kernels.gate import fp8_gemm, rules
from tests.kernels.gate.build import Facts, Limits, Program
from tests.kernels.gate.rules import broken

_GATE = Path(fp8_gemm.__file__).parent
_KERNELS = sorted(file.stem for file in _GATE.glob("*.py") if file.stem not in {"__init__", "build", "rules"})


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty Triton cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


# Between two targets that are compiled for in full: it has the shared memory and the tensor cores of sm_86,
# and sm_120 is newer. Every third of its programs is compiled.
_BETWEEN = "sm_89"


def programs(kernel: str, target: Target) -> Iterator[Program]:
    made: Iterator[Program] = iter(import_module(f"tests.kernels.gate.{kernel}").programs(target))
    return islice(made, 0, None, 3 if target.name == _BETWEEN else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", _KERNELS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_every_program_keeps_to_its_limits(target: Target, kernel: str) -> None:
    faults = {program.name: broken(program, target) for program in programs(kernel, target)}
    assert {name: found for name, found in faults.items() if found} == {}


def test_the_programs_are_those_that_the_heuristic_chooses() -> None:
    for target in TARGETS.values():
        chosen = heuristic(7, (3000, 5000), target, 100)
        found = {(tile.block_m, tile.block_n, tile.block_k) for tile in fp8_gemm.tiles(target)}
        assert not target.mma or (chosen.block_m, chosen.block_n, chosen.block_k) in found


@pytest.mark.parametrize(
    ("tile", "target", "fault"),
    [
        (Tile(64, 128, 128, 2, 3), "sm_80", "spills"),
        (Tile(128, 256, 128, 8, 4), "sm_86", "shared memory"),
        (Tile(16, 16, 32, 8, 2), "sm_80", "instructions for a weight"),
    ],
)
def test_a_tile_that_exceeds_a_target_is_reported(tile: Tile, target: str, fault: str) -> None:
    program = fp8_gemm.fused(tile, TARGETS[target], "bf16", 128, split=False)
    assert fault in " ".join(broken(program, TARGETS[target]))


@pytest.mark.parametrize(
    ("target", "fault"), [("sm_90", "instructions"), ("gfx942", "instructions"), ("sm_70", "")]
)
def test_code_that_cannot_be_disassembled_fails_the_gate(
    target: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "build", lambda program, target: Facts(0))
    program = fp8_gemm.fused(Tile(), TARGETS["sm_80"], "bf16", 128, split=False)
    faults = broken(program, TARGETS[target])
    assert bool(faults) == bool(fault)
    assert fault in " ".join(faults)


def test_a_program_without_alignment_hints_is_reported() -> None:
    """Without alignment hints, Triton loads rows in narrow words."""
    made = fp8_gemm.fused(Tile(), TARGETS["sm_80"], "bf16", 128, split=False)
    unaligned = Program(**{**vars(made), "aligned": frozenset(), "limits": Limits(copies=True)})
    assert "16 bytes at a time" in " ".join(broken(unaligned, TARGETS["sm_80"]))
