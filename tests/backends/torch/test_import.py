"""Without its libraries the backend raises an error with the package to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules[{library!r}] = None
from hotswap.errors import BackendMissing
try:
    import hotswap.backends.torch
except BackendMissing as error:
    print(error)
"""


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_a_missing_library_is_named_with_the_extra(library: str) -> None:
    command = [sys.executable, "-c", WITHOUT.format(library=library)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert library in said
    assert "pip install 'hotswap[torch]'" in said
