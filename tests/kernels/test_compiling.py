"""The disk cache of numba kernels: other processes use it, and unusable files are compiled again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotswap.kernels import compiling

# Runs kernels for dtypes, one after the other, and compares them with PyTorch.
_RUN = """
import logging
import sys
import torch
import numba.core.compiler as compiler
from hotswap.kernels import packed_linear, paged_attention
from hotswap.kernels.paged_attention.reference import attend_reference

def refuse(*_, **__):
    raise AssertionError("this must come from the cache")

def integers(values):
    return torch.tensor(values, dtype=torch.int32)

def attends(dtype):
    torch.manual_seed(0)
    queries = torch.randn(5, 4, 16)
    keys, values = torch.randn(2, 3, 2, 16, 16).to(dtype)
    rows = paged_attention.Rows(integers([[2, 1]]), integers([[0, 0, 5]]), integers([0, 1, 2, 3, 4]))
    seen = paged_attention.Seen(integers([0] * 5), integers([20] * 5))
    found = paged_attention.attend(queries, keys, values, rows, seen, scale=0.3)
    expected = attend_reference(queries, keys, values, rows, seen, scale=0.3)
    return torch.allclose(found, expected.float(), atol=1e-3)

def multiplies(dtype):
    weight, hidden = torch.randn(40, 100).to(dtype), torch.randn(9, 100).to(dtype)
    found = packed_linear.linear_packed(hidden, packed_linear.pack(weight), weight.shape)
    return torch.allclose(found.float(), hidden.float() @ weight.float().t(), rtol=1e-2, atol=1e-2)

class Count(logging.Handler):
    times = 0
    def emit(self, record):
        self.times += record.getMessage().startswith("Kernels are compiled")

count = Count()
logging.getLogger("hotswap").addHandler(count)
logging.getLogger("hotswap").setLevel(logging.INFO)
expectation, *names = sys.argv[1:]
if expectation == "cached":
    compiler.compile_extra = refuse
for name in names:
    dtype = getattr(torch, name)
    assert attends(dtype), name
    assert not packed_linear.supported(dtype) or multiplies(dtype), name
pool, rows = torch.zeros(2, 1, 16, 4), torch.arange(8.0).view(1, 2, 4)
paged_attention.append(rows, pool, torch.tensor([1, 0]), torch.tensor([3, 5]))
assert torch.equal(pool[1, 0, 3], rows[0, 0]) and torch.equal(pool[0, 0, 5], rows[0, 1])
assert count.times == (expectation == "compiled"), "it is told once, and only if it takes long"
"""

# Lets a kernel allocate more memory than the process may have.
_STARVE = """
import resource
from pathlib import Path
import torch
from hotswap.kernels.low_rank import add_low_rank

def make(width):
    ones, out = torch.ones(1, width), torch.zeros(1, 8)
    down, up = torch.zeros(8, width), torch.ones(8, 8)
    down[:, 0] = 1
    return lambda: add_low_rank(ones, out, down, up, torch.tensor([[0, 0, 8]], dtype=torch.int32)) or out

torch.set_num_threads(1)
assert (make(64)() == 8).all()
work = make(1 << 24)
size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size_bytes + (32 << 20), hard))
try:
    work()
except MemoryError as exc:
    print("MemoryError", exc)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert (work() == 8).all()
"""


def run(cache: Path, expectation: str, *dtypes: str, **others: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, expectation, *dtypes],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)} | others,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_kernels_compiled_by_several_processes_are_cached_without_confusion(tmp_path: Path) -> None:
    """numba numbers symbol names by process, so the first two processes use the same names."""
    run(tmp_path, "compiled", "float32")
    run(tmp_path, "compiled", "bfloat16")
    run(tmp_path, "cached", "float32", "bfloat16")
    run(tmp_path, "cached", "bfloat16", "float32")


@pytest.mark.parametrize("size", [0, 100])
def test_truncated_files_are_compiled_again(tmp_path: Path, size: int) -> None:
    run(tmp_path, "compiled")
    kept = [path for path in tmp_path.rglob("*") if path.suffix in {".nbi", ".nbc"}]
    assert kept
    for path in kept:
        os.truncate(path, size)
    run(tmp_path, "compiled")
    run(tmp_path, "cached")


def test_kernels_are_compiled_without_a_writable_folder() -> None:
    nowhere = Path(os.devnull) / "nowhere"
    run(nowhere, "compiled", HOME=str(nowhere), XDG_CACHE_HOME=str(nowhere))


def test_the_cache_key_depends_on_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> str:
        compiling._state.cache_clear()
        return compiling._state()

    before = state()
    assert state() == before
    source = tmp_path / "folder" / "kernel.py"
    source.parent.mkdir()
    monkeypatch.setattr(compiling, "_FOLDER", tmp_path)
    states = [state()]
    for text in ("a", "b"):
        source.write_text(text)
        states.append(state())
    monkeypatch.undo()
    assert len({before, *states}) == 4
    assert state() == before


def test_specializations_of_one_function_have_separate_files() -> None:
    def function(x: int) -> int:
        return x

    files = {compiling._Cache(function, name)._cache_file._index_path for name in ("a", "b", "a")}
    assert len(files) == 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm of Linux")
def test_a_kernel_that_runs_out_of_memory_raises() -> None:
    done = subprocess.run([sys.executable, "-c", _STARVE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("MemoryError")
