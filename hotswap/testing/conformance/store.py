"""`WeightStoreConformance`: the contract of every `WeightStore`."""

from __future__ import annotations

from hotswap.testing.conformance.store_prefetch import PrefetchChecks
from hotswap.testing.conformance.store_reading import ReadingChecks

__all__ = ["WeightStoreConformance"]


class WeightStoreConformance(ReadingChecks, PrefetchChecks):
    """Checks every testable promise of `hotswap.store.WeightStore`; inherit from it.

    ```python
    class TestMyStore(WeightStoreConformance):
        models = (ModelId("a"), ModelId("b"))

        def make_store(self) -> MyStore:
            return MyStore("/weights")
    ```

    See `StoreSuite` for all hooks. Checks of abilities that the store lacks are skipped.
    """
