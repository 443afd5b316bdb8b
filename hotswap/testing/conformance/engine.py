"""`EngineConformance`: the contract of every `Engine`."""

from __future__ import annotations

from hotswap.testing.conformance.engine_adapters import AdapterChecks
from hotswap.testing.conformance.engine_eviction import EvictionChecks
from hotswap.testing.conformance.engine_loss import LossChecks
from hotswap.testing.conformance.engine_migration import MigrationChecks
from hotswap.testing.conformance.engine_preload import PreloadChecks
from hotswap.testing.conformance.engine_resize import ResizeChecks
from hotswap.testing.conformance.engine_status import StatusChecks
from hotswap.testing.conformance.engine_streams import StreamChecks
from hotswap.testing.conformance.engine_weights import WeightChecks

__all__ = ["EngineConformance"]


class EngineConformance(
    StreamChecks,
    WeightChecks,
    EvictionChecks,
    LossChecks,
    PreloadChecks,
    AdapterChecks,
    MigrationChecks,
    ResizeChecks,
    StatusChecks,
):
    """Checks every testable promise of `hotswap.engine.Engine`; inherit from it.

    ```python
    class TestMyEngine(EngineConformance):
        models = (Model("a", "/checkpoints/a"), Model("b", "/checkpoints/b"))

        def make_engine(self) -> MyEngine:
            return MyEngine("e0", kv_blocks=64)

        def make_store(self) -> WeightStore:
            return MyStore("/weights")
    ```

    See `EngineSuite` for all hooks. Checks of abilities that the engine lacks are skipped.
    """
