"""The programs of `kv_blocks`: both directions, with words of four bytes and of one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hotswap.kernels.kv_blocks import BlockTable
from hotswap.kernels.kv_blocks.launch import move_call
from hotswap.kernels.targets import Target
from tests.kernels.gate.build import Limits, Program
from tests.kernels.launches import program_of


def programs(target: Target) -> Iterable[Program]:
    """Return the programs of KV block copies on a target."""
    for size in (4096, 4095):
        table = BlockTable([torch.zeros(4, size, dtype=torch.uint8)] * 3)
        rows = torch.zeros(2, table.block_bytes, dtype=torch.uint8)
        for to_staging in (True, False):
            call = move_call(table, (1, 2), rows, to_staging)
            name = f"{'gather' if to_staging else 'scatter'} words of {4 if call.constants['WIDE'] else 1}"
            limits = Limits(
                registers=64 if call.constants["WIDE"] else 128, mma=False, wide=call.constants["WIDE"]
            )
            yield program_of(name, call, limits=limits)
