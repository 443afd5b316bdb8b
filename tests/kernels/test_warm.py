"""`hotswap warm` compiles ahead what loads would compile, and later processes find it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from hotswap import kernels
from hotswap.errors import ConfigError
from hotswap.kernels.warm import Kernel, kernels_for, warm

LOAD = """
import logging
logging.basicConfig(level="INFO", format="%(message)s")
from hotswap.kernels.warm import Kernel
Kernel("fused", "float32").compile()
"""


def test_a_later_process_compiles_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", LOAD]
    before = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "other")},
    )
    assert "compiled for this processor" in before.stderr, "without `warm` it says what takes time"
    (ready,) = warm([Kernel("fused", "float32")], processes=1)
    assert ready.kernel == Kernel("fused", "float32")
    assert ready.seconds > 0
    after = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "compiled for this processor" not in after.stderr


def test_every_kernel_for_this_cpu_is_compiled_ahead() -> None:
    packages = {module.name for module in iter_modules(kernels.__path__) if module.ispkg}
    compiling = {
        name for name in packages if hasattr(import_module(f"hotswap.kernels.{name}"), "compile_for")
    }
    assert {kernel.package for kernel in kernels_for()} >= compiling - {"packed_linear"}
    assert {kernel.dtype for kernel in kernels_for()} == {"float32", "bfloat16"}


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        kernels_for(["float64"])


def test_the_command_tells_what_is_ready() -> None:
    command = [sys.executable, "-m", "hotswap.cli", "warm", "--dtype", "float32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = set(json.loads(done.stdout)["kernels"])
    assert told == {f"{kernel.package} float32" for kernel in kernels_for(["float32"])}
