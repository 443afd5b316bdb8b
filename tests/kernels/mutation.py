"""Plants faults in copies of the kernels and runs the checks that must detect them, in a separate process.

    TRITON_INTERPRET=1 python -m tests.kernels.mutation KERNEL

Slow imports are done once; each fault runs in a process forked from this one. Writes a line of JSON for each
fault: its name, and whether it was found. A check of each file runs on a copy without a fault too, so that
none is found because the copy lacks something; `test_interpreted` runs all checks on the sound kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis  # noqa: F401 - imported for the processes that are forked
import pytest
import torch
import triton.language  # noqa: F401

from tests.house.tree import PACKAGE, ROOT
from tests.kernels.mutants import Mutant, mutants_of


def main(kernel: str) -> None:
    mutants = mutants_of(kernel)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        shutil.copytree(PACKAGE, copy / "hotswap", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests" / "kernels", copy / "tests" / "kernels")
        shutil.copytree(ROOT / "tests" / "house", copy / "tests" / "house")
        for name in ("tests/conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, copy / name)
        for check in {mutant.check.partition("::")[0]: mutant.check for mutant in mutants}.values():
            _report(f"sound: {check}", found=_fails(copy, check))
        for mutant in mutants:
            _report(mutant.name, found=_found(copy, mutant))


def _found(copy: Path, mutant: Mutant) -> bool:
    """Plant a fault and return whether its check fails."""
    place = copy / "hotswap" / "kernels" / mutant.file
    sound = place.read_text(encoding="utf-8")
    if mutant.before not in sound:
        raise ValueError(f"{mutant.file} has no {mutant.before!r} any more: plant {mutant.name!r} elsewhere.")
    place.write_text(sound.replace(mutant.before, mutant.after, 1), encoding="utf-8")
    try:
        return _fails(copy, mutant.check)
    finally:
        place.write_text(sound, encoding="utf-8")


def _fails(copy: Path, check: str) -> bool:
    """Whether a check fails or crashes, in a forked process that imports the copy."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(_run(copy, check))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code > 1:
        raise RuntimeError(f"{check!r} could not be run: pytest ended with {code}.")
    return code != 0


def _run(copy: Path, check: str) -> int:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.chdir(copy)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hotswap", "tests")]:
        del sys.modules[name]
    options = ["-q", "-x", "--assert=plain", "-p", "no:cacheprovider", f"--rootdir={copy}"]
    return int(pytest.main([*options, f"tests/kernels/interpreted/{check}"]))


def _report(name: str, *, found: bool) -> None:
    sys.stdout.write(json.dumps({"name": name, "found": found}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
