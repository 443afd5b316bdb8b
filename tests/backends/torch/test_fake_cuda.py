"""The path of a GPU runs with tensors without values: nothing of it is read or left on the host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
GUARD = Path(__file__).parent / "fake_cuda" / "guard.cpp"
KINDS = ("llama", "gemma3", "phi3", "gpt2", "gpt_neox", "qwen3_moe", "gpt_oss", "deepseek_v3")
QUANTIZED = ("llama+fp8", "qwen3_moe+fp8")
GATHERED = ("llama+gathered", "gpt_oss+gathered", "deepseek_v3+gathered")

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has a guard of CUDA devices"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guard of CUDA devices, compiled against the PyTorch that is installed."""
    out, home = tmp_path_factory.mktemp("guard") / "guard.so", Path(torch.__file__).parent
    command = ["g++", "-shared", "-fPIC", "-O0", "-std=c++20", f"-I{home / 'include'}", str(GUARD)]
    subprocess.run([*command, f"-L{home / 'lib'}", "-lc10", "-o", str(out)], check=True, capture_output=True)
    return out


def walk(guard: Path, *kinds: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.backends.torch.fake_cuda.walk", str(guard), fault, *kinds]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_steps_adapters_fp8_and_copies_of_kv_blocks_stay_on_the_device(guard: Path) -> None:
    """Prompts, decodes and both mixed, of eight architectures; adapters; KV blocks saved and restored."""
    done = walk(guard, *KINDS, *QUANTIZED, *GATHERED)
    assert done.returncode == 0, done.stderr
    launched: dict[str, dict[str, int]] = json.loads(done.stdout)
    assert launched.keys() == {*KINDS, *QUANTIZED, *GATHERED}
    for kind, kernels in launched.items():
        assert kernels["move_kernel"] == 2, "KV blocks are saved and restored by one launch each"
        for kernel in ("attend_kernel", "sum_kernel", "pack_kernel", "append_kernel"):
            assert (kernel in kernels) == (kind not in GATHERED)
    for kind in QUANTIZED:
        assert launched[kind]["fp8_gemm_kernel"]
    for kind in {*KINDS, *QUANTIZED} - {"gpt_neox"}:  # whose layers have other names
        assert launched[kind]["expand_kernel"]


@pytest.mark.parametrize(
    ("kind", "fault", "error"),
    [
        ("llama", "a value is read on the host", "DataDependentOutputException"),
        ("llama+gathered", "an index stays on the host", "at least two devices"),
        ("llama", "block tables stay on the host", "attend_kernel gets an argument on cpu"),
        ("llama", "a kernel gets an argument on the host", "gets an argument on cpu"),
    ],
)
def test_a_fault_is_found(guard: Path, kind: str, fault: str, error: str) -> None:
    done = walk(guard, kind, fault=fault)
    assert done.returncode != 0
    assert error in done.stderr
