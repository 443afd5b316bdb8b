"""Checks a compiled program against its limits."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.kernels.targets import Target
from tests.kernels.gate.build import Facts, Program, build

__all__ = ["broken"]

# Targets whose code the tools that come with Triton cannot disassemble.
_UNREADABLE = frozenset({"sm_70"})


def broken(program: Program, target: Target) -> list[str]:
    """Compile a program for a target and return a message for each limit that it exceeds."""
    return list(_broken(build(program, target), program, target))


def _broken(facts: Facts, program: Program, target: Target) -> Iterator[str]:
    limits = program.limits
    if facts.shared_bytes > target.shared_bytes:
        yield f"takes {facts.shared_bytes} bytes of shared memory, of {target.shared_bytes}"
    if facts.registers > limits.registers:
        yield f"takes {facts.registers} registers, of {limits.registers}"
    if limits.spilled is not None and facts.spilled > limits.spilled:
        yield f"spills: {facts.spilled} bytes and instructions of local memory, of {limits.spilled}"
    if limits.spilled is not None and facts.spilled_in_loop:
        yield f"spills in its main loop: {facts.spilled_in_loop} instructions of local memory"
    if not facts.is_readable:
        if target.name not in _UNREADABLE:
            yield "has no instructions that can be disassembled: the gate checks nothing"
        return
    mma = target.wide_mma if limits.wide_mma else target.mma
    if limits.mma and not facts.count(mma):
        yield f"has no {mma}, only {sorted(name for name in facts.operations if 'MMA' in name.upper())}"
    if limits.copies and not target.is_amd and not facts.num_copies:
        yield "copies nothing to shared memory 16 bytes at a time"
    if limits.copies and target.is_amd and not facts.num_wide_loads:
        yield "loads nothing 16 bytes at a time"
    if limits.wide and not (facts.num_wide_loads and facts.num_wide_stores):
        yield f"has {facts.num_wide_loads} loads and {facts.num_wide_stores} stores of 16 bytes"
    if limits.per_weight is not None and not target.is_amd:
        yield from _over_budget(facts.loop_length, program.weights, limits.per_weight)


def _over_budget(loop_length: int, weights: float, budget: float) -> Iterator[str]:
    if not loop_length:
        yield "has no loop that multiplies matrices"
    elif loop_length / weights > budget:
        yield f"takes {loop_length / weights:.2f} instructions for a weight, of {budget}"
