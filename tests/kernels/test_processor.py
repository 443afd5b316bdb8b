"""`--hide-avx512` hides AVX-512 from kernels, to test as on a CPU with AVX2 only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotswap.backends.torch import linear
from hotswap.backends.torch.device import multiplies_bf16
from hotswap.kernels import packed_linear
from hotswap.kernels.processor import instructions

ROOT = Path(__file__).resolve().parents[2]

# Tests that depend on the instructions of a CPU: the kernels, and the path and the bits of linear layers.
FILES = (
    "tests/kernels/test_processor.py",
    "tests/kernels/test_fused.py",
    "tests/kernels/test_low_rank.py",
    "tests/kernels/test_packed_linear.py",
    "tests/kernels/test_paged_attention.py",
    "tests/backends/torch/test_linear.py",
    "tests/backends/torch/test_batch_invariant.py",
    "tests/backends/torch/test_invariance.py",
)
# Of the last, the models whose layers differ for a CPU.
SELECTED = "not test_invariance.py or llama or mixtral or gpt_oss or qwen3_5"


def test_a_cpu_with_avx2_only_computes_bf16_in_fp32(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--hide-avx512"):
        pytest.skip("AVX-512 is not hidden")
    assert not any(name.startswith(("avx512", "amx")) for name in instructions())
    assert not packed_linear.supported(torch.float32)
    assert not multiplies_bf16()
    assert linear.supported_dtypes() == {torch.float32, torch.bfloat16}
    assert not linear._has_kernel(torch.bfloat16)


@pytest.mark.slow
def test_the_same_tests_pass_on_a_cpu_with_avx2_only(request: pytest.FixtureRequest) -> None:
    """In one process, which imports PyTorch and links the kernels once."""
    if request.config.getoption("--hide-avx512"):
        pytest.skip("AVX-512 is hidden already")
    command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "--hide-avx512"]
    command += [*FILES, "-k", SELECTED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [file for file in FILES if f"{file}::" not in run.stdout] == [], "no test of a file is selected"
