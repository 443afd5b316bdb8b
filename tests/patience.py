"""How long tests wait for what should happen at once."""

from typing import Final

__all__ = ["PATIENCE_S"]

PATIENCE_S: Final = 600.0
"""After which a thread or process of a test is given up: it hangs, however busy the machine is."""
