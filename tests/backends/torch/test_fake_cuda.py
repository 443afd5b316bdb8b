"""The path of a GPU runs with tensors without values: nothing of it is read or left on the host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
GUARD = Path(__file__).parent / "fake_cuda" / "guard.cpp"
MODELS = ("llama", "gemma3", "phi3", "gpt_neox", "qwen2", "qwen3_moe", "gpt_oss", "deepseek_v3")
LIVES = (*(f"{name}+life" for name in MODELS), "lfm2+life")
PARTS = (*(f"{name}+fp8" for name in MODELS), "gpt2+steps")
GATHERED = ("llama+gathered", "gpt_oss+gathered", "deepseek_v3+gathered")
FAULTS = {
    "llama+life=a step reads a value": "DataDependentOutputException",
    "llama+gathered=an index stays on the host": "at least two devices",
    "llama+steps=block tables stay on the host": "attend_kernel gets an argument on cpu",
    "llama+steps=a kernel gets an argument on the host": "move_kernel gets an argument on cpu",
    "llama+life=sampling reads the thresholds of a row": "DataDependentOutputException",
    "llama+life=sampling waits for the device twice": "a step waits for the device once",
    "llama+life=penalties stay on the host": "at least two devices",
    "llama+life=a chunk is reused before its copy has ended": "A chunk is reused before its copy has ended",
    "llama+life=a read-only chunk is reused before its copy has ended": "A chunk is reused before its copy",
    "llama+life=a copy does not wait for steps under way": "before the former use of its memory has ended",
    "llama+life=KV blocks leave before their copy has ended": "is read on the host before it has ended",
    "lfm2+life=snapshots of states are read": "DataDependentOutputException",
    "llama+life=KV blocks take the memory of steps": "a preload fits beside it",
    "llama+life=an unload keeps the weights": "MemoryNotReclaimed",
}

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


@pytest.fixture(scope="module")
def walks(guard: Path) -> dict[str, Any]:
    """What each walk launched, and its error, all of one process."""
    command = [sys.executable, "-m", "tests.backends.torch.fake_cuda.walk", str(guard)]
    done = subprocess.run(
        [*command, *LIVES, *PARTS, *GATHERED, *FAULTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("walk", LIVES)
def test_models_are_loaded_serve_move_and_are_swapped_on_the_device(walks: dict[str, Any], walk: str) -> None:
    """Load, preload beside steps, sampling with one read a step, moves, reuse, swaps and unloads."""
    assert not walks[walk]["error"]
    # Two loads try the kernel both ways, then full blocks move, and the rest.
    assert walks[walk]["launches"]["move_kernel"] >= 4 + 4


@pytest.mark.parametrize("walk", [*PARTS, *GATHERED])
def test_steps_adapters_fp8_and_copies_of_kv_blocks_stay_on_the_device(
    walks: dict[str, Any], walk: str
) -> None:
    """Prompts, decodes and both mixed; two adapters; KV blocks cleared, copied, saved and restored."""
    assert not walks[walk]["error"]
    kernels = walks[walk]["launches"]
    assert kernels["move_kernel"] == 2, "KV blocks are saved and restored by one launch each"
    for kernel in ("attend_kernel", "sum_kernel", "pack_kernel", "append_kernel"):
        assert (kernel in kernels) == (walk not in GATHERED)
    assert kernels["expand_kernel"]
    assert ("fp8_gemm_kernel" in kernels) == walk.endswith("+fp8")


@pytest.mark.parametrize("walk", FAULTS)
def test_a_fault_is_found(walks: dict[str, Any], walk: str) -> None:
    assert FAULTS[walk] in walks[walk]["error"]
