"""Compiles Triton programs for GPUs that are not present, and reads facts from their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hotswap.kernels.targets import Target

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_JUMP = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_LOCAL = ("LDL", "STL")
_AMD_LINE = re.compile(r"^\s+([a-z]+_[a-z0-9_]+)\s", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a program; `None` is no limit.

    Attributes:
        registers: Maximum registers per lane.
        mma: Whether it must use the tensor-core instruction of its target.
        copies: Whether it must copy 16 bytes at a time to shared memory asynchronously (NVIDIA).
        wide: Whether it must load and store 16 bytes at a time.
        per_weight: Maximum instructions of the main loop per weight, on NVIDIA.
        spilled: Maximum bytes and instructions of local memory, none of them in the main loop.

    A tile that was measured to be the fastest on a device needs no limits of instructions and local memory,
    which only replace a measurement.
    """

    registers: int = 255
    mma: bool = True
    wide_mma: bool = False
    copies: bool = False
    wide: bool = False
    per_weight: float | None = None
    spilled: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Program:
    """A specialization of a kernel, as it is launched.

    Attributes:
        name: Label in messages.
        kernel: The `triton.jit` function.
        arguments: Triton types of the run-time arguments: `*bf16`, `i32`.
        constants: The `constexpr` arguments.
        aligned: Arguments that are multiples of 16 in every launch.
        weights: Weights per lane in a step of the main loop.
        limits: The limits of the program.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str]
    num_warps: int = 4
    num_stages: int = 2
    weights: float = 0.0
    limits: Limits = field(default_factory=Limits)


def build(program: Program, target: Target) -> Facts:
    """Compile a program for a target; errors of Triton are raised to the caller."""
    names = list(program.kernel.arg_names)
    source = ASTSource(
        fn=program.kernel,
        signature={name: program.arguments.get(name, "constexpr") for name in names},
        constexprs=dict(program.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in program.aligned},
    )
    options = {"num_warps": program.num_warps, "num_stages": program.num_stages}
    compiled: Any = triton.compile(source, target=_gpu(target), options=options)
    if target.is_amd:
        return AmdFacts(int(compiled.metadata.shared), compiled.asm["amdgcn"])
    return NvidiaFacts(int(compiled.metadata.shared), compiled.asm["cubin"])


def _gpu(target: Target) -> GPUTarget:
    if target.is_amd:
        return GPUTarget("hip", target.name, target.warp_lanes)
    return GPUTarget("cuda", int(target.name.removeprefix("sm_")), target.warp_lanes)


@dataclass
class Facts:
    """Facts about the machine code of a program.

    Attributes:
        shared_bytes: Shared memory of the program.
        registers: Registers per lane.
        spilled: Local memory: spilled registers and stack, in bytes or instructions.
        spilled_in_loop: Local-memory instructions in loops with matrix products; on AMD all of them.
        operations: Number of each instruction.
    """

    shared_bytes: int
    registers: int = field(init=False, default=0)
    spilled: int = field(init=False, default=0)
    spilled_in_loop: int = field(init=False, default=0)
    operations: Counter[str] = field(init=False, default_factory=Counter[str])
    num_copies: int = field(init=False, default=0)
    num_wide_loads: int = field(init=False, default=0)
    num_wide_stores: int = field(init=False, default=0)
    loop_length: int = field(init=False, default=0)

    @property
    def is_readable(self) -> bool:
        """Whether the instructions could be disassembled; for the oldest targets they cannot."""
        return bool(self.operations)

    def count(self, word: str) -> int:
        """Count the instructions whose name contains a word."""
        return sum(count for name, count in self.operations.items() if word in name)


class NvidiaFacts(Facts):
    """Facts about a cubin, from the tools that come with Triton."""

    def __init__(self, shared_bytes: int, cubin: bytes) -> None:
        super().__init__(shared_bytes)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            resources = _RESOURCES.search(_output_of("cuobjdump", "-res-usage", file.name))
            self.assembly = _output_of("cuobjdump", "-sass", file.name, may_fail=True)
        assert resources is not None, "the output format of cuobjdump has changed"
        self.registers, stack, local = (int(number) for number in resources.groups())
        self.operations = Counter(_operation(text) for _, text in self.instructions)
        self.spilled = stack + local + sum(self.operations[name] for name in _LOCAL)
        self.num_copies = len(re.findall(r"LDGSTS\.E\S*\.128", self.assembly))
        self.num_wide_loads = self.num_copies + len(re.findall(r"\bLDG\.E\S*\.128", self.assembly))
        self.num_wide_stores = len(re.findall(r"\bSTG\.E\S*\.128", self.assembly))
        loops = list(self._loops())
        self.loop_length = max(map(len, loops), default=0)
        self.spilled_in_loop = sum(_operation(text) in _LOCAL for body in loops for text in body)

    @cached_property
    def instructions(self) -> list[tuple[int, str]]:
        return [(int(address, 16), text) for address, text in _INSTRUCTION.findall(self.assembly)]

    def _loops(self) -> Iterator[list[str]]:
        """Yield the instructions of each loop with matrix products."""
        for address, text in self.instructions:
            jump = _JUMP.search(text)
            if jump and (first := int(jump[1], 16)) < address:
                body = [text for at, text in self.instructions if first <= at <= address]
                if any("MMA" in text for text in body):
                    yield body


class AmdFacts(Facts):
    """Facts about AMD assembly."""

    def __init__(self, shared_bytes: int, assembly: str) -> None:
        super().__init__(shared_bytes)
        self.registers = _number(assembly, "vgpr_count")
        self.spilled = _number(assembly, "vgpr_spill_count") + _number(assembly, "private_segment_fixed_size")
        self.spilled_in_loop = self.spilled  # the position is not analyzed
        self.operations = Counter(_AMD_LINE.findall(assembly))
        # Scalar loads of arguments have similar names.
        vectors = [name for name in self.operations if name.startswith(("global_", "buffer_", "flat_"))]
        wide = [name for name in vectors if "dwordx4" in name or "b128" in name]
        self.num_wide_loads = sum(self.operations[name] for name in wide if "load" in name)
        self.num_wide_stores = sum(self.operations[name] for name in wide if "store" in name)


def _output_of(tool: str, *arguments: str, may_fail: bool = False) -> str:
    command = [str(_TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=not may_fail).stdout


def _operation(text: str) -> str:
    return _PREDICATE.sub("", text).split()[0].split(".")[0]


def _number(assembly: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", assembly)
    assert found is not None, f"the assembly has no {name}"
    return int(found[1])
